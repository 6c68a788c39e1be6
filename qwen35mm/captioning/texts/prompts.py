"""Prompts: one of several questions for each medium, with its placeholders filled."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import printable
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaKind

PLACEHOLDERS = ("name", "stem", "folder", "width", "height", "duration", "sidecar", "metadata")
"""The placeholders of prompts; `metadata` takes a key, as in `{metadata.title}`."""

FACTS = frozenset({"width", "height", "duration", "sidecar"})
"""The placeholders that need a look at the medium or its sidecar."""

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WEIGHT = re.compile(r"weight\s*:(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A prompt, perhaps with placeholders.

    Attributes:
        text: the question about an image, and about a video if `video_text` is None.
        weight: how often it is chosen, relative to the other questions of a run.
        video_text: the question about a video.
        verbatim: whether the answer is text that was read from the medium, and isn't cleaned.
        lines: whether the answer's line breaks matter.

    Raises:
        CaptioningError: an empty text, or a weight that isn't a finite number above 0.
    """

    text: str
    weight: float = 1.0
    video_text: str | None = None
    verbatim: bool = False
    lines: bool = False

    def __post_init__(self) -> None:
        if not self.text.strip() or (self.video_text is not None and not self.video_text.strip()):
            raise CaptioningError("A prompt is empty. Give it a text, or leave it out.")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CaptioningError(f"A prompt's weight must be a number above 0; got {self.weight}.")

    def wording(self, kind: MediaKind) -> str:
        """The question about a medium of this kind."""
        return self.text if kind == "image" or self.video_text is None else self.video_text


@dataclass(frozen=True)
class _Placeholder:
    """`written` is a name of `PLACEHOLDERS`; `metadata` includes its key."""

    written: str
    default: str | None


class PromptSet:
    """The questions of a run and its system prompt.

    `{name}`, `{stem}`, `{folder}`, `{width}`, `{height}`, `{duration}` (in seconds, such as 12.4), `{sidecar}` and
    `{metadata.KEY}` stand for the item's values; dots in KEY lead into nested objects. In `{sidecar|DEFAULT}`, the
    default replaces a missing or empty value. Without a default, a missing value fails the item. `{{` and `}}` are
    braces. Values are inserted as they are, and their braces have no meaning.

    Args:
        questions: at least one.
        system: the system prompt, which may have placeholders too; empty for none.
        seed: decides which item gets which question.

    Raises:
        CaptioningError: no question, an unknown placeholder, or a brace that is neither doubled nor a placeholder's.
    """

    def __init__(self, questions: Sequence[Question], *, system: str = "", seed: int = 0) -> None:
        if not questions:
            raise CaptioningError("A captioning run needs a prompt; got none.")
        self.questions = tuple(questions)
        self.system = system
        self.seed = seed
        texts = {system} | {text for q in self.questions for text in (q.text, q.video_text) if text is not None}
        self._templates = {text: _parse(text) for text in texts}

    def needs(self) -> frozenset[str]:
        """The `PLACEHOLDERS` in any question or in the system prompt.

        Without any of `FACTS` among them, a run needn't look at every medium.
        """
        parts = [part for template in self._templates.values() for part in template]
        return frozenset(part.written.partition(".")[0] for part in parts if isinstance(part, _Placeholder))

    def choose(self, content: bytes) -> Question:
        """A medium's question; the same for the same content in every run with this seed.

        Each question draws a number from the seed, the content and its index, and the best draw for its weight wins
        (weighted rendezvous hashing). So a question that is added at the end takes its share from the others and moves
        nothing else, and a changed wording is new work only for its own items.

        Args:
            content: the digest of the medium's bytes.
        """

        def draw(index: int) -> float:
            digest = hashlib.sha256(f"{self.seed} {index} ".encode() + content).digest()
            uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
            return -math.log(uniform) / self.questions[index].weight

        if len(self.questions) == 1:
            return self.questions[0]
        return self.questions[min(range(len(self.questions)), key=draw)]

    def fill(self, question: Question, item: Item, facts: Mapping[str, Any] | None = None) -> str:
        """A question's text for this item, in the wording for its kind.

        Args:
            facts: JSON values of `FACTS`, such as width and height in pixels, as displayed; a missing value is None.
                `facts` may be None if `needs()` contains none of them.

        Raises:
            CaptioningError: the item lacks the value of a placeholder without a default.
        """
        return self._fill(question.wording(item.kind), item, facts)

    def fill_system(self, item: Item, facts: Mapping[str, Any] | None = None) -> str:
        """The system prompt for this item; arguments and errors as in `fill`."""
        return self._fill(self.system, item, facts)

    def _fill(self, text: str, item: Item, facts: Mapping[str, Any] | None) -> str:
        if all(isinstance(part, str) for part in self._templates[text]):
            return "".join(map(str, self._templates[text]))
        assert facts is not None or not self.needs() & FACTS, "needs() says that these prompts have to know the medium"
        values = {"name": printable(item.name), "stem": printable(item.stem), "folder": printable(item.folder)}
        values |= {"metadata": item.metadata, **(facts or {})}
        return "".join(part if isinstance(part, str) else _value(part, item, values) for part in self._templates[text])


