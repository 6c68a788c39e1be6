"""Where a program of this person keeps what can be made again."""

from __future__ import annotations

from pathlib import Path

from qwen35mm.folders import user_folder
from qwen35mm.settings import ModelOptions


def cache_folder(model: ModelOptions) -> Path | None:
    """Where what can be made again is kept, of a program that only this person uses; None for nowhere."""
    return None if model.no_disk_cache else model.cache_dir or user_folder("cache")
