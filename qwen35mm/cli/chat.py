"""`qwen35mm chat`: the chat page, for the person at this machine or, on another address or a Space, for strangers."""

from __future__ import annotations

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
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.errors import ConfigError
from qwen35mm.settings import ModelOptions, PageOptions, given, with_options
from qwen35mm.strangers import is_shared

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.zero_gpu import ZeroGpuBackend
    from qwen35mm.model_library import BackendSwitch
    from qwen35mm_preprocess import MediaLimits

# Where strangers share the page, what isn't set is tight.
_FOR_STRANGERS = {"slots": 2, "max_image_tokens": 1_280, "max_video_tokens": 4_096, "max_frames": 64}
_STRANGERS_CONTEXT = 16_384
_STRANGERS_UPLOAD_BYTES = 100 * 10**6
# A disk cache that lives as long as the program has only the Space's own disk.
_TEMPORARY_DISK_BYTES = 4 << 30


@with_options
def chat(
    model: ModelOptions,
    page: PageOptions,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Open the chat page; it runs until Ctrl-C."""
    with open_page(model, page) as (backend, how):
        from qwen35mm.web import launch

        launch(backend, open_browser=open_browser, **how)


@contextlib.contextmanager
def open_page(
    model: ModelOptions, page: PageOptions
) -> Iterator[tuple[LocalBackend | BackendSwitch | ZeroGpuBackend, dict[str, Any]]]:
    """Loads the model; gives what answers, closed at the end, and the other arguments of `qwen35mm.web.serve`.

    One person's page keeps its cache and its conversations, and can change its model. What strangers say is nobody's
    to keep, and their caches can't be found again once their pages are gone. On ZeroGPU each reply is a GPU call.

    Raises:
        Qwen35mmError: the model or a setting can't be used.
    """
    # `spaces` comes before everything that might touch CUDA.
    gpu = zero_gpu()
    shared = is_shared(page.host)
    if gpu is None and not shared:
        begin_digest(model.source, cache_folder(model))
    with quick_imports() if gpu is None else contextlib.nullcontext():
        import qwen35mm.web  # noqa: F401 - what it lacks is told before a model is loaded
        from qwen35mm.backends.zero_gpu import ZeroGpuBackend
        from qwen35mm.config import ModelConfig
        from qwen35mm.model.load import find_checkpoint
        from qwen35mm.model_library import BackendSwitch, fit_source

    with contextlib.ExitStack() as stack:
        if shared:
            model = replace(model, **{name: n for name, n in _FOR_STRANGERS.items() if getattr(model, name) is None})
        if gpu is not None and model.cache_dir is None and not model.no_disk_cache:
            # Calls have nothing else in common.
            folder = stack.enter_context(_own_folder())
            model = replace(model, cache_dir=folder, cache_size=model.cache_size or _TEMPORARY_DISK_BYTES)
        options = model.backend_options(None if shared else user_folder("cache"))
        engine = replace(options.settings, **given(max_waiting=page.max_queue))
        options = replace(options, limits=_limits(page, shared), settings=engine)
        source = model.source
        if shared and model.context_length is None:
            config = ModelConfig.from_pretrained(source := find_checkpoint(source))
            options = options.with_context(min(_STRANGERS_CONTEXT, config.text.max_position_embeddings))
        fitted, folder = fit_source(options, source, model.name)
        loaded = fitted.load_model(folder, name=model.name)
        if gpu is not None:
            backend = ZeroGpuBackend(
                loaded,
                gpu,
                budget=options.budget,
                limits=options.limits,
                settings=options.settings,
                cache=options.cache,
                max_duration_s=page.max_gpu_seconds,
            )
        else:
            local = fitted.start(loaded)
            backend = local if shared else BackendSwitch(local, options)
        stack.callback(backend.close)
        data_dir = page.data_dir or (None if shared else user_folder("data"))
        address = {"host": page.host, "port": page.port, "token": page.token}
        who = {"auth": page.auth or (), "auth_file": page.auth_file, "guests": page.guests}
        yield backend, {**address, **who, "data_dir": data_dir}


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
            f"Gradio Space; missing here: {error.name}). Install it, or take the variable away."
        ) from None


def _limits(page: PageOptions, shared: bool) -> MediaLimits:
    from qwen35mm_preprocess import MediaLimits

    upload = given(max_video_bytes=page.max_upload)
    if not shared:
        return MediaLimits(**upload)
    tight = {"max_video_bytes": _STRANGERS_UPLOAD_BYTES, **upload}
    return MediaLimits(max_image_bytes=20 << 20, max_source_pixels=50_000_000, max_duration_s=600.0, **tight)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A private folder that ends with this process: a forked child that ends on its own leaves it alone."""
    owner, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="qwen35mm-cache-"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
