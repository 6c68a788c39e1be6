"""Which adapters a model is to be used with, as a person writes it. Nothing here needs PyTorch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35mm.checkpoints.hub_folders import may_be_hub_id
from qwen35mm.errors import ConfigError

_MAX_SCALE = 1e6
# A name is a model's for clients: visible, and short enough to be told.
_NAME = re.compile(r"[^\s=/][^\s=]{0,199}")


@dataclass(frozen=True)
class LoraChoice:
    """An adapter.

    Attributes:
        source: its folder, or its id on the Hugging Face Hub.
        scale: its share: 1 as it was trained, 0 as if it weren't there.
        name: by which requests choose it; None for a part of the model.
    """

    source: Path | str
    scale: float = 1.0
    name: str | None = None

    def absolute(self) -> LoraChoice:
        return replace(self, source=self.source.absolute()) if isinstance(self.source, Path) else self

    @property
    def title(self) -> str:
        """What a person calls it."""
        source = self.source.name if isinstance(self.source, Path) else self.source
        return self.name or str(replace(self, source=source))

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}="
        return f"{name}{self.source}" if self.scale == 1 else f"{name}{self.source}={self.scale!r}"


_One = str | Path | LoraChoice
Loras = _One | Iterable[_One] | Mapping[str, _One] | None


def read_choices(given: Loras) -> tuple[LoraChoice, ...]:
    """The adapters of `--lora` or of `load`'s `lora`: FOLDER or NAME=FOLDER, each with or without =SCALE; one, several,
    or folders by name. A Hub id may take a folder's place. A text may also be vLLM's JSON, with `name` and `path`.

    Raises:
        ConfigError: one can't be read, or two have the same name.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        found = [_named(str(name), _read_choice(each)) for name, each in given.items()]
    else:
        found = [_read_choice(each) for each in ([given] if isinstance(given, str | Path | LoraChoice) else given)]
    names = [each.name for each in found if each.name is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Two adapters have the name '{twice[0]}': give each another one, as in NAME=FOLDER.")
    return tuple(found)


def _read_choice(given: object) -> LoraChoice:
    if isinstance(given, LoraChoice):
        return given
    if isinstance(given, Path):
        return LoraChoice(given.expanduser())
    if not isinstance(given, str) or not given.strip():
        raise _error(given)
    text, scale = given.strip(), 1.0
    if text.startswith("{"):
        return _read_json(text)
    # A folder may have the mark in its name.
    if "=" in text and not _is_folder(text) and not _is_folder(text.partition("=")[2]):
        rest, _, last = text.rpartition("=")
        if (number := _number(last)) is not None:
            if not rest or not abs(number) <= _MAX_SCALE:
                raise _error(given)
            text, scale = rest, number
    if "=" not in text or _is_folder(text):
        return LoraChoice(_source(text), scale)
    name, _, folder = text.partition("=")
    if not folder:
        raise _error(given)
    return _named(name, LoraChoice(_source(folder), scale))


def _read_json(text: str) -> LoraChoice:
    """vLLM's form; its base_model_name only names the model that it is for."""
    try:
        found = json.loads(text)
        name, path = found["name"], found["path"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _error(text) from None
    if not isinstance(name, str) or not isinstance(path, str) or not path:
        raise _error(text)
    return _named(name, LoraChoice(_source(path)))


def _source(text: str) -> Path | str:
    path = Path(text).expanduser()
    return text if may_be_hub_id(text) and not path.exists() else path


def _named(name: str, choice: LoraChoice) -> LoraChoice:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"An adapter's name has up to 200 letters, digits and signs, no spaces; got {name!r}.")
    return replace(choice, name=name)


def _is_folder(text: str) -> bool:
    return Path(text).expanduser().is_dir()


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return math.inf if math.isnan(number) else number


def _error(given: object) -> ConfigError:
    return ConfigError(
        "An adapter is FOLDER or NAME=FOLDER, and may end with a scale, as in my-adapter=0.5; a Hub id such as "
        f"someone/my-adapter may take the folder's place. Got {given!r:.200}."
    )
