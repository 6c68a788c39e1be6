"""A chat whose every word is fixed, so that all engines answer the same prompts: one picture, then text upon text."""

from __future__ import annotations

import argparse
import base64
import io
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from qwen35mm.config import ModelConfig
from qwen35mm.contract import Image, Message, Text
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, ChatTemplate, Prompt, PromptBuilder
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaBudget, MediaProcessor, read_processing

# Words of the bundled demo model's vocabulary, a token or two each.
TEXT = (
    "the picture shows a red circle and blue square that moves to right while green triangle changes color video what "
    "is happening first then shape becomes yellow star one two three how many objects are there now please describe"
)
WORDS = TEXT.split(" ")


@dataclass(frozen=True)
class Turn:
    question: str
    reasoning: str
    reply: str


class ScriptedChat:
    """Questions, thinking and replies of some turns, and the prompts that a checkpoint makes of them; no weights.

    The texts are sized with the tokenizer of the model under test; the same sizes give the same texts. The thinking of
    replies isn't part of later prompts, as the family's templates have it.

    Args:
        arguments: `model`, `device`, `turns`, `history_tokens` (about, of the last prompt), `image_side` (pixels of the
            square picture in the first turn) and `thinking` (whether replies think).
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = arguments.model
        self.config = ModelConfig.from_pretrained(folder)
        self._tokenizer = Tokenizer.from_pretrained(folder)
        self._template = ChatTemplate.from_pretrained(folder)
        media = MediaProcessor(
            *read_processing(folder), budget=MediaBudget.for_device(torch.device(arguments.device).type)
        )
        self._image = self.picture(arguments.image_side)
        self.media = media.prepare(self._image, kind="image")
        self.thinking: bool = arguments.thinking
        per_turn = max((arguments.history_tokens - self.media.plan.num_tokens) // arguments.turns, 12)
        words = random.Random(0)
        self.turns = [self._make_turn(words, per_turn) for _ in range(arguments.turns)]

    @staticmethod
    def picture(side: int, seed: int = 0) -> PILImage.Image:
        """A square of noise."""
        return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))

    def messages(self, turn: int) -> list[Message]:
        """What turn `turn` (from 1) answers."""
        assert 1 <= turn <= len(self.turns)
        messages: list[Message] = []
        for number, scripted in enumerate(self.turns[:turn], start=1):
            text = Text(scripted.question)
            # The plan is part of a stored chat.
            picture = Image(self._image, self.media.plan if turn > 1 else None)
            messages.append(Message("user", (picture, text) if number == 1 else (text,)))
            if number < turn:
                messages.append(self._reply(scripted))
        return messages

    def builder(self, min_segment: int = DEFAULT_MIN_SEGMENT) -> PromptBuilder:
        return PromptBuilder(self._tokenizer, self._template, self.config, min_segment=min_segment)

    def prompt(self, turn: int, min_segment: int = DEFAULT_MIN_SEGMENT) -> Prompt:
        """The prompt of turn `turn`."""
        plans = [self.media.plan]
        return self.builder(min_segment).prompt(self.messages(turn), plans, enable_thinking=self.thinking)

    def num_extending(self) -> int:
        """For how many turns the prompt begins with all of the one before, whose cache could then be gone on from."""
        ids = [self.prompt(turn).token_ids.tolist() for turn in range(1, len(self.turns) + 1)]
        return sum(longer[: len(shorter)] == shorter for shorter, longer in pairwise(ids))

    def history(self, turn: int) -> list[Message]:
        """The prompt of turn `turn` with its reply."""
        return [*self.messages(turn), self._reply(self.turns[turn - 1])]

    def openai_messages(self, turn: int) -> list[dict[str, Any]]:
        """`messages(turn)` for a server: the picture as a data URI."""
        messages: list[dict[str, Any]] = []
        for message in self.messages(turn):
            content: list[dict[str, Any]] = []
            for part in message.content:
                if isinstance(part, Text):
                    content.append({"type": "text", "text": part.text})
                else:
                    content.append({"type": "image_url", "image_url": {"url": _data_uri(self._image)}})
            messages.append({"role": message.role, "content": content if message.role == "user" else message.text})
        return messages

    def _make_turn(self, words: random.Random, num_tokens: int) -> Turn:
        """Short and long questions; a few tokens go to the template's marks."""
        num_question = int(num_tokens * words.uniform(0.1, 0.6))
        return Turn(
            question=self._text(words, num_question - 4),
            reasoning=self._text(words, num_tokens // 2),
            reply=self._text(words, num_tokens - num_question - 4),
        )

    def _text(self, words: random.Random, num_tokens: int) -> str:
        """Words until there are `num_tokens` tokens of them, at least one word."""
        text = words.choice(WORDS)
        while len(self._tokenizer.encode_plain(text)) < num_tokens:
            text += " " + words.choice(WORDS)
        return text

    def _reply(self, turn: Turn) -> Message:
        return Message("assistant", (Text(turn.reply),), reasoning=turn.reasoning if self.thinking else None)


def _data_uri(image: PILImage.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