def read_prompt_file(path: Path) -> list[Question]:
    """The questions in a file of UTF-8 text.

    Lines `---` separate questions; without one, the file is a single question. A first line such as `weight: 2` sets a
    question's weight.

    Raises:
        CaptioningError: the file can't be read, isn't UTF-8, has an empty question or a weight that isn't a number
            above 0.
    """
    name = printable(path.name)
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CaptioningError(f"The prompt file {name} isn't UTF-8 text. Save it as UTF-8.") from error
    except OSError as error:
        raise CaptioningError(f"The prompt file {name} can't be read: {error.strerror}.") from error
    questions = []
    for number, part in enumerate(re.split(r"^---[ \t]*$", text, flags=re.MULTILINE), 1):
        lines = part.strip().split("\n")
        try:
            weight = 1.0
            if given := _WEIGHT.fullmatch(lines[0].strip()):
                weight = _weight(given[1].strip())
                del lines[0]
            questions.append(Question("\n".join(lines).strip(), weight))
        except CaptioningError as error:
            raise CaptioningError(f"Prompt {number} of {name}: {error}") from error
    return questions


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CaptioningError(f"A prompt's weight must be a number above 0; got {text!r}.") from None


def _parse(text: str) -> tuple[str | _Placeholder, ...]:
    parts: list[str | _Placeholder] = []
    end = 0
    for match in _BRACES.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        if match[1] is not None:
            parts.append(_placeholder(match[1]))
        elif match[0] in ("{{", "}}"):
            parts.append(match[0][0])
        else:
            raise CaptioningError(
                f"The prompt has a single {match[0]!r} after {text[: match.start()][-20:]!r}. Write it twice for a "
                f"brace: {match[0] * 2}"
            )
    parts.append(text[end:])
    return tuple(part for part in parts if part)


def _placeholder(inner: str) -> _Placeholder:
    written, bar, default = inner.partition("|")
    name, dot, key = written.partition(".")
    if name not in PLACEHOLDERS or bool(dot) != (name == "metadata") or (dot and not key):
        known = ", ".join("{metadata.KEY}" if known == "metadata" else f"{{{known}}}" for known in PLACEHOLDERS)
        raise CaptioningError(f"Unknown placeholder {{{written}}}. Known are {known}; write literal braces twice.")
    return _Placeholder(written, default if bar else None)


def _value(placeholder: _Placeholder, item: Item, values: Mapping[str, Any]) -> str:
    value = _as_text(_look_up(values, placeholder.written))
    if placeholder.default is not None and not value:
        return placeholder.default
    if value is None:
        raise CaptioningError(
            f"The prompt asks for {{{placeholder.written}}}, which {printable(item.name)} doesn't have. Give the "
            f"placeholder a default, as in {{{placeholder.written}|unknown}}, or leave the item out."
        )
    return value


def _look_up(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key whose dots belong to it or lead into nested objects; None if there is none."""
    if key in values:
        return values[key]
    head, _, rest = key.partition(".")
    inner = values.get(head)
    return _look_up(inner, rest) if rest and isinstance(inner, Mapping) else None


def _as_text(value: Any) -> str | None:
    """A JSON value as a person would write it: a flat list with commas, any other list or object as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and not any(isinstance(part, list | tuple | Mapping | None) for part in value):
        return ", ".join(_as_text(part) or "" for part in value)
    return json.dumps(value, ensure_ascii=False)
