"""What a run would do, and what it would cost: looks at every item, and captions a few without keeping anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.ledger import Known
from qwen35mm.captioning.looks import Look, Looks
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.media.worker import Decode, Encode, Failed
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.outputs import Sidecars, Wants
from qwen35mm.captioning.run import RunSettings
from qwen35mm.errors import CaptioningError, OutputError, Qwen35mmError
from qwen35mm_preprocess import MediaError

_NUM_TRIED = 3
_LOOKS_AT_ONCE = 8


@dataclass
class Estimate:
    """What a run would do.

    Attributes:
        num_to_caption: items that the model would have to see.
        num_known: items whose caption is kept already.
        num_kept: items with somebody else's text.
        num_failed_before: items that failed for a reason that lasts.
        num_unreadable: items that can't be read, and why.
        num_media_tokens: of the media to caption, at most.
        num_tried: items that were captioned to see how long that takes.
        tokens_per_item: generated for one of them.
        remaining_s: for all that is to caption; None where nothing could be tried.
        examples: their names and captions.
    """

    num_to_caption: int = 0
    num_known: int = 0
    num_kept: int = 0
    num_failed_before: int = 0
    num_unreadable: int = 0
    num_media_tokens: int = 0
    num_tried: int = 0
    tokens_per_item: float = 0.0
    remaining_s: float | None = None
    examples: tuple[tuple[str, str], ...] = ()


async def estimate(
    entries: Iterable[Item | Unreadable],
    looks: Looks,
    captioner: Captioner,
    workers: MediaWorkers,
    manifest: Manifest,
    sidecars: Sequence[Sidecars],
    has_others: bool,
    settings: RunSettings,
) -> Estimate:
    """Looks at every item.

    Args:
        sidecars: the outputs that may hold somebody else's text.
        has_others: whether there are other outputs, which want every item.
    """
    found = Estimate()
    to_try: list[Look] = []
    async with aclosing(_looked_at(entries, looks, sidecars, has_others)) as results:
        async for result in results:
            if isinstance(result, Wants):
                found.num_kept += 1
            elif isinstance(result, Failed | Unreadable):
                found.num_unreadable += 1
            else:
                known = await asyncio.to_thread(Known.of, result.key, manifest, retry_failed=settings.retry_failed)
                if known.caption is not None:
                    found.num_known += 1
                elif known.failure is not None:
                    found.num_failed_before += 1
                elif settings.limit is None or found.num_to_caption < settings.limit:
                    found.num_to_caption += 1
                    found.num_media_tokens += 0 if result.plan is None else result.plan.num_prompt_tokens
                    if len(to_try) < _NUM_TRIED:
                        to_try.append(result)
    await _try(found, to_try, captioner, workers, settings)
    return found


async def _looked_at(
    entries: Iterable[Item | Unreadable], looks: Looks, sidecars: Sequence[Sidecars], has_others: bool
) -> AsyncGenerator[Look | Failed | Unreadable | Wants, None]:
    """What each entry is: a look; why it can't be one; or that a person's text is there."""

    async def one(entry: Item | Unreadable) -> Look | Failed | Unreadable | Wants:
        if isinstance(entry, Unreadable):
            return entry
        try:
            wants = await asyncio.to_thread(lambda: [each.wants(entry, None) for each in sidecars])
        except OutputError:
            raise
        except CaptioningError as error:
            if not has_others:
                return Failed("output", str(error))
            wants = []
        is_kept = bool(wants) and not has_others and all(want is Wants.KEPT for want in wants)
        return Wants.KEPT if is_kept else await looks.look(entry)

    remaining = iter(entries)
    while batch := await asyncio.to_thread(lambda: list(islice(remaining, _LOOKS_AT_ONCE))):
        for result in await asyncio.gather(*map(one, batch)):
            yield result


async def _try(
    found: Estimate, looks: Sequence[Look], captioner: Captioner, workers: MediaWorkers, settings: RunSettings
) -> None:
    """Captions a few items one after the other, and reckons from the later ones: the first also warms everything up."""
    seconds: list[float] = []
    num_tokens, examples = 0, []
    for look in looks:
        began = monotonic()
        try:
            if settings.encodes is not None:
                medium = await workers.do(Encode(look.item, look.content, settings.encodes))
                if isinstance(medium, Failed):
                    continue
                plan = medium.plan
            elif settings.sends_files:
                medium, plan = look.item.read(), look.plan
            else:
                decoded = await workers.do(Decode(look.item, look.content, with_similarity=False))
                if isinstance(decoded, Failed):
                    continue
                medium, plan = decoded.media, decoded.media.plan
            assert plan is not None
            caption = await captioner.caption(look.item, medium, plan, look.content, look.question, look.system)
        except (Qwen35mmError, MediaError, OSError):
            continue
        seconds.append(monotonic() - began)
        num_tokens += caption.num_generated_tokens
        examples.append((look.item.name, caption.text))
    if seconds:
        later = seconds[1:] or seconds
        found.num_tried = len(seconds)
        found.tokens_per_item = num_tokens / len(seconds)
        found.remaining_s = found.num_to_caption * sum(later) / len(later)
        found.examples = tuple(examples)
