"""How a run is doing: a bar where a person looks, a line now and then in a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from qwen35mm.captioning.counts import Counts

logger = logging.getLogger(__name__)

_DRAW_S = 0.25
LOG_S = 30.0


def describe(counts: Counts) -> str:
    """The counts in one line, such as "12 done, 1 failed, 3 skipped, 1.20 items/s, 84 tokens/s, 0:01:05 left"."""
    words = [f"{counts.num_done:,} done"]
    if num_failed := counts.num_failed + counts.num_failed_before:
        words.append(f"{num_failed:,} failed")
    if counts.num_skipped:
        words.append(f"{counts.num_skipped:,} skipped")
    if counts.num_captioned:
        words.append(f"{counts.items_per_s:.2f} items/s")
        words.append(f"{counts.num_generated_tokens / counts.elapsed_s:,.0f} tokens/s")
    remaining_s = counts.remaining_s
    if remaining_s is not None and remaining_s >= 1:
        words.append(f"{clock(remaining_s)} left")
    return ", ".join(words)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


@contextlib.asynccontextmanager
async def shown(counts: Counts, console: Console) -> AsyncIterator[None]:
    """Shows the counts while the body runs: a bar on a terminal, else a line of the log every half minute."""
    showing = asyncio.create_task(_draw(counts, console) if console.is_terminal else _log(counts))
    try:
        yield
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


async def _draw(counts: Counts, console: Console) -> None:
    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=None)
        while True:
            total = counts.num_found if counts.scanned else None
            progress.update(task, description=describe(counts), completed=counts.num_over, total=total)
            progress.refresh()
            await asyncio.sleep(_DRAW_S)


async def _log(counts: Counts) -> None:
    while True:
        await asyncio.sleep(LOG_S)
        of = f"of {counts.num_found:,}" if counts.scanned else f"of {counts.num_found:,} so far"
        logger.info("%d %s items: %s", counts.num_over, of, describe(counts))
