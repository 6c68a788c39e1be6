"""Asking our backend for one token, and waiting for what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator

from qwen35mm.engine import Event, Finished, Result
from qwen35mm.sampling import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


async def last_result(events: AsyncIterator[Event]) -> Result:
    """Reads a stream to its end."""
    async for event in events:
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("a stream ends with Finished")
