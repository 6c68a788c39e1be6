"""Prompts: one of several questions for each medium, with its placeholders filled."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.texts.templates import Template
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaKind

_HEADER = re.compile(r"(weight|name)\s*:(.*)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Question:
    """A prompt, perhaps with placeholders.

    Attributes:
        text: the question about an image, and about a video if `video_text` is None.
        weight: how often it is chosen, relative to the other questions of a run.
        video_text: the question about a video.
        verbatim: whether the answer is text that was read from the medium, and isn't cleaned.
        lines: whether the answer's line breaks matter.
        name: of the caption among several of one medium; empty if the question is one to choose from.
        adapter: the named adapter that answers, in a preview; None for the model alone.

    Raises:
        CaptioningError: an empty text, a weight that isn't a finite number above 0, or a name that can't be one.
    """

    text: str
    weight: float = 1.0
    video_text: str | None = None
    verbatim: bool = False
    lines: bool = False
    name: str = ""
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.text.strip() or (self.video_text is not None and not self.video_text.strip()):
            raise CaptioningError("A prompt is empty. Give it a text, or leave it out.")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CaptioningError(f"A prompt's weight must be a number above 0; got {self.weight}.")
        if self.name and not _NAME.fullmatch(self.name):
            raise CaptioningError(
                f"A prompt's name becomes part of file names: up to 32 letters, digits, - or _; got {self.name!r}."
            )

    def wording(self, kind: MediaKind) -> str:
        """The question about a medium of this kind."""
        return self.text if kind == "image" or self.video_text is None else self.video_text


class PromptSet:
    """The questions of a run and its system prompt.

    Each text is a `Template`.

    Args:
        questions: at least one.
        system: the system prompt, which may have placeholders too; empty for none.
        seed: decides which item gets which question.

    Raises:
        CaptioningError: no question, an unknown placeholder, a brace that is neither doubled nor a placeholder's, or
            names that aren't all different.
    """

    def __init__(self, questions: Sequence[Question], *, system: str = "", seed: int = 0) -> None:
        if not questions:
            raise CaptioningError("A captioning run needs a prompt; got none.")
        self.questions = tuple(questions)
        self.styles = _styles(questions)
        self.system = system
        self.seed = seed
        texts = {system} | {text for q in self.questions for text in (q.text, q.video_text) if text is not None}
        self._templates = {text: Template(text) for text in texts}
        self._needs = frozenset[str]().union(*(template.needs() for template in self._templates.values()))

    def needs(self) -> frozenset[str]:
        """The `PLACEHOLDERS` in any question or in the system prompt.

        Without any of `FACTS` among them, a run needn't look at every medium.
        """
        return self._needs

    def choose(self, content: bytes) -> Question:
        """A medium's question, if it gets one of several; the same for the same content in every run with this seed.

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
        return self._templates[question.wording(item.kind)].fill(item, facts)

    def fill_system(self, item: Item, facts: Mapping[str, Any] | None = None) -> str:
        """The system prompt for this item; arguments and errors as in `fill`."""
        return self._templates[self.system].fill(item, facts)

    def defaulted(self, question: Question, item: Item, facts: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The placeholders of the question and the system prompt whose default this item takes."""
        asked, system = self._templates[question.wording(item.kind)], self._templates[self.system]
        return asked.defaulted(item, facts) + system.defaulted(item, facts)


def read_prompt_file(path: Path) -> list[Question]:
    """The questions in a file of UTF-8 text.

    Lines `---` separate questions; without one, the file is a single question. First lines such as `weight: 2` and
    `name: short` set a question's weight and name.

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
            given: dict[str, str] = {}
            while lines and (header := _HEADER.fullmatch(lines[0].strip())) and header[1].lower() not in given:
                given[header[1].lower()] = header[2].strip()
                del lines[0]
            weight = _weight(given["weight"]) if "weight" in given else 1.0
            questions.append(Question("\n".join(lines).strip(), weight, name=given.get("name", "")))
        except CaptioningError as error:
            raise CaptioningError(f"Prompt {number} of {name}: {error}") from error
    return questions


def _styles(questions: Sequence[Question]) -> tuple[str, ...]:
    """The names of the captions that every medium gets; empty if it gets one. Raises CaptioningError."""
    names = [question.name for question in questions]
    if not any(names):
        return ()
    if not all(names):
        raise CaptioningError(
            "Each medium gets the captions of all prompts with names (--preset tags,short, or 'name: ...' in a prompt "
            "file), but only one of the prompts without names. Give all of them names, or none."
        )
    folded = [name.lower() for name in names]
    if twice := next((name for name in folded if folded.count(name) > 1), None):
        raise CaptioningError(f"Two prompts have the name {twice!r}: their captions would go to one place. Rename one.")
    if any(question.weight != 1 for question in questions):
        raise CaptioningError("Prompts with names are all asked, so they take no weight.")
    return tuple(names)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CaptioningError(f"A prompt's weight must be a number above 0; got {text!r}.") from None
