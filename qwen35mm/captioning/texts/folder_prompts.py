"""`prompt.txt` and `trigger.txt` of folders: their media's own prompts and trigger word."""

from __future__ import annotations

import functools
from pathlib import Path

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.texts.prompts import PromptSet, read_prompt_file
from qwen35mm.captioning.texts.templates import Template, trigger_of
from qwen35mm.errors import CaptioningError

PROMPT_FILE = "prompt.txt"
TRIGGER_FILE = "trigger.txt"


class FolderPrompts:
    """The prompts and trigger words of folders. They hold for subfolders without their own.

    A file is read once.

    Args:
        prompts: for media without a prompt file; its system prompt and seed hold for all.
    """

    def __init__(self, prompts: PromptSet) -> None:
        self._default = prompts
        self._read_prompts = functools.lru_cache(1024)(self._prompts_in)
        self._read_trigger = functools.lru_cache(1024)(_trigger_in)

    def prompts(self, item: Item) -> PromptSet:
        """Raises CaptioningError: the prompt file can't be used, or the medium's text file would take its place."""
        found = (self._read_prompts(folder) for folder in _folders(item))
        return next((prompts for prompts in found if prompts is not None), self._default)

    def trigger(self, item: Item) -> Template | None:
        """The folder's trigger word; None if it has none. Raises CaptioningError as `prompts`."""
        return next((word for folder in _folders(item) if (word := self._read_trigger(folder)) is not None), None)

    def _prompts_in(self, folder: Path) -> PromptSet | None:
        path = folder / PROMPT_FILE
        if not path.is_file():
            return None
        try:
            return PromptSet(read_prompt_file(path), system=self._default.system, seed=self._default.seed)
        except CaptioningError as error:
            raise _in_file(path, error) from error


def _trigger_in(folder: Path) -> Template | None:
    path = folder / TRIGGER_FILE
    if not path.is_file():
        return None
    try:
        return trigger_of(path.read_text("utf-8-sig").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise CaptioningError(f"{_shown(path)} can't be read as UTF-8 text. Check it.") from error
    except CaptioningError as error:
        raise _in_file(path, error) from error


def _folders(item: Item) -> list[Path]:
    """The folders of an item's file, its own first, up to its source."""
    if item.path is None:
        return []
    for name in (PROMPT_FILE, TRIGGER_FILE):
        if f"{item.stem}.txt".casefold() == name:
            raise CaptioningError(
                f"The text file of {printable(item.name)} would be {name}, which is for the whole folder. Rename the "
                "medium, or leave --folder-prompts out."
            )
    return list(item.path.parents)[: len(item.below.parts)]


def _in_file(path: Path, error: CaptioningError) -> CaptioningError:
    return CaptioningError(f"{_shown(path)}: {error} Then run again with --retry-failed.")


def _shown(path: Path) -> str:
    return printable("/".join(path.parts[-2:]))
