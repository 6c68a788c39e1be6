"""The user's cache folder for the commands."""

from __future__ import annotations

from pathlib import Path

from qwen35mm.folders import user_folder
from qwen35mm.settings import ModelOptions


def cache_folder(model: ModelOptions) -> Path | None:
    """The cache folder of a program that only this person uses; None for none."""
    return None if model.no_disk_cache else model.cache_dir or user_folder("cache")
