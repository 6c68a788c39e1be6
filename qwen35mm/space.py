"""A page for others, set up by environment variables: what a Hugging Face Space, or a container, starts from.

`SpaceSettings` lists the variables. Where strangers share the page, what isn't set is tight.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from qwen35mm.errors import ConfigError

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.zero_gpu import ZeroGpuBackend
    from qwen35mm.cache import CacheSettings

logger = logging.getLogger(__name__)

_BYTES = re.compile(r"([0-9]{1,9})\s*(kb|mb|gb|kib|mib|gib)?", re.ASCII | re.IGNORECASE)
_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_PUBLIC_CONTEXT_LENGTH = 16_384
# A disk cache that lives as long as the program has only the Space's own disk.
_TEMPORARY_DISK_BYTES = 4 << 30


@dataclass(frozen=True)
class SpaceSettings:
    """What the environment says; None leaves a choice to the model or the machine.

    Attributes:
        host, port: GRADIO_SERVER_NAME, GRADIO_SERVER_PORT.
        shared: whether strangers use the page.
        model: QWEN35MM_MODEL, a folder or a Hub id; None is the bundled demo.
        context_length: QWEN35MM_CONTEXT_LENGTH, in tokens; None is the model's limit, at most 32,768, and 16,384 where
            strangers share the page.
        slots: QWEN35MM_SLOTS, replies at one time; ZeroGPU has one a call.
        max_image_tokens, max_video_tokens, max_frames: QWEN35MM_MAX_IMAGE_TOKENS, QWEN35MM_MAX_VIDEO_TOKENS and
            QWEN35MM_MAX_FRAMES, for one medium.
        max_upload_bytes: QWEN35MM_MAX_UPLOAD, such as 100MB, for one file.
        max_waiting: QWEN35MM_MAX_QUEUE, requests that may wait for the model before further ones are refused.
        auth: QWEN35MM_AUTH, `name:password` pairs, one a line or with commas between; empty lets everybody in.
        data_dir: QWEN35MM_DATA_DIR, where conversations are kept.
        cache_dir: QWEN35MM_CACHE_DIR, the disk cache's folder.
        max_gpu_seconds: QWEN35MM_MAX_GPU_SECONDS, the most that one call on ZeroGPU asks for.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    shared: bool = False
    model: str | None = None
    context_length: int | None = None
    slots: int | None = None
    max_image_tokens: int | None = None
    max_video_tokens: int | None = None
    max_frames: int | None = None
    max_upload_bytes: int | None = None
    max_waiting: int | None = None
    auth: tuple[tuple[str, str], ...] = ()
    data_dir: Path | None = None
    cache_dir: Path | None = None
    max_gpu_seconds: int = 60

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, is_shared: Callable[[str], bool]) -> SpaceSettings:
        """Reads the variables; an empty one counts as not set.

        Args:
            is_shared: whether strangers use a page that is served on an address.

        Raises:
            ConfigError: a value can't be used; it isn't repeated where it may be a password.
        """
        # A Space sets it to 0.0.0.0.
        host = environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
        shared = is_shared(host)

        def limit(name: str, public: int, **bounds: int) -> int | None:
            return _number(environ, name, public if shared else None, **bounds)

        return cls(
            host=host,
            port=_number(environ, "GRADIO_SERVER_PORT", 7860, low=0, high=65_535),
            shared=shared,
            model=environ.get("QWEN35MM_MODEL") or None,
            context_length=_number(environ, "QWEN35MM_CONTEXT_LENGTH", None),
            slots=limit("QWEN35MM_SLOTS", 2, high=64),
            max_image_tokens=limit("QWEN35MM_MAX_IMAGE_TOKENS", 1_280),
            max_video_tokens=limit("QWEN35MM_MAX_VIDEO_TOKENS", 4_096),
            max_frames=limit("QWEN35MM_MAX_FRAMES", 64, low=2),
            max_upload_bytes=_size(environ, "QWEN35MM_MAX_UPLOAD", 100 * 10**6 if shared else None),
            max_waiting=limit("QWEN35MM_MAX_QUEUE", 16, high=10_000),
            auth=_auth(environ.get("QWEN35MM_AUTH", "")),
            data_dir=_folder(environ, "QWEN35MM_DATA_DIR"),
            cache_dir=_folder(environ, "QWEN35MM_CACHE_DIR"),
            max_gpu_seconds=_number(environ, "QWEN35MM_MAX_GPU_SECONDS", 60, low=15, high=600),
        )

    def page_options(self) -> dict[str, Any]:
        """What `qwen35mm.web.serve` takes of this."""
        return {"host": self.host, "port": self.port, "auth": self.auth, "data_dir": self.data_dir}


def zero_gpu(environ: Mapping[str, str]) -> Callable[..., Any] | None:
    """`spaces.GPU` on ZeroGPU, else None. `spaces` must be imported before anything touches CUDA: call this first.

    Raises:
        ConfigError: the environment says ZeroGPU, and there is no `spaces`.
    """
    if environ.get("SPACES_ZERO_GPU", "").lower() not in ("1", "t", "true"):
        return None
    try:
        return importlib.import_module("spaces").GPU
    except ModuleNotFoundError as error:
        raise ConfigError(
            "SPACES_ZERO_GPU is set, and the package `spaces` isn't installed (Hugging Face installs it on every "
            f"Gradio Space; missing here: {error.name}). Install it, or take the variable away."
        ) from None


