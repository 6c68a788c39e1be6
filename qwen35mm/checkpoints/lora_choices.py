"""Which adapters a model is to be used with, as a person writes it. Nothing here needs PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35mm.errors import ConfigError

_MAX_SCALE = 1e6


@dataclass(frozen=True)
class LoraChoice:
    """An adapter's folder, and its share: 1 as it was trained, 0 as if it weren't there."""

    folder: Path
    scale: float = 1.0

    def absolute(self) -> LoraChoice:
        return replace(self, folder=self.folder.absolute())

    def __str__(self) -> str:
        return f"{self.folder}" if self.scale == 1 else f"{self.folder}={self.scale:g}"


Loras = str | Path | LoraChoice | Iterable[str | Path | LoraChoice] | None


def read_choices(given: Loras) -> tuple[LoraChoice, ...]:
    """The adapters of `--lora` or of `load`'s `lora`: FOLDER or FOLDER=SCALE, one or several.

    Raises:
        ConfigError: one has no folder, or no number for its scale.
    """
    if given is None:
        return ()
    several = [given] if isinstance(given, str | Path | LoraChoice) else list(given)
    return tuple(_read_choice(each) for each in several)


def _read_choice(given: object) -> LoraChoice:
    if isinstance(given, LoraChoice):
        return given
    if isinstance(given, Path):
        return LoraChoice(given.expanduser())
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"An adapter is a folder, or FOLDER=SCALE such as my-adapter=0.5; got {given!r}.")
    folder, mark, scale = given.strip().rpartition("=")
    # A folder may have the mark in its name.
    if not mark or Path(given).expanduser().is_dir():
        return LoraChoice(Path(given.strip()).expanduser())
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not folder or not abs(number) <= _MAX_SCALE:
        raise ConfigError(
            f"An adapter is a folder, or FOLDER=SCALE with a number, such as my-adapter=0.5; got '{given}'."
        )
    return LoraChoice(Path(folder).expanduser(), number)
