"""`qwen35mm desktop`: the chat page in its own window."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35mm.cli.chat import open_page
from qwen35mm.cli.folders import user_folder
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.option_values import with_options
from qwen35mm.settings import ModelsOptions, PageOptions, data_dir_option


@with_options
def desktop(model: ModelsOptions, data_dir: Annotated[Path | None, data_dir_option] = None) -> None:
    """Open the chat in its own window. Closing the window ends the program."""
    with quick_imports():
        from qwen35mm.web import launch
        from qwen35mm.web.desktop.window import has_display, run_window, window_problem

    problem = window_problem()
    with open_page(model, PageOptions(port=0, data_dir=data_dir)) as (backend, how):
        if problem is None:
            folder = user_folder("data")
            run_window(backend, storage=folder / "window" if folder else None, data_dir=how["data_dir"])
            return
        # Without a display, a text browser would take over the terminal.
        opens = has_display()
        instead = "The page opens in your browser instead." if opens else "Open this address in a browser instead."
        typer.echo(f"{problem} {instead}", err=True)
        launch(backend, open_browser=opens, **how)
