"""Shows how far a model's weights are read: as a bar on a terminal, else in the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen35mm.model.weights import OnRead

logger = logging.getLogger(__name__)

# A model that is read sooner needs no bar, and none of both needs a line in the log.
_SILENT_S = 0.5
LOG_S = 10.0


@contextlib.contextmanager
def shown_loading() -> Iterator[OnRead]:
    """Gives what to call with the bytes read and all of them; the bar disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    logger.setLevel(logging.INFO)
    console, bars = Console(stderr=True), contextlib.ExitStack()
    columns = TextColumn("Loading the weights"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("")
    began_s = logged_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal logged_s
        now = time.monotonic()
        if console.is_terminal:
            if not bar.live.is_started and now - began_s > _SILENT_S:
                bars.enter_context(bar)
            bar.update(task, completed=done, total=total)
        elif now - logged_s > LOG_S:
            logger.info("Loading the weights: %d %%", 100 * done // total)
            logged_s = now

    with bars:
        yield report
