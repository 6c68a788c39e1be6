"""A chat whose every word is fixed, so that all engines answer the same prompts: one picture, then text upon text."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image as PILImage

from qwen35mm.prompt import Image, Message, Text
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaPlan

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
    """Questions, thinking and replies of `num_turns` turns; the last prompt has about `history_tokens` tokens.

    The texts are sized with the tokenizer of the model under test; the same sizes give the same texts.

    Args:
        plan: of the picture; it is part of the message after the first turn, as in a stored chat.
        image_side: pixels of the square picture in the first turn.
        thinking: whether replies think; their thinking isn't part of later prompts, as the family's templates have it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_turns: int,
        history_tokens: int,
        plan: MediaPlan,
        image_side: int,
        thinking: bool,
    ) -> None:
        self.thinking = thinking
        self._image = self.picture(image_side)
        self._plan = plan
        per_turn = max((history_tokens - plan.num_tokens) // num_turns, 12)
        words = random.Random(0)
        self.turns = [self._make_turn(tokenizer, words, per_turn) for _ in range(num_turns)]

    @staticmethod
    def picture(side: int, seed: int = 0) -> PILImage.Image:
        """A square of noise."""
        return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))

    def prompt(self, turn: int) -> list[Message]:
        """What turn `turn` (from 1) answers."""
        assert 1 <= turn <= len(self.turns)
        messages: list[Message] = []
        for number, scripted in enumerate(self.turns[:turn], start=1):
            text = Text(scripted.question)
            picture = Image(self._image, self._plan if turn > 1 else None)
            messages.append(Message("user", (picture, text) if number == 1 else (text,)))
            if number < turn:
                messages.append(self._reply(scripted))
        return messages

    def history(self, turn: int) -> list[Message]:
        """The prompt of turn `turn` with its reply."""
        return [*self.prompt(turn), self._reply(self.turns[turn - 1])]

    def openai_messages(self, turn: int) -> list[dict[str, Any]]:
        """`prompt(turn)` for a server: the picture as a data URI."""
        messages: list[dict[str, Any]] = []
        for message in self.prompt(turn):
            content: list[dict[str, Any]] = []
            for part in message.content:
                if isinstance(part, Text):
                    content.append({"type": "text", "text": part.text})
                else:
                    content.append({"type": "image_url", "image_url": {"url": _data_uri(self._image)}})
            messages.append({"role": message.role, "content": content if message.role == "user" else message.text})
        return messages

    @staticmethod
    def _make_turn(tokenizer: Tokenizer, words: random.Random, num_tokens: int) -> Turn:
        """Short and long questions; a few tokens go to the template's marks."""
        num_question = int(num_tokens * words.uniform(0.1, 0.6))
        return Turn(
            question=_text(tokenizer, words, num_question - 4),
            reasoning=_text(tokenizer, words, num_tokens // 2),
            reply=_text(tokenizer, words, num_tokens - num_question - 4),
        )

    def _reply(self, turn: Turn) -> Message:
        return Message("assistant", (Text(turn.reply),), reasoning=turn.reasoning if self.thinking else None)


def _data_uri(image: PILImage.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _text(tokenizer: Tokenizer, words: random.Random, num_tokens: int) -> str:
    """Words until there are `num_tokens` tokens of them, at least one word."""
    text = words.choice(WORDS)
    while len(tokenizer.encode_plain(text)) < num_tokens:
        text += " " + words.choice(WORDS)
    return text
