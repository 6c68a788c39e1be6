"""The command line in this process: a start of Python with torch in it takes longer than most commands."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import typer

from qwen35mm.cli import app, main

Run = Callable[..., "Done"]
# The application would make all commands and their options anew at each call.
COMMAND = typer.main.get_command(app)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def qwen35mm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Runs the command line with arguments, and `stdin` if there is one, for a person without caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("qwen35mm.cli.app", COMMAND)

    def run(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return Done(int(ended.value.code or 0), output.out, output.err)

    return run
