"""`qwen35mm chat`: the chat page, for one person on this machine or, on another address or a Space, for strangers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35mm.cli.early_digest import begin_digest
from qwen35mm.cli.folders import cache_folder, user_folder
from qwen35mm.cli.loading import open_shelf, shown_loading
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.errors import ConfigError
from qwen35mm.option_values import with_options
from qwen35mm.settings import HttpOptions, ModelOptions, ModelsOptions, PageOptions, given
from qwen35mm.strangers import is_shared
from qwen35mm.tools.config import read_servers

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.remote.backend import RemoteBackend
    from qwen35mm.backends.shelf import LentBackend
    from qwen35mm.backends.zero_gpu import ZeroGpuBackend
    from qwen35mm.engine import EngineSettings
    from qwen35mm.http.settings import HttpSettings
    from qwen35mm.model_library import BackendSwitch
    from qwen35mm.web.serving.programs import ProgramAccess
    from qwen35mm_preprocess import MediaBudget, MediaLimits

# Tight defaults where strangers share the page.
_FOR_STRANGERS: dict[str, Any] = {
    **{"slots": 2, "max_image_tokens": 1_280, "max_video_tokens": 4_096, "max_frames": 64},
    **{"max_pixels": 50_000_000, "max_image_size": 20 << 20, "max_video_size": 100 * 10**6, "max_seconds": 600.0},
}
_STRANGERS_CONTEXT = 16_384
# A temporary disk cache has only the Space's own disk.
_TEMPORARY_DISK_BYTES = 4 << 30


@with_options
def chat(
    model: ModelsOptions,
    page: PageOptions,
    http: HttpOptions,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Open the chat page. Runs until Ctrl-C."""
    settings = http.settings()
    if "*" in settings.cors_origins:
        raise ConfigError("--cors-origin '*' would let every website use the page: name the websites that may.")
    _check_ui(model, page, http)
    with open_page(model, page, settings) as (backend, how):
        if page.ui == "gradio":
            from qwen35mm.web.serving import gradio_chat

            where = {"host": page.host, "port": page.port, "http": settings, "token": page.token}
            gradio_chat.launch(backend, open_browser=open_browser, **where)
            return
        from qwen35mm.web import launch

        launch(backend, http=settings, open_browser=open_browser, **how)


def _check_ui(model: ModelsOptions, page: PageOptions, http: HttpOptions) -> None:
    """Raises ConfigError for an unknown page, and for options that Gradio's page can't take."""
    if page.ui not in ("own", "gradio"):
        raise ConfigError(f"--ui must be own or gradio; got {page.ui!r}.")
    if page.ui == "own":
        return
    if is_shared(page.host):
        raise ConfigError("--ui gradio is for one person on this machine: leave out --host, or give 127.0.0.1.")
    if len(model.each()) > 1:
        raise ConfigError("--ui gradio has no choice of models: give one --model, or leave out --ui gradio.")
    lacking = {
        page: (
            "auth",
            "auth_file",
            "guests",
            "data_dir",
            "api_key_file",
            "no_api",
            "mcp",
            "mcp_config",
            "mcp_accounts",
            "read_web",
        ),
        http: ("cors_origin", "embed_origin", "base_path"),
    }
    for name in (name for options, names in lacking.items() for name in names if getattr(options, name)):
        raise ConfigError(
            f"--{name.replace('_', '-')} can't be used with --ui gradio: that page is for one person, keeps no chats "
            "on disk and serves no other programs or sites. Leave out one of them."
        )


