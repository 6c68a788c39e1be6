"""Several replies to one request. Each waits in the queue; the later ones hit the first's prompt in the cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from qwen35mm.contract import Event, Finished, GenerationRequest, MediaPlanned, Prefilled, TextDelta, pin_plans
from qwen35mm_preprocess import MediaPlan

MAX_CHOICES = 8


@dataclass(frozen=True)
class OfChoice:
    """An event of one of a request's replies."""

    index: int
    event: Event


async def events_of_choices(
    asked: GenerationRequest, num_choices: int, answer: Callable[[GenerationRequest, bool], AsyncGenerator[Event, None]]
) -> AsyncGenerator[OfChoice, None]:
    """Yields the events of all replies as they come. Leaving the iterator cancels all of them.

    The first computes the prompt; then the others begin, with its media plans and seeds counted up from its own.

    Args:
        answer: runs a reply in its turn. The second argument is True for all but the first: they belong to a request
            that was admitted already, so a full queue doesn't refuse them.
    """
    if num_choices == 1:
        async with contextlib.aclosing(answer(asked, False)) as events:
            async for event in events:
                yield OfChoice(0, event)
        return
    told: asyncio.Queue[OfChoice | Exception | None] = asyncio.Queue()

    async def tell(index: int, one: GenerationRequest) -> None:
        error = None
        try:
            async with contextlib.aclosing(answer(one, index > 0)) as events:
                async for event in events:
                    told.put_nowait(OfChoice(index, event))
        except Exception as failed:
            error = failed
        told.put_nowait(error)

    tasks = [asyncio.ensure_future(tell(0, asked))]
    plans: tuple[MediaPlan | None, ...] = ()
    num_ended = 0
    try:
        while num_ended < num_choices:
            item = await told.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_ended += 1
                continue
            if isinstance(item.event, MediaPlanned) and item.index == 0:
                plans = item.event.plans
            elif isinstance(item.event, Prefilled | TextDelta | Finished) and len(tasks) == 1:
                tasks += [asyncio.ensure_future(tell(at, _another(asked, at, plans))) for at in range(1, num_choices)]
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _another(asked: GenerationRequest, index: int, plans: tuple[MediaPlan | None, ...]) -> GenerationRequest:
    params = asked.params
    if params is not None and params.seed is not None:
        params = replace(params, seed=(params.seed + index) % 2**63)
    return replace(asked, params=params, messages=pin_plans(asked.messages, plans) if plans else asked.messages)
