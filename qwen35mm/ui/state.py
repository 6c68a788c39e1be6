"""One browser session's conversation: what was asked, what was answered, and what of it the model sees next."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qwen35mm.engine.events import Channel, Progress, Result
from qwen35mm.prompt import Message, Text, pin_plans
from qwen35mm_preprocess import MediaPlan

if TYPE_CHECKING:
    from qwen35mm.ui.run import ReplyRun

ReplyStatus = Literal["running", "finished", "stopped", "failed"]


@dataclass
class Reply:
    """An answer, while it grows and afterwards.

    Attributes:
        thinking_s: seconds from the first to the last word of thinking; None while it goes on, or without any.
        notes: what of the media was reduced, dropped or unreadable, in words for a person.
        error: why there is no answer, or no more of it, in words for a person.
    """

    status: ReplyStatus = "running"
    reasoning: str = ""
    answer: str = ""
    thinking_s: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    progress: Progress | None = None
    result: Result | None = None
    _thinking_since_s: float | None = field(default=None, repr=False)

    def add(self, text: str, channel: Channel) -> None:
        """Appends text that just came."""
        self.progress = None
        if channel == "reasoning":
            self._thinking_since_s = self._thinking_since_s or time.monotonic()
            self.reasoning += text
        else:
            self.end_thinking()
            self.answer += text

    def end_thinking(self) -> None:
        """Fixes the time spent on thinking; called once there is an answer, or no more to come."""
        if self.thinking_s is None and self._thinking_since_s is not None:
            self.thinking_s = time.monotonic() - self._thinking_since_s


@dataclass
class Turn:
    """A question with its files, and the reply to it.

    `message` is made when the files are first read, and gets the media plans as soon as they are known.
    """

    text: str
    files: tuple[Path, ...] = ()
    message: Message | None = None
    reply: Reply = field(default_factory=Reply)

    @property
    def is_kept(self) -> bool:
        """Whether later prompts hold this turn: one without an answer would spoil, or fail, every one of them."""
        return self.message is not None and bool(self.reply.answer) and self.reply.status != "running"


class Conversation:
    """The turns of one session, and the reply in progress."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.run: ReplyRun | None = None
        # Made when first asked for: each session starts from a copy of one empty conversation.
        self._id: str | None = None
        self._tenant: str | None = None

    @property
    def id(self) -> str:
        """What the backend knows this conversation by; another one after `clear`."""
        if self._id is None:
            self._id = secrets.token_hex(16)
        return self._id

    @property
    def tenant(self) -> str:
        """What the backend keeps this session's cache apart by, where people share a server; secret, and never
        another one as long as the page is open."""
        if self._tenant is None:
            self._tenant = secrets.token_hex(16)
        return self._tenant

    def begin(self, text: str, files: Sequence[Path]) -> Turn:
        """Adds a question whose reply is to come."""
        turn = Turn(text, tuple(files))
        self.turns.append(turn)
        return turn

    def clear(self) -> None:
        """Forgets everything; a reply in progress is stopped."""
        self.stop()
        self.turns.clear()
        self._id = None

    def stop(self) -> None:
        """Ends the reply in progress, if there is one. Call it in the event loop that the reply runs in."""
        if self.run is not None:
            self.run.stop()

    def prompt_turns(self, last: Turn) -> list[Turn]:
        """The turns that the model sees when it answers `last`."""
        return [turn for turn in self.turns if turn is not last and turn.is_kept] + [last]


def prompt_messages(turns: Sequence[Turn]) -> list[Message]:
    """The turns as messages, up to the last one's question."""
    messages: list[Message] = []
    for turn, question in zip(turns, _questions(turns), strict=True):
        messages.append(question)
        if turn is not turns[-1]:
            messages.append(Message("assistant", (Text(turn.reply.answer),), reasoning=turn.reply.reasoning or None))
    return messages


def pin_turns(turns: Sequence[Turn], plans: Sequence[MediaPlan]) -> None:
    """Stores the plans, one for each medium in order of appearance: later prompts then see the same pixels."""
    for turn, message in zip(turns, pin_plans(_questions(turns), plans), strict=True):
        turn.message = message


def _questions(turns: Sequence[Turn]) -> list[Message]:
    messages = [turn.message for turn in turns if turn.message is not None]
    assert len(messages) == len(turns), "a turn without its message"
    return messages
