"""What a model reads while its gates are trained: conversations about media, and text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.cases import answer_text, sample_case
from qwen35mm.evaluation.skills import clips, recall
from qwen35mm.evaluation.skills.base import Sample
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess.formats import suffixes_of

# Tokens of a text.
_LEAST, _MOST = 300, 1500
# Characters that hold as many, with any tokenizer.
_CHARS = 16_000


@dataclass(frozen=True)
class Conversations:
    """Conversations by number, always the same for a number: every other one is text, the rest is about media.

    Without files of one's own, the text is Python's reference, and the others are the bundled model's exercises: facts,
    pictures and clips, and questions about them later.

    Attributes:
        text: what to read; None for Python's reference.
        media: files of pictures and videos.
        blind: whether the model reads no media.
    """

    text: str | None
    media: Sequence[Path]
    blind: bool
    seed: int

    @classmethod
    def of(cls, text: str | None, folder: Path | None, *, blind: bool, seed: int) -> Conversations:
        """Reads a folder's media, if there is one.

        Raises:
            ConfigError: there is no text, there are no media, or the model doesn't read them.
        """
        if text is not None and not text.strip():
            raise ConfigError("The text to read is empty.")
        media: list[Path] = []
        if folder is not None:
            known = suffixes_of("image") | suffixes_of("video")
            media = sorted(path for path in folder.rglob("*") if path.suffix.lower() in known)
            if blind or not media:
                why = "this model reads text alone" if blind else "it holds no pictures and no videos"
                raise ConfigError(f"The folder of media '{folder.name}' can't be used: {why}.")
        return cls(text, media, blind, seed)

    def make(self, number: int, loaded: LoadedModel) -> list[Message]:
        """A conversation that ends with a reply."""
        rng = random.Random(f"gates {self.seed} {number}")
        if number % 2 or self.blind:
            return [_said("user", self._passage(rng, loaded)), _said("assistant", "I have read it.")]
        if not self.media:
            return _exercise(rng)
        path = rng.choice(self.media)
        medium = (Video if path.suffix.lower() in suffixes_of("video") else Image)(path)
        asked = Message("user", (medium, Text(self._passage(rng, loaded))))
        return [asked, _said("assistant", "I have seen and read it.")]

    def _passage(self, rng: random.Random, loaded: LoadedModel) -> str:
        text = self.text or _reference(rng)
        start = rng.randrange(max(len(text) - _CHARS, 1))
        ids = loaded.tokenizer.encode_plain(text[start : start + _CHARS])
        return loaded.tokenizer.decode(ids[: rng.randint(_LEAST, _MOST)])


def _said(role: Literal["user", "assistant"], text: str) -> Message:
    return Message(role, (Text(text),))


def _reference(rng: random.Random) -> str:
    """Some pages of Python's reference, which every installation has: English and code."""
    from pydoc_data.topics import topics

    pages = sorted(topics)
    return "\n\n".join(topics[page] for page in rng.sample(pages, 8))


def _exercise(rng: random.Random) -> list[Message]:
    """Facts or a clip, then turns about other things and pictures, then a question about the first."""
    between = rng.randint(200, 1200)
    if rng.random() < 0.75:
        sample = recall.sample_with(rng, "seen", rng.choice((1, 5, 10, 20, 30)), told=True, between=between)
    else:
        parts = [rng.choice(clips.SKILLS).sample(rng, "seen"), *recall.other_turns(rng, "seen", between)]
        sample = Sample([message for part in parts for message in part.messages])
    case = sample_case(rng, "gates", sample)
    answer = _said("assistant", answer_text(sample.messages[-1]))
    return [*(Message.from_dict(message) for message in case.messages), answer]
