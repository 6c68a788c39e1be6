"""The progress of loading: a bar on a terminal, lines in the log elsewhere, and nothing for a quick model."""

from __future__ import annotations

import io
import logging
import math

import pytest
from rich.console import Console

from qwen35mm.cli import loading


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    """What is written while ten of ten bytes are read, one by one."""
    screen = io.StringIO()
    how = {"file": screen, "force_terminal": terminal, "width": 80, "color_system": None}
    monkeypatch.setattr("rich.console.Console", lambda stderr: Console(**how))
    with loading.shown_loading() as report:
        for done in range(1, 11):
            report(done, 10)
    return screen.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loading, "_SILENT_S", math.inf)
    assert shown(monkeypatch, terminal=True) == "", "it was quick"
    monkeypatch.setattr(loading, "_SILENT_S", -1.0)
    written = shown(monkeypatch, terminal=True)
    assert "Loading the weights" in written
    assert "100%" in written
    assert written.endswith("\x1b[2K"), "the line is erased"
    assert not caplog.records


def test_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loading, "LOG_S", math.inf)
    assert shown(monkeypatch, terminal=False) == ""
    assert not caplog.records, "it was quick"
    monkeypatch.setattr(loading, "LOG_S", -1.0)
    assert shown(monkeypatch, terminal=False) == ""
    assert [record.getMessage() for record in caplog.records][-2:] == [
        "Loading the weights: 90 %",
        "Loading the weights: 100 %",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
