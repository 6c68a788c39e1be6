"""`qwen35mm desktop`: the chat page in a window of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35mm.cli.folders import user_cache_folder, user_data_folder
from qwen35mm.cli.options import ModelOptions, data_dir_option, with_options


@with_options
def desktop(options: ModelOptions, data_dir: Annotated[Path | None, data_dir_option] = None) -> None:
    """Open the chat in a window of its own; closing it ends the program."""
    from qwen35mm.web import launch
    from qwen35mm.web.desktop import has_display, run_window, window_problem

    problem = window_problem()
    folder = user_data_folder()
    data_dir = data_dir or folder
    backend = options.load_switch(default_cache_dir=user_cache_folder())
    try:
        if problem is None:
            run_window(backend, storage=folder / "window" if folder else None, data_dir=data_dir)
            return
        # Without a display the browser would be one that takes the terminal.
        opens = has_display()
        instead = "The page opens in your browser instead." if opens else "Open this address in a browser instead."
        typer.echo(f"{problem} {instead}", err=True)
        launch(backend, port=0, open_browser=opens, data_dir=data_dir)
    finally:
        backend.close()
