"""The user's own folders and files."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Literal


def user_folder(kind: Literal["cache", "data"]) -> Path | None:
    """The platform's folder for the user's files that can be made again (`cache`) or can't (`data`).

    Doesn't create it; None for a user without a home.
    """
    try:
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            folder = Path(local) if local else Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            folder = Path.home() / "Library" / ("Caches" if kind == "cache" else "Application Support")
        else:
            # The XDG base directory specification says to ignore relative paths.
            folder = Path(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))
            if not folder.is_absolute():
                folder = Path.home() / (".cache" if kind == "cache" else ".local/share")
    except RuntimeError:  # Path.home() finds none
        return None
    return folder / "qwen35mm"


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read: beside it, then renamed. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