@contextlib.contextmanager
def open_backend(
    settings: SpaceSettings, gpu: Callable[..., Any] | None, *, user_cache_dir: Path | None = None
) -> Iterator[LocalBackend | ZeroGpuBackend]:
    """Loads the model and gives what answers with it, closed at the end.

    Args:
        gpu: `spaces.GPU` on ZeroGPU; None computes in this process.
        user_cache_dir: where one person's page keeps its disk cache, if no folder is named. On ZeroGPU that is a
            temporary folder, since calls have nothing else in common; a page that strangers share has none.

    Raises:
        Qwen35mmError: the model or a setting can't be used.
    """
    from qwen35mm.assets import demo_model_path
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.requests import default_budget
    from qwen35mm.backends.zero_gpu import ZeroGpuBackend
    from qwen35mm.cache import CacheSettings, DiskStore
    from qwen35mm.engine import EngineSettings
    from qwen35mm.model import load
    from qwen35mm_preprocess import MediaLimits

    with contextlib.ExitStack() as stack:
        cache = CacheSettings(directory=settings.cache_dir)
        if cache.directory is not None:
            # Tried here, because a model may take minutes to load; with this root it leaves nothing behind.
            DiskStore(cache.directory, root=bytes(32), max_bytes=cache.disk_bytes)
        elif gpu is not None:
            cache = CacheSettings(directory=stack.enter_context(_own_folder()), disk_bytes=_TEMPORARY_DISK_BYTES)
        elif user_cache_dir is not None and not settings.shared:
            # What strangers say is nobody's to keep, and their caches can't be found again once their pages are gone.
            cache = _cache_in(user_cache_dir, cache)
        loaded = load(settings.model or demo_model_path())
        budget = replace(
            default_budget(loaded.model.device),
            **_given(
                max_image_tokens=settings.max_image_tokens,
                max_video_tokens=settings.max_video_tokens,
                max_frames=settings.max_frames,
            ),
        )
        limits = MediaLimits()
        if settings.shared:
            limits = MediaLimits(
                max_image_bytes=20 << 20,
                max_video_bytes=settings.max_upload_bytes or limits.max_video_bytes,
                max_source_pixels=50_000_000,
                max_duration_s=600.0,
            )
        context_length = settings.context_length
        if settings.shared and context_length is None:
            context_length = min(_PUBLIC_CONTEXT_LENGTH, loaded.config.text.max_position_embeddings)
        engine = EngineSettings(
            **_given(context_length=context_length, slots=settings.slots, max_waiting=settings.max_waiting)
        )
        options: dict[str, Any] = {"budget": budget, "limits": limits, "settings": engine, "cache": cache}
        if gpu is None:
            backend = LocalBackend(loaded, **options)
        else:
            backend = ZeroGpuBackend(loaded, gpu, max_duration_s=settings.max_gpu_seconds, **options)
        stack.callback(backend.close)
        yield backend


def _cache_in(folder: Path, cache: CacheSettings) -> CacheSettings:
    from qwen35mm.cache import DiskStore

    try:
        DiskStore(folder, root=bytes(32), max_bytes=cache.disk_bytes)
    except ConfigError as error:
        logger.warning("There is no disk cache, so a restart forgets everything: %s", error)
        return cache
    return replace(cache, directory=folder)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A private folder that ends with this process: a forked child that ends on its own leaves it alone."""
    owner, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="qwen35mm-cache-"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


@overload
def _number(environ: Mapping[str, str], name: str, default: int, *, low: int = 1, high: int = 10**9) -> int: ...
@overload
def _number(
    environ: Mapping[str, str], name: str, default: int | None, *, low: int = 1, high: int = 10**9
) -> int | None: ...
def _number(
    environ: Mapping[str, str], name: str, default: int | None, *, low: int = 1, high: int = 10**9
) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not low <= int(text) <= high:
        raise ConfigError(f"{name} must be a whole number from {low:,} to {high:,}; got {text[:20]!r}.")
    return int(text)


def _size(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return default
    found = _BYTES.fullmatch(text)
    size = int(found[1]) * _UNITS.get((found[2] or "").lower(), 1) if found else 0
    if not size:
        raise ConfigError(f"{name} must be a size such as 100MB or 1GiB; got {text[:20]!r}.")
    return size


def _auth(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for entry in re.split(r"[\n,]", text):
        if not entry.strip():
            continue
        name, colon, password = entry.strip().partition(":")
        if not (name and colon and password):
            raise ConfigError(
                f"QWEN35MM_AUTH must hold name:password pairs, one a line or with commas between them; pair "
                f"{len(pairs) + 1} is none. A password can hold colons, but no commas."
            )
        pairs.append((name, password))
    if text.strip() and not pairs:
        raise ConfigError("QWEN35MM_AUTH is set and holds no name:password pair; empty it to let everybody in.")
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError("QWEN35MM_AUTH names a person twice; give each a name of their own.")
    return tuple(pairs)


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name)
    return Path(text).expanduser() if text else None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
