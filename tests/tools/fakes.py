"""The fake server's configuration, for tests of every layer."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35mm.tools.config import ToolServer

SERVER = Path(__file__).with_name("fake_server.py")


def fake(folder: Path, name: str = "fake", **values: object) -> ToolServer:
    """A server that logs its starts to `folder`; see `told`. It starts in 20 ms, since it reads no packages."""
    return ToolServer(name, sys.executable, ("-S", "-E", str(SERVER), str(folder / f"{name}.log")), **values)  # pyright: ignore[reportArgumentType]


def num_starts(folder: Path, name: str = "fake") -> int:
    return (folder / f"{name}.log").read_text().count("started")


def redescribe(folder: Path, words: str) -> None:
    """Changes the description of the fake's tools."""
    with (folder / "fake.log").open("a") as file:
        file.write(f"{words}\n")
