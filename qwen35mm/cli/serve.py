"""`qwen35mm serve`: the model for other programs, in OpenAI's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from qwen35mm.cli.early_digest import begin_digest
from qwen35mm.cli.folders import cache_folder, user_folder
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.errors import ConfigError, MissingExtraError
from qwen35mm.settings import ModelOptions, parse_folder, with_options
from qwen35mm.strangers import is_shared


@dataclass(frozen=True)
class ServerOptions:
    """Where the server is, for whom, and what they may ask for."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    host: Annotated[str, typer.Option(help="The address. Any but this machine's own needs --api-key-file.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65_535)] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(parser=parse_folder, metavar="FILE", help="The keys that open it, one a line; open without it."),
    ] = None
    media_root: Annotated[
        Path | None,
        typer.Option(
            parser=parse_folder, metavar="FOLDER", help="Where `file:` addresses may name media; none without it."
        ),
    ] = None
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Fetch media from `https:` and `http:` addresses of the internet.")
    ] = False
    max_queue: Annotated[int, typer.Option(help="Requests that may wait for the model.", min=1, max=10_000)] = 64


@with_options
def serve(model: ModelOptions, server: ServerOptions) -> None:
    """Serve the model to other programs, in OpenAI's protocol; it runs until Ctrl-C."""
    shared = is_shared(server.host)
    if shared and server.api_key_file is None:
        raise ConfigError(
            f"Other machines may reach {server.host}: name a file with API keys, one a line, by --api-key-file."
        )
    begin_digest(model.source, cache_folder(model))
    with quick_imports():
        try:
            from qwen35mm.server.app import create_app
            from qwen35mm.server.fetch import fetch_media
            from qwen35mm.server.keys import Keys
            from qwen35mm.server.parts import Sources
            from qwen35mm.server.run import run
        except ModuleNotFoundError as error:
            raise MissingExtraError("Serving other programs", "serve") from error
        from qwen35mm.model_library import fit_source

    keys = None if server.api_key_file is None else Keys.read(server.api_key_file)
    if server.media_root is not None and not server.media_root.is_dir():
        raise ConfigError(f"--media-root: there is no folder {server.media_root}.")
    options, folder = fit_source(model.backend_options(user_folder("cache")), model.source, model.name)
    backend = options.load(folder, name=model.name)
    try:
        fetch = fetch_media(backend.media.limits) if server.allow_urls else None
        app = create_app(
            backend,
            keys=keys,
            sources=Sources(server.media_root, fetch),
            num_places=options.settings.slots,
            max_waiting=server.max_queue,
            only_this_machine=not shared,
        )
        run(app, host=server.host, port=server.port, name=backend.loaded.name)
    finally:
        backend.close()
