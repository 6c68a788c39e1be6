"""Captions and records: what every output writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypedDict

from qwen35mm.captioning.items import Item
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaKind, MediaPlan
from qwen35mm_preprocess.say import Saying, english

# A plan's notes on media that aren't seen completely, and their flags. A flag's kind is the part before the colon.
MEDIUM_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "{n} of {m} frames could not be decoded and {n|is|are} left out.": "frames lost: {n} of {m}",
        "{name} seems to be cut off: {n} of its {m} frames could be read.": "cut off: {n} of {m} frames",
        "{name} seems to be cut off: it announces {m} s, its frames end at {n} s.": "cut off: {n} of {m} s",
        "{name} holds {n} pictures; the first is used.": "first page only: 1 of {n}",
    }
)
_MEDIUM_KINDS = frozenset(flag.partition(":")[0] for flag in MEDIUM_FLAGS.values())


class Judged(TypedDict):
    """A sentence or tag of a caption, and how likely the model finds it true of the medium.

    `score` is from 0 to 1; None if the model said neither yes nor no.
    """

    sentence: str
    score: float | None


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The model's caption of one medium, cleaned and checked. It is stored under its key, not under a file's name.

    Records have its fields in this order.

    Attributes:
        text: the caption, with prefix and suffix; for a JSON schema, the JSON text.
        others: the texts of the medium's further captions, by their names; see `combined`.
        data: the value of the JSON; None without a schema.
        kind, width, height, duration_s: of the medium, in pixels and seconds; a picture has no duration.
        sharpness, letterbox: how the medium looks; see `measures`. None if it wasn't decoded.
        prompt: the question as the model got it.
        model: the model's name.
        flags: what a person should know: `truncated`, `repetition removed`, `missing: WORD`, `forbidden: WORD`,
            `doubted`, `not judged`, `edited` (by a person), and those of the medium: `cut off: 3 of 5 frames`,
            `frames lost: 1 of 8`, `first page only: 1 of 3`.
        judged: its sentences or tags with scores; None if not judged.
        shared_from: the name of the near-duplicate whose caption this is; None if the model saw the medium itself.
        num_prompt_tokens, num_generated_tokens: of all attempts.
        num_attempts: replies up to this one.
        seconds: the model's time for all attempts.
        prefill_s: seconds to the first token of the first attempt.
    """

    text: str
    others: Mapping[str, str] = field(default_factory=dict)
    data: Any = None
    kind: MediaKind
    width: int
    height: int
    duration_s: float | None = None
    sharpness: float | None = None
    letterbox: float | None = None
    prompt: str
    model: str
    flags: tuple[str, ...] = ()
    judged: tuple[Judged, ...] | None = None
    shared_from: str | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_attempts: int = 1
    seconds: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """One item's caption, for the outputs.

    Attributes:
        key: 32 bytes that identify the work: content, prompt, model and settings.
        content: 32 bytes, SHA-256 of the medium's bytes.
        trigger: the trigger word that stays first when the caption is added to a person's text; empty for none.
    """

    item: Item
    key: bytes
    content: bytes
    caption: Caption
    trigger: str = ""

    def pieces(self) -> Iterator[bytes]:
        """The medium's bytes. Raises CaptioningError if they can't be read or, at the end, have changed."""
        sha256 = hashlib.sha256()
        with still_there(self.item):
            for piece in self.item.pieces():
                sha256.update(piece)
                yield piece
        if sha256.digest() != self.content:
            raise CaptioningError(f"{printable(self.item.name)} was changed after it was captioned. Run again.")

    def to_dict(self) -> dict[str, Any]:
        """The record's fields, as JSON values."""
        path, part = self.item.path, self.item.part
        values = {
            "name": printable(self.item.name),
            "path": None if path is None else printable(str(path)),
            **({} if part is None else {"part": part.number, "start_s": part.start_s, "end_s": part.end_s}),
            "caption": self.caption.text,
            **{caption_field(name): text for name, text in self.caption.others.items()},
            **vars(self.caption),
            "flags": list(self.caption.flags),
            "judged": None if self.caption.judged is None else list(self.caption.judged),
            "sha256": self.content.hex(),
            "metadata": dict(self.item.metadata),
        }
        inner = ("text", "others", "num_attempts", "seconds", "prefill_s")
        return {name: value for name, value in values.items() if value is not None and name not in inner}


