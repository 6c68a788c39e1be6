"""Reading what backends stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from qwen35mm.contract import Event, Finished, Result, TextDelta

# Only reached where a test fails.
PATIENCE_S = 60


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in events]

    return await asyncio.wait_for(read(), PATIENCE_S)


def result_of(events: Sequence[Event]) -> Result:
    """The result at the end of a stream, which must be the text that came before it."""
    *before, last = events
    assert isinstance(last, Finished)
    texts = [event for event in before if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts if event.channel == "answer") == last.result.text
    assert "".join(event.text for event in texts if event.channel == "reasoning") == (last.result.reasoning or "")
    return last.result
