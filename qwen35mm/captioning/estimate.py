"""Estimates what a run would do and cost: looks at every item, and captions a few without storing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Failed, Item, Unreadable
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.parts import Splitter
from qwen35mm.captioning.records import Caption, medium_facts
from qwen35mm.captioning.requests import CaptionRequest
from qwen35mm.captioning.where import Where, item_facts, size_facts

_NUM_TRIED = 3
_LOOKS_AT_ONCE = 8


@dataclass
class Estimate:
    """What a run would do.

    Attributes:
        num_to_caption: items that need the model.
        num_known: items with a stored caption.
        num_to_judge: items of these whose caption has yet to be judged.
        num_kept: items with another person's text.
        num_failed_before: items that failed for a lasting reason.
        num_unreadable: items that can't be read.
        num_filtered: items whose size or name `where` leaves out.
        num_media_tokens: the most tokens of the media to caption.
        num_tried: items that were captioned to measure the speed.
        tokens_per_item: generated tokens for each of them.
        remaining_s: seconds for all items to caption; None if nothing could be tried.
        examples: names and captions of the tried items.
    """

    num_to_caption: int = 0
    num_known: int = 0
    num_to_judge: int = 0
    num_kept: int = 0
    num_failed_before: int = 0
    num_unreadable: int = 0
    num_filtered: int = 0
    num_media_tokens: int = 0
    num_tried: int = 0
    tokens_per_item: float = 0.0
    remaining_s: float | None = None
    examples: tuple[tuple[str, str], ...] = ()


async def estimate(
    entries: Iterable[Item | Unreadable],
    ledger: Ledger,
    captioner: Captioner,
    workers: MediaWorkers,
    *,
    limit: int | None,
    splitter: Splitter | None = None,
    where: Where | None = None,
) -> Estimate:
    """Looks at every item.

    Args:
        ledger: of a borrowed manifest; its requests have plans.
        limit: the most items that the run would caption.
        splitter: splits videos, without cutting clips out; None for whole videos.
    """
    found = Estimate()
    to_try: list[CaptionRequest] = []
    remaining = iter(entries)
    while batch := await asyncio.to_thread(lambda: list(islice(remaining, _LOOKS_AT_ONCE))):
        if splitter is not None:
            whole = (entry for entry in batch if isinstance(entry, Item))
            read = [entry for entry in batch if isinstance(entry, Unreadable)]
            batch = [*read, *[part for item in whole async for part in splitter.of(item)]]
        items = [entry for entry in batch if isinstance(entry, Item)]
        found.num_unreadable += len(batch) - len(items)
        for needs in await asyncio.gather(*map(ledger.needs, items)):
            if isinstance(needs, Failed):
                found.num_unreadable += 1
            elif isinstance(needs, Wants):
                found.num_kept += needs is Wants.KEPT
                found.num_known += needs is Wants.DONE
            elif where is not None and _is_left_out(needs, where):
                found.num_filtered += 1
            elif isinstance(known := await ledger.known(needs), Caption):
                found.num_known += 1
                found.num_to_judge += ledger.lacks_judgement(known)
            elif isinstance(known, Failed):
                found.num_failed_before += 1
            elif limit is None or found.num_to_caption < limit:
                assert needs.plan is not None
                found.num_to_caption += 1
                found.num_media_tokens += needs.plan.num_prompt_tokens
                if len(to_try) < _NUM_TRIED:
                    to_try.append(needs)
    await _try(found, to_try, captioner, workers, judges=ledger.judge_below is not None)
    return found


def _is_left_out(request: CaptionRequest, where: Where) -> bool:
    """Whether what is known of an item without decoding it leaves it out."""
    facts = item_facts(request.item)
    if request.plan is not None:
        medium = medium_facts(request.item, request.plan)
        facts |= size_facts(medium["width"], medium["height"], medium["duration_s"])
    return where.holds(facts) is False


async def _try(
    found: Estimate, requests: Sequence[CaptionRequest], captioner: Captioner, workers: MediaWorkers, *, judges: bool
) -> None:
    """Captions a few items one by one, and estimates from all but the first, which includes the warm-up."""
    seconds: list[float] = []
    num_tokens, examples = 0, []
    for request in requests:
        captions: list[Caption] = []
        began = monotonic()
        prepared = None
        if captioner.form is not None:
            prepared = await workers.prepare(request.item, request.content, captioner.form)
        asked = () if isinstance(prepared, Failed) else tuple(request.styles.values()) or (request,)
        for each in asked:
            assert not isinstance(prepared, Failed)
            caption = await captioner.caption(each, prepared, judges=judges)
            if isinstance(caption, Caption):
                captions.append(caption)
        if not captions:
            continue
        seconds.append(monotonic() - began)
        num_tokens += sum(caption.num_generated_tokens for caption in captions)
        examples += [(request.item.name, caption.text) for caption in captions]
    if seconds:
        later = seconds[1:] or seconds
        found.num_tried = len(seconds)
        found.tokens_per_item = num_tokens / len(seconds)
        found.remaining_s = found.num_to_caption * sum(later) / len(later)
        found.examples = tuple(examples)
