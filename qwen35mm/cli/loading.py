"""Loads a program's models, and shows how far weights are read: as a bar on a terminal, else in the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen35mm.backends.shelf import Shelf
    from qwen35mm.model.weights import OnRead
    from qwen35mm.model_library import BackendOptions
    from qwen35mm.settings import ModelsOptions

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


@contextlib.contextmanager
def open_shelf(
    models: ModelsOptions, options: BackendOptions, *, keeps_prompts: bool = False, max_waiting: int = 64
) -> Iterator[Shelf]:
    """A shelf with all models, of which the first is loaded; closed at the end.

    Args:
        options: for all models.
        keeps_prompts: see `plan_models`.
        max_waiting: see `Shelf`.

    Raises:
        Qwen35mmError: a model, an adapter or a setting can't be used.
    """
    from qwen35mm.backends.shelf import Shelf
    from qwen35mm.model_library.sharing import NamedModel, plan_models

    named = [NamedModel(each.source, each.name) for each in models.each()]
    planned, memory_bytes = plan_models(named, options, keeps_prompts=keeps_prompts)
    how = {"keep_alive_s": models.keep_alive, "max_waiting": max_waiting}
    with contextlib.closing(Shelf([each.offer() for each in planned], memory_bytes, **how)) as shelf:
        first = planned[0]
        with shown_loading() as progress:
            shelf.put(
                first.model.name, replace(first.options, progress=progress).load(first.folder, name=first.model.name)
            )
        yield shelf
