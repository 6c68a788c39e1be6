"""`qwen35mm serve`: the model for other programs, in OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from qwen35mm.checkpoints.lora_choices import read_choices
from qwen35mm.cli.early_digest import begin_digest
from qwen35mm.cli.folders import cache_folder, user_folder
from qwen35mm.cli.loading import open_shelf, shown_loading
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.errors import ConfigError, MissingExtraError
from qwen35mm.option_values import Names, parse_folder, parse_names, with_options
from qwen35mm.settings import HttpOptions, ModelsOptions, given
from qwen35mm.strangers import is_shared

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from qwen35mm.http.settings import HttpSettings
    from qwen35mm.server.keys import Keys

_ray = functools.partial(typer.Option, rich_help_panel="Ray cluster")


@dataclass(frozen=True)
class ServerOptions:
    """The server: its address, its users and their limits."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but this machine's own needs --api-key-file.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65_535)] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            parser=parse_folder, metavar="FILE", help="File with API keys, one a line; by default no key is needed."
        ),
    ] = None
    media_root: Annotated[
        Path | None,
        typer.Option(
            parser=parse_folder, metavar="FOLDER", help="Folder that `file:` addresses may read; by default none."
        ),
    ] = None
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Fetch media from public `https:` and `http:` addresses.")
    ] = False
    responses_dir: Annotated[
        Path | None,
        typer.Option(
            parser=parse_folder,
            metavar="FOLDER",
            help="Folder of stored responses (/v1/responses); by default in your user's data folder.",
        ),
    ] = None
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Keep responses in memory only, until the program ends.")
    ] = False
    served_model_name: Annotated[
        Names | None,
        typer.Option(parser=parse_names, metavar="NAME", help="More names for the model; * for every name."),
    ] = None
    max_queue: Annotated[int, typer.Option(help="Most requests in the queue.", min=1, max=10_000)] = 64
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Refuse requests with fields that would be ignored or translated.")
    ] = False


