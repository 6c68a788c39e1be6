"""A run's progress: its counts, shown as a bar on a terminal and as regular lines in a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from qwen35mm.backends.engine_pool import Member

logger = logging.getLogger(__name__)

_DRAW_S = 0.25
LOG_S = 30.0
# Each of so many engines is shown with its answers.
_MOST_NAMED = 4


@dataclass
class Counts:
    """Numbers of items, unless a name says otherwise. Each found item ends with exactly one outcome.

    Attributes:
        num_found: items that the scan gave.
        num_known: found items with a stored caption that an output lacks.
        scanned: whether the scan is complete.
        num_captioned: outcome: the model wrote a caption.
        num_shared: outcome: took the caption of a near-duplicate, or of the same bytes under another name.
        num_recalled: outcome: a stored caption went to an output that lacked it.
        num_judged: outcome: the model judged a caption of an earlier run.
        num_present: outcome: every output had the caption.
        num_kept: outcome: another person's caption stays.
        num_failed: outcome: failed in this run.
        num_failed_before: outcome: the same work failed in an earlier run or for another item, and isn't retried.
        num_filtered: outcome: a filter left it out.
        num_left: outcome: not reached before a stop.
        num_prompt_tokens, num_generated_tokens: tokens of this run's captions.
        num_retries: replies that weren't usable.
        defaulted: by placeholder, items whose written caption took its default for a missing value.
        slots_idle_s: seconds that slots waited for media, summed over the slots.
        slots_s: seconds that slots existed, summed over the slots.
        engines: see `Captioner`.
        began_s: when the first slot began to work, by the monotonic clock.
    """

    num_found: int = 0
    num_known: int = 0
    scanned: bool = False
    num_captioned: int = 0
    num_shared: int = 0
    num_recalled: int = 0
    num_judged: int = 0
    num_present: int = 0
    num_kept: int = 0
    num_failed: int = 0
    num_failed_before: int = 0
    num_filtered: int = 0
    num_left: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_retries: int = 0
    defaulted: Counter[str] = field(default_factory=Counter)
    slots_idle_s: float = 0.0
    slots_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    began_s: float | None = None
    engines: Sequence[Member[Any]] = ()

    @property
    def num_done(self) -> int:
        """Items whose caption was written in this run."""
        return self.num_captioned + self.num_shared + self.num_recalled + self.num_judged

    @property
    def num_skipped(self) -> int:
        """Items that needed nothing."""
        return self.num_present + self.num_kept + self.num_filtered

    @property
    def num_over(self) -> int:
        """Items with an outcome."""
        return self.num_done + self.num_skipped + self.num_failed + self.num_failed_before + self.num_left

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started_s

    @property
    def worked_s(self) -> float:
        """Seconds since the first slot began to work: earlier skipping doesn't count."""
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    @property
    def items_per_s(self) -> float:
        """Captions that the model wrote per second of work."""
        return self.num_captioned / self.worked_s if self.worked_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end at the speed so far; None while the scan runs or before the first caption."""
        num_answered = self.num_captioned + self.num_judged
        if not self.scanned or not num_answered:
            return None
        # Skipped items and stored captions say nothing about the model's speed.
        num_computed = num_answered + self.num_shared + self.num_failed
        num_left = self.num_found - self.num_over - max(0, self.num_known - self.num_recalled)
        return max(0, num_left) * self.worked_s / num_computed


def describe(counts: Counts) -> str:
    """The counts in one line, such as "12 done, 1 failed, 3 skipped, 1.20 items/s, 84 tokens/s, 0:01:05 left"."""
    words = [f"{counts.num_done:,} done"]
    if num_failed := counts.num_failed + counts.num_failed_before:
        words.append(f"{num_failed:,} failed")
    if counts.num_skipped:
        words.append(f"{counts.num_skipped:,} skipped")
    if counts.num_captioned:
        words.append(f"{counts.items_per_s:.2f} items/s")
        words.append(f"{counts.num_generated_tokens / counts.worked_s:,.0f} tokens/s")
    remaining_s = counts.remaining_s
    if remaining_s is not None and remaining_s >= 1:
        words.append(f"{clock(remaining_s)} left")
    if 1 < len(counts.engines) <= _MOST_NAMED:
        words += [_brief(each) for each in counts.engines]
    elif away := sum(each.state != "here" for each in counts.engines):
        words.append(f"{away:,} of {len(counts.engines):,} engines away")
    return ", ".join(words)


def describe_engines(engines: Sequence[Member[Any]]) -> list[str]:
    """What each of several engines did, a line each, such as "a:8000: 12 answers, 2 lost, away"."""
    lines: list[str] = []
    for each in engines:
        words = [f"{each.num_answered:,} answers"]
        if each.num_lost:
            words.append(f"{each.num_lost:,} lost")
        if each.state != "here":
            words.append("away" if each.state == "away" else "given up")
        lines.append(f"{each.name}: {', '.join(words)}")
    return lines


def _brief(engine: Member[Any]) -> str:
    """One engine in the progress, such as "a:8000: 12" or "a:8000: 12 (away)"."""
    away = "" if engine.state == "here" else f" ({engine.state})"
    return f"{engine.name}: {engine.num_answered:,}{away}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


@contextlib.asynccontextmanager
async def shown(counts: Counts, console: Console) -> AsyncIterator[None]:
    """Shows the counts while the body runs: a bar on a terminal, otherwise a log line every 30 seconds."""
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
