"""What every command that runs a model takes, each option defined once."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from qwen35mm.assets import demo_model_path
from qwen35mm.cli.sizes import parse_size
from qwen35mm.errors import ConfigError

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.cache.settings import CacheSettings
    from qwen35mm.model_library import BackendOptions, BackendSwitch
    from qwen35mm_preprocess import MediaBudget

logger = logging.getLogger(__name__)

DEMO_NOTE = (
    "This is the bundled demo model: it knows coloured shapes and nothing else. For a real one: --model Qwen/Qwen3.5-2B"
)


data_dir_option = typer.Option(
    help="The folder that keeps conversations; your user's data folder without it.", envvar="QWEN35MM_DATA_DIR"
)

# The help shows them under these headings.
_model = functools.partial(typer.Option, rich_help_panel="Model")
_media = functools.partial(typer.Option, rich_help_panel="Media")
_cache = functools.partial(typer.Option, rich_help_panel="Cache")
_size = functools.partial(typer.Option, rich_help_panel="Cache", parser=parse_size, metavar="SIZE")


@dataclass(frozen=True)
class ModelOptions:
    """A model, what it may use, and what is kept of its work; None leaves a choice to the model or the machine."""

    model: Annotated[
        str | None,
        _model(help="A checkpoint's folder or Hugging Face id; the bundled demo without it.", envvar="QWEN35MM_MODEL"),
    ] = None
    dtype: Annotated[str, _model(help="auto, bfloat16 or float32.")] = "auto"
    device: Annotated[
        str,
        _model(
            help="auto, cpu, cuda or cuda:N. cuda:0,cuda:1 splits the layers over cards; with cuda:0,cpu the processor "
            "computes those that don't fit, slowly."
        ),
    ] = "auto"
    context_length: Annotated[
        int | None, _model(help="Most tokens of a conversation; the model's limit, up to 32,768, without it.", min=1)
    ] = None
    slots: Annotated[int | None, _model(help="Most replies that are written at one time; 4 without it.", min=1)] = None
    batch_invariant: Annotated[
        bool | None,
        _model(
            "--batch-invariant/--no-batch-invariant",
            help="A reply's bits don't depend on what is written beside it; without it: where that costs little.",
        ),
    ] = None

    max_image_tokens: Annotated[int | None, _media(help="Most tokens of one image.", min=1)] = None
    max_video_tokens: Annotated[int | None, _media(help="Most tokens of one video.", min=1)] = None
    max_frames: Annotated[int | None, _media(help="Most frames of one video.", min=1)] = None
    fps: Annotated[float | None, _media(help="Frames a second taken from a video.", min=0.001)] = None

    kv_memory: Annotated[
        int | None, _size(help="Memory for keys and values, of replies at work and of kept prompts.")
    ] = None
    state_memory: Annotated[int | None, _size(help="Memory for the recurrent states of kept prompts.")] = None
    cache_dir: Annotated[
        Path | None,
        _cache(help="The folder of the disk cache, which outlives the program.", envvar="QWEN35MM_CACHE_DIR"),
    ] = None
    no_disk_cache: Annotated[
        bool, _cache("--no-disk-cache", help="Keep nothing on disk, whatever else names a folder.")
    ] = False
    cache_size: Annotated[int | None, _size(help="Most that the disk cache may take; 8GiB without it.")] = None

    def load(self, *, default_cache_dir: Path | None = None) -> LocalBackend:
        """Loads the model and starts its engine.

        Args:
            default_cache_dir: the disk cache's folder where the person names none; None is no disk cache. When it
                can't be used, the log says so and there is no disk cache; a folder that the person named is an error.

        Raises:
            Qwen35mmError: the model or a setting can't be used.
        """
        return self._backend_options(default_cache_dir).load(self.model or demo_model_path())

    def load_switch(self, *, default_cache_dir: Path | None = None) -> BackendSwitch:
        """As `load`, with a backend whose model can be changed while it runs. Raises what `load` does."""
        from qwen35mm.model_library import BackendSwitch

        options = self._backend_options(default_cache_dir)
        return BackendSwitch(options.load(self.model or demo_model_path()), options)

    def _backend_options(self, default_cache_dir: Path | None) -> BackendOptions:
        from qwen35mm.engine import EngineSettings
        from qwen35mm.model_library import BackendOptions

        cache = self._cache_settings(default_cache_dir)
        given = _given(context_length=self.context_length, slots=self.slots, batch_invariant=self.batch_invariant)
        return BackendOptions(
            self.dtype, self.device, budget=self._media_budget(), settings=EngineSettings(**given), cache=cache
        )

    def _cache_settings(self, default_directory: Path | None) -> CacheSettings:
        from qwen35mm.cache import CacheSettings, DiskStore

        directory = None if self.no_disk_cache else self.cache_dir or default_directory
        if directory is None and self.cache_size is not None:
            raise typer.BadParameter("--cache-size is for the disk cache, and there is none.")
        given = _given(kv_bytes=self.kv_memory, state_bytes=self.state_memory, disk_bytes=self.cache_size)
        cache = CacheSettings(directory=directory, **given)
        if directory is None:
            return cache
        try:
            # Tried here, because a model may take minutes to load; with this root it leaves nothing behind.
            DiskStore(directory, root=bytes(32), max_bytes=cache.disk_bytes)
        except ConfigError as error:
            if directory == self.cache_dir:
                raise
            logger.warning("There is no disk cache, so a restart forgets everything: %s", error)
            return replace(cache, directory=None)
        return cache

    def _media_budget(self) -> MediaBudget:
        import torch

        from qwen35mm.backends.requests import default_budget

        on_gpu = "cuda" in self.device or (self.device == "auto" and torch.cuda.is_available())
        given = _given(
            max_image_tokens=self.max_image_tokens,
            max_video_tokens=self.max_video_tokens,
            max_frames=self.max_frames,
            fps=self.fps,
        )
        return replace(default_budget(torch.device("cuda" if on_gpu else "cpu")), **given)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in place of each parameter whose type is a dataclass of options, an option for each field."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
    added = []
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        added += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
            )
            for each in fields(group)
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    run.__signature__ = signature.replace(parameters=[*own, *added])  # pyright: ignore[reportAttributeAccessIssue]
    return run


def file_path(value: Path) -> Path:
    """Checks that a media file exists before a model is loaded for it."""
    if not value.is_file():
        raise typer.BadParameter(f"there is no file '{value}'.")
    return value


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