@dataclass(frozen=True)
class ClusterOptions:
    """Engines on a Ray cluster, if one machine or card isn't enough."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    ray: Annotated[
        str | None,
        _ray(help="local, auto (the cluster of this machine) or HOST:PORT; needs the extra 'ray'.", metavar="ADDRESS"),
    ] = None
    replicas: Annotated[
        int | None,
        _ray(help="Fewest engines; by default as many as the GPUs allow, or without GPUs one a machine.", min=1),
    ] = None
    max_replicas: Annotated[int | None, _ray(help="Most engines: more are started while requests wait.", min=1)] = None
    gpus_per_replica: Annotated[int, _ray(help="GPUs that one engine's model is split over.", min=1)] = 1
    cpus_per_replica: Annotated[
        int | None, _ray(help="Processors of one engine; by default its share of the machine.", min=1)
    ] = None


@with_options
def serve(model: ModelsOptions, server: ServerOptions, http: HttpOptions, cluster: ClusterOptions) -> None:
    """Serve the model to other programs, in OpenAI's and Anthropic's protocols. Runs until Ctrl-C."""
    if is_shared(server.host) and server.api_key_file is None:
        raise ConfigError(
            f"Other machines may reach {server.host}: give --api-key-file, a file with one API key a line."
        )
    settings = http.settings()
    if "*" in settings.cors_origins and server.api_key_file is None:
        raise ConfigError("--cors-origin '*' lets every website call it: give --api-key-file.")
    first, *others = models = model.each()
    if cluster.ray is None:
        begin_digest(first.source, cache_folder(first))
    with quick_imports():
        try:
            import qwen35mm.server.app  # noqa: F401 - with its dependencies
            from qwen35mm.http.run import check, run
            from qwen35mm.server.keys import Keys
            from qwen35mm.server.service import ANY_NAME
        except ModuleNotFoundError as error:
            raise MissingExtraError("Serving other programs", "serve") from error

    own = {first.name, "default", ANY_NAME, *(server.served_model_name or ())}
    if taken := [each.name for each in read_choices(model.lora) if each.name in own]:
        raise ConfigError(f"--lora {taken[0]}=...: {taken[0]} is a name of the model: give the adapter another one.")
    if taken := [each.name for each in others if each.name in own]:
        raise ConfigError(f"--model {taken[0]}: the first model has this name: give one another name, as MODEL=NAME.")
    keys = None if server.api_key_file is None else Keys.read(server.api_key_file)
    if server.media_root is not None and not server.media_root.is_dir():
        raise ConfigError(f"--media-root: there is no folder {server.media_root}.")
    check(server.host, server.port, settings)
    names = ", ".join(each.name for each in models)
    with ExitStack() as stack:
        if cluster.ray is None:
            app = _load(model, server, keys, settings, stack)
        else:
            app = stack.enter_context(_cluster(model, server, cluster, keys, settings))
        run(
            app,
            host=server.host,
            port=server.port,
            line=lambda url: f"qwen35mm serves {names} on {url}/v1",
            settings=settings,
        )


def _load(
    model: ModelsOptions, server: ServerOptions, keys: Keys | None, settings: HttpSettings | None, stack: ExitStack
) -> Starlette:
    """The application; `stack` closes what it opens."""
    with quick_imports():
        from qwen35mm.decoding import Decoders
        from qwen35mm.model_library import fit_source
        from qwen35mm.server.app import create_app
        from qwen35mm.server.fetch import fetch_media
        from qwen35mm.server.openai.responses.kept import KeptResponses
        from qwen35mm.server.parts import Sources
        from qwen35mm.server.several import create_app_of_models

    data = user_folder("data")
    responses = server.responses_dir or (None if data is None else data / "responses")
    first, *others = model.each()
    options = first.backend_options(user_folder("cache"))
    # Decodes clients' media in separate processes.
    options = replace(options, decoders=stack.enter_context(contextlib.closing(Decoders(options.limits))))
    fetch = fetch_media(first.limits) if server.allow_urls else None
    how: dict[str, Any] = {
        "keys": keys,
        "sources": Sources(server.media_root, fetch),
        "kept": None if server.no_store or responses is None else KeptResponses.on_disk(responses),
        "max_waiting": server.max_queue,
        "settings": settings,
        "only_this_machine": not is_shared(server.host),
        "names": server.served_model_name or (),
        "strict_fields": server.strict_fields,
    }
    if others or model.keep_alive is not None:
        shelf = stack.enter_context(open_shelf(model, options, max_waiting=server.max_queue))
        slots = {each.name: each.num_slots for each in shelf.offers}
        return create_app_of_models(shelf, num_places=slots.__getitem__, **how)
    options, folder = fit_source(options, first.source, first.name)
    with shown_loading() as progress:
        backend = replace(options, progress=progress).load(folder, name=first.name)
    stack.callback(backend.close)
    return create_app(backend, num_places=options.settings.slots, **how)


def _load_app(model: ModelsOptions, server: ServerOptions, keys: Keys | None) -> Starlette:
    # The front has the guards. Everything here ends with its process.
    return _load(model, server, keys, None, ExitStack())


@contextlib.contextmanager
def _cluster(
    model: ModelsOptions, server: ServerOptions, cluster: ClusterOptions, keys: Keys | None, settings: HttpSettings
) -> Iterator[Starlette]:
    """The application in front of engines on a Ray cluster."""
    from qwen35mm.engine import EngineSettings
    from qwen35mm.server.cluster.front import create_front
    from qwen35mm.server.cluster.replicas import ClusterSettings, open_cluster

    assert cluster.ray is not None
    folders = {"media_root": server.media_root, "responses_dir": server.responses_dir}
    server = replace(server, **{name: each.absolute() for name, each in folders.items() if each is not None})
    engines_of = ClusterSettings(
        cluster.ray, cluster.replicas, cluster.max_replicas, cluster.gpus_per_replica, cluster.cpus_per_replica
    )
    load = functools.partial(_load_app, model.for_another_folder(), server, keys)
    slots = EngineSettings(**given(slots=model.slots)).slots
    with open_cluster(engines_of, load, name=f"qwen35mm {socket.gethostname()} {server.port}", slots=slots) as engines:
        yield create_front(engines, keys=keys, settings=settings, only_this_machine=not is_shared(server.host))
