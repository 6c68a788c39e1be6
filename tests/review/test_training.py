"""A training that the review page starts: what it is told, and how it ends. A script stands for `qwen35mm tune`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from qwen35mm.cli.beside import end_with
from qwen35mm.errors import CaptioningError
from qwen35mm.http.sessions import PageToken
from qwen35mm.review.app import create_app
from qwen35mm.review.asking import Asker
from qwen35mm.review.folder import Folder
from qwen35mm.review.training import PROGRAM, Training

WORDS = ["qwen35mm", "tune", "photos", "--out", "photos-adapter"]
EVENTS: list[dict[str, Any]] = [
    {"event": "held_out", "step": 0, "loss": 2.5, "is_best": False},
    {"event": "answer", "name": "a.png", "answer": "red", "wanted": "a red circle"},
    {"event": "planned", "step": 0, "steps": 4, "seconds_left": 9.0},
    {"event": "step", "step": 4, "steps": 4, "loss": None, "seconds_left": 0.0},
    {"event": "held_out", "step": 4, "loss": 0.5, "is_best": True},
    {"event": "answer", "name": "a.png", "answer": "a red circle", "wanted": "a red circle"},
    {"event": "ended", "step": 4, "before": 2.5, "after": 0.5},
]


def training_by(script: str) -> Training:
    return Training(WORDS, (sys.executable, "-I", "-S", "-c", script))


async def ended(training: Training) -> dict[str, Any]:
    assert training._following is not None
    await training._following
    return training.look()


async def test_the_page_is_told_what_the_program_says(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, EVENTS))
    training = training_by(
        f"import sys; print({lines!r}); print('[1]', 'no JSON', sep='\\n'); "
        f"open({str(tmp_path / 'words')!r}, 'w').write(' '.join(sys.argv[1:])); "
        "sys.stderr.write('1%\\r2%\\rTakes a minute.\\n' + 'x' * 50_000)"
    )
    assert training.look()["state"] == "none"
    await training.start(restart=True, accepted=True)
    found = await ended(training)
    assert (found["state"], found["command"], found["adapter"]) == ("done", " ".join(WORDS), "photos-adapter")
    assert (found["before"], found["after"], found["steps"]) == (2.5, 0.5, 4)
    assert [each["loss"] for each in found["losses"]] == [2.5, 0.5]
    assert [(each["before"], each["answer"]) for each in found["answers"]] == [("red", "a red circle")]
    assert found["said"][:3] == ["1%", "2%", "Takes a minute."]
    assert len(found["said"][3]) == 10_000
    assert (tmp_path / "words").read_text() == "tune photos --out photos-adapter --json --accepted --restart"


WAITS = f"import sys; print({json.dumps(EVENTS[2])!r}, flush=True); sys.stdin.read(); sys.exit(130)"


async def test_it_is_stopped_and_resumed_and_a_failure_is_told() -> None:
    training = training_by("import sys; sys.stderr.write('Error: it does not fit.\\n'); sys.exit(1)")
    await training.start()
    assert ((await ended(training))["state"], training.look()["said"]) == ("failed", ["Error: it does not fit."])
    training = training_by(WAITS)
    # Two requests at one time, as of two tabs.
    await asyncio.gather(training.start(accepted=True), training.start())
    child = training._child
    while training.look()["state"] != "training":
        await asyncio.sleep(0)
    assert training.look()["accepted"]
    await training.stop()
    assert (training.look()["state"], child is not None and child.returncode) == ("stopped", 130)
    await asyncio.gather(training.start(), training.stop())
    assert training._child is not child
    assert training.look()["state"] == "stopped"
    missing = Training(WORDS, ("/there/is/none",))
    with pytest.raises(CaptioningError, match="can't be started: No such file"):
        await missing.start()
    assert missing.look()["state"] == "failed"


async def test_it_ends_with_the_page(tmp_path: Path) -> None:
    training = training_by(WAITS)
    asker = Asker(lambda: pytest.fail("nothing is asked"), lambda _: pytest.fail("nothing is asked"))
    app = create_app(Folder(tmp_path, suffix=".txt"), asker, training=training, token=PageToken())
    async with app.router.lifespan_context(app):
        await training.start()
    assert training._child is not None
    assert training._child.returncode == 130


def test_the_program_reads_no_code_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('a stranger ran')")
    command = [*PROGRAM, "tune", "--help"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert b"--restart" in child.stdout.read()


def test_the_program_ends_when_its_input_does() -> None:
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read, "rb") as stream, pytest.raises(KeyboardInterrupt):
        _wait_for_end(stream)


def _wait_for_end(stream: IO[bytes]) -> None:
    end_with(stream)
    for _ in range(10**8):
        pass