@contextlib.contextmanager
def open_page(
    model: ModelOptions, page: PageOptions, http: HttpSettings | None = None
) -> Iterator[tuple[LocalBackend | BackendSwitch | LentBackend | RemoteBackend | ZeroGpuBackend, dict[str, Any]]]:
    """Loads the model. Gives a backend, closed at the end, and the other arguments of `qwen35mm.web.serve`.

    One person's page keeps its cache and conversations, and can change its model. A page of strangers keeps neither.
    Several models are on a shelf, and the page begins with the first one. On ZeroGPU each reply is a GPU call. With a
    server, no model is loaded.

    Raises:
        Qwen35mmError: the model, the server or a setting can't be used.
    """
    if page.backend is not None:
        with _open_server(page.backend, model, page, http) as opened:
            yield opened
        return
    # Imports `spaces` before anything might touch CUDA.
    gpu = zero_gpu()
    shared = is_shared(page.host)
    several = model if isinstance(model, ModelsOptions) else None
    first, *others = [model] if several is None else several.each()
    is_shelf = several is not None and bool(others or several.keep_alive is not None)
    if is_shelf and gpu is not None:
        raise ConfigError("On ZeroGPU the page has one model, which stays loaded: give one --model, no --keep-alive.")
    how = _how(page, shared)
    if gpu is None and not shared:
        begin_digest(first.source, cache_folder(first))
    with quick_imports() if gpu is None else contextlib.nullcontext():
        import qwen35mm.web  # reports a missing extra before a model is loaded
        from qwen35mm.backends.shelf import LentBackend
        from qwen35mm.backends.zero_gpu import ZeroGpuBackend
        from qwen35mm.config import ModelConfig
        from qwen35mm.decoding import Decoders
        from qwen35mm.model.load import find_checkpoint
        from qwen35mm.model_library import BackendSwitch, fit_source

    qwen35mm.web.check(http=http, **how)
    with contextlib.ExitStack() as stack:
        if shared:
            model = replace(model, **{name: n for name, n in _FOR_STRANGERS.items() if getattr(model, name) is None})
        if gpu is not None and model.cache_dir is None and not model.no_disk_cache:
            # GPU calls share nothing else.
            folder = stack.enter_context(_own_folder())
            model = replace(model, cache_dir=folder, cache_size=model.cache_size or _TEMPORARY_DISK_BYTES)
        options = model.backend_options(None if shared else user_folder("cache"))
        engine = replace(options.settings, **given(max_waiting=page.max_queue))
        limits = _limits(model, page)
        decoders = stack.enter_context(contextlib.closing(Decoders(limits)))
        options = replace(options, limits=limits, settings=engine, decoders=decoders)
        programs = _programs(page, how["data_dir"], shared, gpu is not None, options.settings)
        if shared and model.context_length is None:
            folders = [find_checkpoint(each.source) for each in (first, *others)]
            configs = [ModelConfig.from_pretrained(each, rope_scaling=options.rope_scaling) for each in folders]
            most = min(config.text.max_position_embeddings for config in configs)
            options = options.with_context(min(_STRANGERS_CONTEXT, most))
        if several is not None and is_shelf:
            shelf = stack.enter_context(
                open_shelf(several, options, keeps_prompts=True, max_waiting=engine.max_waiting)
            )
            backend = LentBackend(shelf, first.name)
            if not shared:
                backend = stack.enter_context(contextlib.closing(BackendSwitch(shelf, first.name, options)))
            yield backend, {**how, "programs": programs}
            return
        fitted, folder = fit_source(options, first.source, first.name)
        with shown_loading() as progress:
            loaded = replace(fitted, progress=progress).load_model(folder, name=first.name)
        if gpu is not None:
            backend = ZeroGpuBackend(
                loaded,
                gpu,
                budget=options.budget,
                limits=options.limits,
                settings=options.settings,
                cache=options.cache,
                max_duration_s=page.max_gpu_seconds,
                decoders=decoders,
            )
        else:
            local = fitted.start(loaded)
            backend = local if shared else BackendSwitch.of(local, options, fitted=fitted)
        stack.callback(backend.close)
        yield backend, {**how, "programs": programs, **({} if gpu is None else {"through_gradio": True})}


@contextlib.contextmanager
def _open_server(
    address: str, model: ModelOptions, page: PageOptions, http: HttpSettings | None
) -> Iterator[tuple[BackendSwitch | RemoteBackend, dict[str, Any]]]:
    shared = is_shared(page.host)
    how = _how(page, shared)
    if model.model is not None:
        raise ConfigError("--model and --backend both name the model: give one of them.")
    if model.lora:
        raise ConfigError("--lora changes a model on this machine; the server of --backend has its own adapters.")
    if isinstance(model, ModelsOptions) and model.keep_alive is not None:
        raise ConfigError("--keep-alive unloads models of this machine; the server of --backend has its own.")
    if shared and page.api_key_file is not None:
        raise ConfigError("--api-key-file needs a model on this machine; programs can ask the server of --backend.")
    with quick_imports():
        import qwen35mm.web  # reports a missing extra first
        from qwen35mm.decoding import Decoders
        from qwen35mm.model_library import BackendSwitch
        from qwen35mm.model_library.switch import CONNECT_S
        from qwen35mm.web.serving.servers import Server

    qwen35mm.web.check(http=http, **how)
    if shared:
        model = replace(model, **{name: n for name, n in _FOR_STRANGERS.items() if getattr(model, name) is None})
    limits = _limits(model, page)
    server = Server(address, page.backend_model, _backend_key(page))
    with contextlib.ExitStack() as stack:
        decoders = stack.enter_context(contextlib.closing(Decoders(limits)))
        remote = server.backend(limits, _server_budget(model), model.slots or 4, decoders)
        backend = stack.enter_context(contextlib.closing(remote))
        asyncio.run(remote.connect(CONNECT_S))
        programs = None
        if not shared:
            options = replace(model.backend_options(user_folder("cache")), limits=limits, decoders=decoders)
            programs = _programs(page, how["data_dir"], shared, False, options.settings)
            backend = stack.enter_context(contextlib.closing(BackendSwitch.of(remote, options)))
        yield backend, {**how, "programs": programs, "server": server}