@contextlib.contextmanager
def still_there(item: Item) -> Iterator[None]:
    """Raises CaptioningError if the item's medium can't be read any more."""
    try:
        yield
    except OSError as error:
        raise CaptioningError(
            f"{printable(item.name)} can't be read any more: it was moved, removed or locked. Run again."
        ) from error


def medium_facts(item: Item, plan: MediaPlan) -> dict[str, Any]:
    """The fields of a caption that describe its medium."""
    height, width = plan.source_size
    duration_s = plan.duration_s
    if item.part is not None and not item.part.is_clip:
        duration_s = round(item.part.end_s - item.part.start_s, 3)
    return {"kind": item.kind, "width": width, "height": height, "duration_s": duration_s}


def medium_flags(plan: MediaPlan) -> tuple[str, ...]:
    """Flags for the parts of a medium that weren't seen."""
    said = [note for note in plan.notes if isinstance(note, dict)]
    texts = [(MEDIUM_FLAGS.get(note["text"]), note["values"]) for note in said]
    return tuple(english(Saying(text=text, values=values)) for text, values in texts if text is not None)


def shared(caption: Caption, name: str, item: Item, plan: MediaPlan) -> Caption:
    """The caption of the near-duplicate `name` for another item, with that item's size and without costs."""
    flags = (*medium_flags(plan), *(flag for flag in caption.flags if flag.partition(":")[0] not in _MEDIUM_KINDS))
    free = {"num_attempts": 1, "num_prompt_tokens": 0, "num_generated_tokens": 0, "seconds": 0.0, "prefill_s": 0.0}
    return replace(caption, **medium_facts(item, plan), **free, flags=flags, shared_from=name)


def caption_field(name: str) -> str:
    """The field of records with a medium's further caption of this name."""
    return f"caption_{name}"


def combined(captions: Mapping[str, Caption]) -> Caption:
    """Several captions of one medium, by name, as one: the first, with the texts of the others, and what all cost."""
    (_, first), *others = captions.items()
    every = tuple(captions.values())
    judged = None
    if all(each.judged is not None for each in every):
        judged = tuple(sentence for each in every for sentence in each.judged or ())
    return replace(
        first,
        others={name: each.text for name, each in others},
        flags=tuple(dict.fromkeys(flag for each in every for flag in each.flags)),
        judged=judged,
        num_prompt_tokens=sum(each.num_prompt_tokens for each in every),
        num_generated_tokens=sum(each.num_generated_tokens for each in every),
        num_attempts=sum(each.num_attempts for each in every),
        seconds=sum(each.seconds for each in every),
    )


def apart(caption: Caption, name: str) -> Caption:
    """The caption of this name in a combined one; the first for any other name."""
    if name not in caption.others:
        return replace(caption, others={})
    data = None if caption.data is None else json.loads(caption.others[name])
    return replace(caption, text=caption.others[name], others={}, data=data)


def edited(caption: Caption, text: str) -> Caption:
    """A caption with a person's text, without the flags and judgements of the model's text.

    Raises:
        ValueError, RecursionError: the caption is JSON, but the text isn't.
    """
    data = None if caption.data is None else json.loads(text)
    flags = (*(flag for flag in caption.flags if flag.partition(":")[0] in _MEDIUM_KINDS), "edited")
    return replace(caption, text=text, data=data, flags=flags, judged=None, shared_from=None)


def printable(name: str) -> str:
    """A file name as text that can be encoded: bytes that aren't UTF-8 appear as in `b'\\xff'`."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half surrogate pairs, which Windows allows
        return name.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """A name or a caption for a terminal, without control characters."""
    return "".join(char if char.isprintable() else " " for char in printable(text))
