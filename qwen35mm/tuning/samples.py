"""What is trained on: questions with their right answers, and which of them are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen35mm.contract import Message

# One in so many groups is held out, but at least one.
_HELD_OUT = 10


@dataclass(frozen=True)
class Sample:
    """A question and its right answer.

    Attributes:
        name: for messages: a medium's name, or a chat's title.
        messages: the question, with its media and what was said before.
        reasoning: the answer's thinking.
        group: 32 bytes; samples of one group share a picture or a chat, so they are held out together.
        edited: whether a person has written or changed the answer.
    """

    name: str
    messages: tuple[Message, ...]
    answer: str
    group: bytes
    reasoning: str = ""
    edited: bool = False


@dataclass
class Found:
    """Samples, and what can't be one.

    Attributes:
        skipped: names, each with a sentence for a person.
        num_bare: media without a caption.
    """

    samples: list[Sample] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    num_bare: int = 0


def hold_out(groups: Sequence[bytes]) -> list[bool]:
    """Whether each sample is held out, by its group alone: new samples change nothing for those that stay.

    About one in ten. If the digests choose none, the group with the smallest digest; never all groups.
    """
    order = sorted(set(groups), key=lambda group: hashlib.sha256(b"held out" + group).digest())
    chosen = {group for group in order if hashlib.sha256(b"held out" + group).digest()[0] * _HELD_OUT < 256}
    chosen = chosen or set(order[:1])
    if len(chosen) == len(order):
        chosen = set(order[:1]) if len(order) > 1 else set()
    return [group in chosen for group in groups]


def shares(edited: Sequence[bool], edited_weight: float) -> list[float]:
    """How much each sample counts: edited ones `edited_weight` times as much as others, all of them 1 on average."""
    raw = [edited_weight if each else 1.0 for each in edited]
    mean = sum(raw) / len(raw)
    return [each / mean for each in raw]