def _how(page: PageOptions, shared: bool) -> dict[str, Any]:
    """The address of the page, and its users."""
    data_dir = page.data_dir or (None if shared else user_folder("data"))
    address = {"host": page.host, "port": page.port, "token": page.token, "calls": not page.no_api, "mcp": page.mcp}
    address["read_web"] = page.read_web
    who = {"auth": page.auth or (), "auth_file": page.auth_file, "guests": page.guests}
    tools = () if page.mcp_config is None else read_servers(page.mcp_config)
    return {**address, **who, "data_dir": data_dir, "tools": tools, "tool_accounts": page.mcp_accounts or ()}


def _backend_key(page: PageOptions) -> str | None:
    if page.backend_key_file is None:
        return page.backend_key
    if page.backend_key is not None:
        raise ConfigError("--backend-key and --backend-key-file both give the server's key: give one of them.")
    try:
        key = page.backend_key_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it isn't text"
        raise ConfigError(f"The key in {page.backend_key_file} can't be read ({reason}).") from None
    if not key:
        raise ConfigError(f"{page.backend_key_file} has no key: write the server's key into it, nothing else.")
    return key


def _server_budget(model: ModelOptions) -> MediaBudget:
    from qwen35mm.backends.remote.media import default_media

    chosen = given(
        max_image_tokens=model.max_image_tokens,
        max_video_tokens=model.max_video_tokens,
        max_frames=model.max_frames,
        fps=model.fps,
        color=model.color or None,
    )
    return replace(default_media(None, None, "frames").budget, **chosen)


def zero_gpu() -> Callable[..., Any] | None:
    """`spaces.GPU` on ZeroGPU, else None. `spaces` must be imported before anything touches CUDA: call this first.

    Raises:
        ConfigError: the environment says ZeroGPU, and there is no `spaces`.
    """
    if os.environ.get("SPACES_ZERO_GPU", "").lower() not in ("1", "t", "true"):
        return None
    try:
        return importlib.import_module("spaces").GPU
    except ModuleNotFoundError as error:
        raise ConfigError(
            "SPACES_ZERO_GPU is set, and the package `spaces` isn't installed (Hugging Face installs it on every "
            f"Gradio Space; missing here: {error.name}). Install it, or unset the variable."
        ) from None


def _programs(
    page: PageOptions, data_dir: Path | None, shared: bool, on_zero_gpu: bool, engine: EngineSettings
) -> ProgramAccess | None:
    """The programs that may use the model beside the page: on your own page those with its token, else those with a
    key."""
    from qwen35mm.server.keys import Keys
    from qwen35mm.web.serving.programs import ProgramAccess

    if page.no_api or (page.api_key_file is None and (shared or page.auth or page.auth_file)):
        return None
    if on_zero_gpu:
        raise ConfigError(
            "On ZeroGPU the person at the page pays for each reply, so --api-key-file can't be used. Programs can call "
            "the endpoint /chat with gradio_client."
        )
    keys = Keys([]) if page.api_key_file is None else Keys.read(page.api_key_file)
    responses = None if data_dir is None else data_dir / "responses"
    return ProgramAccess(keys, engine.slots, responses_dir=responses, **given(max_waiting=page.max_queue))


def _limits(model: ModelOptions, page: PageOptions) -> MediaLimits:
    return replace(model.limits, **given(max_video_bytes=page.max_upload))


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A private folder that is removed when this process ends, not when a forked child does."""
    owner, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="qwen35mm-cache-"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
