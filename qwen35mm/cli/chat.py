"""`qwen35mm chat`: the chat page on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35mm.cli.folders import user_cache_folder, user_data_folder
from qwen35mm.cli.options import ModelOptions, data_dir_option, with_options


@with_options
def chat(
    options: ModelOptions,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1.", min=0, max=65535)] = 7860,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    data_dir: Annotated[Path | None, data_dir_option] = None,
) -> None:
    """Open the chat page; it runs until Ctrl-C."""
    from qwen35mm.web import launch

    backend = options.load_switch(default_cache_dir=user_cache_folder())
    try:
        launch(backend, port=port, open_browser=open_browser, data_dir=data_dir or user_data_folder())
    finally:
        backend.close()
