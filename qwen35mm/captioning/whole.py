"""Captions of whole videos from those of their parts: a list with times, or a summary by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.progress import clock
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest

WholeKind = Literal["timeline", "summary"]

SUMMARY = (
    "These are descriptions of the parts of one video, in order, each with its start and end. Write one paragraph that "
    "says what happens in the whole video, from beginning to end. Name only what the descriptions say, and each thing "
    "once. Don't speak of parts, descriptions or times. Answer with the paragraph alone."
)
TIMELINE = "The captions of its parts"
# Longer lists of captions are summarized in groups first: about 6,000 tokens.
_MOST_CHARS = 24_000


@dataclass(frozen=True)
class Told:
    """What is said of a part of a video; see `Part` for its times."""

    start_s: float
    end_s: float
    text: str

    def __str__(self) -> str:
        return f"{clock(self.start_s)}-{clock(self.end_s)} {' '.join(self.text.split())}"


def told_of(parts: Sequence[tuple[Item, Caption]]) -> list[Told]:
    """The captions of parts with their times."""
    return [Told(item.part.start_s, item.part.end_s, caption.text) for item, caption in parts if item.part is not None]


def question_of(kind: WholeKind, told: Sequence[Told]) -> str:
    """The question about the whole video; for a timeline nobody is asked, and it only identifies the work."""
    return "\n".join([SUMMARY if kind == "summary" else TIMELINE, "", *map(str, told)])


def facts_of(parts: Sequence[tuple[Item, Caption]], num_parts: int, duration_s: float) -> Caption:
    """The caption of a whole video without its text: its size and duration, and a flag if captions are missing."""
    first = parts[0][1]
    flags = () if len(parts) == num_parts else (f"parts missing: {num_parts - len(parts)} of {num_parts}",)
    return Caption(
        text="",
        kind="video",
        width=first.width,
        height=first.height,
        duration_s=duration_s,
        prompt=TIMELINE,
        model=first.model,
        flags=flags,
    )


def timeline(facts: Caption, told: Sequence[Told]) -> Caption:
    """The captions of all parts with their times, a line each."""
    return replace(facts, text="\n".join(map(str, told)))


async def summarized(
    captioner: Captioner, request: CaptionRequest, facts: Caption, told: Sequence[Told]
) -> Caption | Failed:
    """The model's summary of a video from the captions of its parts."""
    level, costs = list(told), [0, 0]
    while True:
        groups = _groups(level)
        made: list[Told] = []
        for group in groups:
            caption = await captioner.answer(replace(request, question=question_of("summary", group)), facts)
            if isinstance(caption, Failed):
                return caption
            costs = [costs[0] + caption.num_prompt_tokens, costs[1] + caption.num_generated_tokens]
            if len(groups) == 1:
                num_prompt_tokens, num_generated_tokens = costs
                tokens = {"num_prompt_tokens": num_prompt_tokens, "num_generated_tokens": num_generated_tokens}
                return replace(caption, prompt=SUMMARY, **tokens)
            made.append(Told(group[0].start_s, group[-1].end_s, caption.text))
        level = made


def _groups(told: Sequence[Told]) -> list[list[Told]]:
    """Groups that follow each other, none too long, each but the last with at least two."""
    groups: list[list[Told]] = [[]]
    num_chars = 0
    for each in told:
        each = replace(each, text=each.text[: _MOST_CHARS // 2])
        if num_chars + len(str(each)) > _MOST_CHARS and len(groups[-1]) > 1:
            groups.append([])
            num_chars = 0
        groups[-1].append(each)
        num_chars += len(str(each))
    return groups
