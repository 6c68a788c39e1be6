"""Where a program may keep things, as each platform has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache_folder() -> Path | None:
    """The person's folder for what can be made again, not made yet; None for a user without a home."""
    try:
        return _caches() / "qwen35mm"
    except RuntimeError:  # Path.home() finds none
        return None


def user_data_folder() -> Path | None:
    """The person's folder for what can't be made again, not made yet; None for a user without a home."""
    try:
        return _data() / "qwen35mm"
    except RuntimeError:
        return None


def _data() -> Path:
    if sys.platform == "win32":
        return _caches()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".local" / "share"


def _caches() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"
