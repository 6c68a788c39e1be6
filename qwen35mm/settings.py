"""Every setting of a model and of the chat page, once: its name, type, limits and words.

The command line and the environment are both made from these classes: `max_frames` is the option `--max-frames` and the
variable QWEN35MM_MAX_FRAMES. The option wins, and an empty variable counts as not set.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.shards import model_name
from qwen35mm.errors import ConfigError
from qwen35mm.folders import user_folder
from qwen35mm.option_values import (
    Logins,
    Names,
    parse_folder,
    parse_logins,
    parse_names,
    parse_size,
    parse_token,
)

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.cache.planner import CacheSettings
    from qwen35mm.http.settings import HttpSettings
    from qwen35mm.model_library import BackendOptions
    from qwen35mm_preprocess import MediaBudget, MediaLimits

logger = logging.getLogger(__name__)

DEMO_NOTE = (
    "This is the bundled demo model: it knows coloured shapes and nothing else. For a real one: --model Qwen/Qwen3.5-2B"
)

# The help shows them under these headings.
_model = functools.partial(typer.Option, rich_help_panel="Model")
_media = functools.partial(typer.Option, rich_help_panel="Media")
_cache = functools.partial(typer.Option, rich_help_panel="Cache")
_page = functools.partial(typer.Option, rich_help_panel="Page")
_http = functools.partial(typer.Option, rich_help_panel="Network")
_names = functools.partial(_http, parser=parse_names)
_server = functools.partial(typer.Option, rich_help_panel="A model on a server")
_size = functools.partial(typer.Option, parser=parse_size, metavar="SIZE")
_folder = functools.partial(typer.Option, parser=parse_folder, metavar="FOLDER")


@dataclass(frozen=True)
class ModelOptions:
    """A model, what it may use, and what is kept of its work; None leaves a choice to the model or the machine."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    model: Annotated[
        str | None, _model(help="A folder, a GGUF file, ollama:NAME or a Hugging Face id; the demo without it.")
    ] = None
    dtype: Annotated[str, _model(help="auto, bfloat16 or float32.")] = "auto"
    weights: Annotated[
        str,
        _model(
            help="auto, bf16, int8 or int4: what the weights are kept as. int8 takes half the memory and int4 a "
            "quarter; auto takes the checkpoint's own, or on a processor where they don't fit int8, else int4."
        ),
    ] = "auto"
    device: Annotated[
        str,
        _model(
            help="auto, cpu, cuda or cuda:N. cuda:0,cuda:1 splits the layers over cards; with cuda:0,cpu the processor "
            "computes those that don't fit, slowly."
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        _model(
            help="Most tokens of a conversation; the model's limit, up to 32,768, without it. On a processor, one that "
            "memory doesn't hold has its keys and values in a file in the disk cache's folder: slower.",
            min=1,
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        _model(
            metavar="yarn,factor=N",
            help="N times as many positions by YaRN, for contexts beyond the model's own; short ones suffer a little.",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        _size(
            rich_help_panel="Model",
            help="Most memory that the program may take, on a processor: weights, context and slots are chosen to fit.",
        ),
    ] = None
    slots: Annotated[
        int | None, _model(help="Most replies at one time. Without it 4; more for captions, by the machine.", min=1)
    ] = None
    batch_invariant: Annotated[
        bool | None,
        _model(
            "--batch-invariant/--no-batch-invariant",
            help="A reply's bits don't depend on what is written beside it, which costs a GPU a little speed.",
        ),
    ] = None

    threads: Annotated[
        int | None,
        _model(
            help="Threads on the processor; without it one for each core that it may use, or OMP_NUM_THREADS.", min=1
        ),
    ] = None

    max_image_tokens: Annotated[int | None, _media(help="Most tokens of one image.", min=1)] = None
    max_video_tokens: Annotated[int | None, _media(help="Most tokens of one video.", min=1)] = None
    max_frames: Annotated[int | None, _media(help="Most frames of one video.", min=1)] = None
    fps: Annotated[float | None, _media(help="Frames a second taken from a video.", min=0.001)] = None
    max_pixels: Annotated[
        int | None, _media(help="Most pixels of a picture, or of a video's frame; 100000000 without it.", min=1)
    ] = None
    max_image_size: Annotated[
        int | None, _size(rich_help_panel="Media", help="Most bytes of a picture's file; 64MiB without it.")
    ] = None
    max_video_size: Annotated[
        int | None, _size(rich_help_panel="Media", help="Most bytes of a video's file; 512MiB without it.")
    ] = None
    max_seconds: Annotated[
        float | None, _media(help="Most seconds of a video; 14400, four hours, without it.", min=0.001)
    ] = None
    color: Annotated[
        str,
        _media(
            metavar="MODE",
            help="srgb: colours as a viewer shows them; checkpoint: a file's numbers, as transformers takes them.",
        ),
    ] = "srgb"

    kv_memory: Annotated[
        int | None,
        _size(rich_help_panel="Cache", help="Memory for keys and values, of replies at work and of kept prompts."),
    ] = None
    kv_dtype: Annotated[
        str,
        _cache(
            metavar="TYPE",
            help="What keys and values are kept as: auto (the model's own type), bf16, f16, fp8, fp8_e5m2, int8, int4; "
            "rotated, on a processor: int4r, tq4, tq3; apart: k=int8,v=int4. int8 holds nearly twice as many tokens, "
            "int4 more than three times.",
        ),
    ] = "auto"
    kept_states: Annotated[
        str,
        _cache(
            metavar="TYPE",
            help="What recurrent states of kept prompts are kept as: float32, or bf16, which takes half the memory.",
        ),
    ] = "float32"
    state_memory: Annotated[
        int | None, _size(rich_help_panel="Cache", help="Memory for the recurrent states of kept prompts.")
    ] = None
    cache_dir: Annotated[
        Path | None, _folder(rich_help_panel="Cache", help="The folder of the disk cache, which outlives the program.")
    ] = None
    no_disk_cache: Annotated[
        bool, _cache("--no-disk-cache", help="Keep nothing on disk, whatever else names a folder.")
    ] = False
    cache_size: Annotated[
        int | None, _size(rich_help_panel="Cache", help="Most that the disk cache may take; 8GiB without it.")
    ] = None

    @property
    def source(self) -> str | Path:
        """The checkpoint to load."""
        return self.model or demo_model_path()

    @property
    def name(self) -> str:
        """What to call it: its folder's name, its file's, or the Hub id."""
        return model_name(self.source)

    @property
    def limits(self) -> MediaLimits:
        """What media may be at most. Raises MediaConfigError."""
        from qwen35mm_preprocess import MediaLimits

        return MediaLimits(
            **given(
                max_source_pixels=self.max_pixels,
                max_image_bytes=self.max_image_size,
                max_video_bytes=self.max_video_size,
                max_duration_s=self.max_seconds,
            )
        )

    def load(self, *, for_many: bool = False) -> LocalBackend:
        """Loads the model in the format that fits and starts its engine, with a disk cache only where one is named.

        `for_many` is said where there are always requests enough; see `with_slots_for_many`.

        Raises:
            Qwen35mmError: the model or a setting can't be used.
        """
        from qwen35mm.model_library import fit_source, with_slots_for_many

        options, folder = fit_source(self.backend_options(), self.source, self.name)
        if for_many:
            options = with_slots_for_many(options, folder, self.name)
        return options.load(folder, name=self.name)

    def for_another_folder(self) -> ModelOptions:
        """The same for a process that is started in another folder, as those of a cluster are."""
        changes: dict[str, Any] = {}
        if self.model is not None and Path(self.model).exists():
            changes["model"] = str(Path(self.model).absolute())
        if self.cache_dir is not None:
            changes["cache_dir"] = self.cache_dir.absolute()
        return replace(self, **changes)

    def backend_options(self, default_cache_dir: Path | None = None) -> BackendOptions:
        """What a backend is made with, apart from its checkpoint; sets this process's number of threads.

        Args:
            default_cache_dir: the disk cache's folder where none is named; None is no disk cache. When it can't be
                used, the log says so and there is no disk cache; a folder that was named is an error.

        Raises:
            ConfigError: a setting can't be used.
        """
        from qwen35mm.cpu import set_num_threads
        from qwen35mm.engine import EngineSettings
        from qwen35mm.model_library import BackendOptions

        set_num_threads(self.threads)
        chosen = given(context_length=self.context_length, slots=self.slots, batch_invariant=self.batch_invariant)
        return BackendOptions(
            self.dtype,
            self.device,
            self.weights,
            self.rope_scaling,
            budget=self._media_budget(),
            limits=self.limits,
            settings=EngineSettings(**chosen),
            cache=self._cache_settings(default_cache_dir),
            max_memory=self.max_memory,
            fixed_slots=self.slots is not None,
            kv_directory=self._kv_directory(default_cache_dir),
        )

    def _kv_directory(self, default_directory: Path | None) -> Path | None:
        """Where keys and values may lie of a context that somebody asked for; no other is worth a disk's space."""
        if self.no_disk_cache or self.context_length is None:
            return None
        return self.cache_dir or default_directory or user_folder("cache")

    def _cache_settings(self, default_directory: Path | None) -> CacheSettings:
        from qwen35mm.cache import CacheSettings, DiskStore

        directory = None if self.no_disk_cache else self.cache_dir or default_directory
        if directory is None and self.cache_size is not None:
            raise typer.BadParameter("--cache-size is for the disk cache, and there is none.")
        kv_dtype = self.kv_dtype or "auto"
        chosen = given(kv_bytes=self.kv_memory, state_bytes=self.state_memory, disk_bytes=self.cache_size)
        kept_states = self.kept_states or "float32"
        cache = CacheSettings(directory=directory, kv_dtype=kv_dtype, kept_states=kept_states, **chosen)
        if directory is None:
            return cache
        try:
            # Tried here, because a model may take minutes to load.
            DiskStore(directory, max_bytes=cache.disk_bytes)
        except ConfigError as error:
            if directory == self.cache_dir:
                raise
            logger.warning("There is no disk cache, so a restart forgets everything: %s", error)
            return replace(cache, directory=None)
        return cache

    def _media_budget(self) -> MediaBudget:
        import torch

        from qwen35mm_preprocess import MediaBudget

        on_gpu = "cuda" in self.device or (self.device == "auto" and torch.cuda.is_available())
        chosen = given(
            max_image_tokens=self.max_image_tokens,
            max_video_tokens=self.max_video_tokens,
            max_frames=self.max_frames,
            fps=self.fps,
            color=self.color or None,
        )
        return replace(MediaBudget.for_device("cuda" if on_gpu else "cpu"), **chosen)


data_dir_option = _folder(
    rich_help_panel="Page",
    help="The folder that keeps conversations; without it your user's data folder, and none where strangers share the "
    "page.",
    envvar="QWEN35MM_DATA_DIR",
)


auth_file_option = typer.Option(
    parser=parse_folder,
    metavar="FILE",
    rich_help_panel="Page",
    help="Who may log in: a file with names and hashes of passwords, which `qwen35mm account add` writes.",
    envvar="QWEN35MM_AUTH_FILE",
)


@dataclass(frozen=True)
class PageOptions:
    """The chat page: where it is, for whom, and what they may ask for."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    host: Annotated[
        str, _page(help="The address. Any but this machine's own, or a Space's, is one that strangers share.")
    ] = "127.0.0.1"
    port: Annotated[int, _page(help="The port; 0 takes a free one.", min=0, max=65_535)] = 7860
    ui: Annotated[
        str, _page(metavar="PAGE", help="own, or gradio: the plain page of examples/gradio_chat.py, for one person.")
    ] = "own"
    auth: Annotated[
        Logins | None,
        _page(
            parser=parse_logins,
            metavar="PAIRS",
            help="Who may log in: name:password, one a line or with commas between; everybody without it. The variable "
            "keeps it out of the list of processes.",
        ),
    ] = None
    auth_file: Annotated[Path | None, auth_file_option] = None
    guests: Annotated[
        bool, _page("--guests", help="Let in those who don't log in, too, each with conversations of their own.")
    ] = False
    token: Annotated[
        str | None,
        _page(
            parser=parse_token,
            metavar="TOKEN",
            help="What the address of one's own page ends with, which other users of the machine must not know; a new "
            "one at each start without it, and 'none' lets all of them in.",
        ),
    ] = None
    data_dir: Annotated[Path | None, data_dir_option] = None
    api_key_file: Annotated[
        Path | None,
        _page(
            parser=parse_folder,
            metavar="FILE",
            help="Keys for programs, one a line: they may then use the model as with `qwen35mm serve`. On one's own "
            "page its token is a key already.",
        ),
    ] = None
    no_api: Annotated[
        bool, _page("--no-api", help="Answer no programs beside the page, not Gradio's clients either.")
    ] = False
    mcp: Annotated[
        bool, _page("--mcp", help="Offer the endpoint /chat as a tool, too, to programs that speak MCP.")
    ] = False
    backend: Annotated[
        str | None,
        _server(metavar="URL", help="An OpenAI-compatible server that answers; no model is loaded here then."),
    ] = None
    backend_model: Annotated[str | None, _server(metavar="NAME", help="The server's model, where it has several.")] = (
        None
    )
    backend_key_file: Annotated[
        Path | None, _server(parser=parse_folder, metavar="FILE", help="A file that holds the server's key.")
    ] = None
    backend_key: Annotated[
        str | None, _server(metavar="KEY", help="The key itself. The variable keeps it out of the list of processes.")
    ] = None
    max_upload: Annotated[
        int | None,
        _size(
            rich_help_panel="Page",
            help="As --max-video-size, and before it; 100MB where strangers share.",
        ),
    ] = None
    max_queue: Annotated[
        int | None, _page(help="Requests that may wait for the model; 16 without it.", min=1, max=10_000)
    ] = None
    max_gpu_seconds: Annotated[int, _page(help="Most seconds that one call on ZeroGPU asks for.", min=15, max=600)] = 60


@dataclass(frozen=True)
class HttpOptions:
    """How a front is reached: see `HttpSettings`. Several values have commas between."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    allowed_host: Annotated[
        Names | None, _names(metavar="NAME", help="Names besides this machine's own that it answers to.")
    ] = None
    cors_origin: Annotated[
        Names | None, _names(metavar="ORIGIN", help="Websites whose scripts may call it, such as https://example.org.")
    ] = None
    embed_origin: Annotated[
        Names | None, _names(metavar="ORIGIN", help="Websites that may show its page in a frame.")
    ] = None
    trust_proxy: Annotated[
        Names | None,
        _names(metavar="ADDRESS", help="Reverse proxies that are believed for whom they ask: addresses or networks."),
    ] = None
    base_path: Annotated[str | None, _http(metavar="PATH", help="The path that a proxy has it under: /chat.")] = None
    tls_cert: Annotated[
        Path | None, _folder(rich_help_panel="Network", help="A certificate (chain) in PEM: serve HTTPS.")
    ] = None
    tls_key: Annotated[
        Path | None, _folder(rich_help_panel="Network", help="Its private key, if it is in a file of its own.")
    ] = None

    def settings(self) -> HttpSettings:
        """Raises ConfigError: a value can't be used."""
        from qwen35mm.http.settings import HttpSettings

        return HttpSettings(
            self.allowed_host or (),
            self.cors_origin or (),
            self.embed_origin or (),
            self.trust_proxy or (),
            (self.base_path or "").rstrip("/"),
            self.tls_cert,
            self.tls_key,
        )


def given(**values: Any) -> dict[str, Any]:
    """The values that aren't None: the others are left to somebody else's default."""
    return {name: value for name, value in values.items() if value is not None}
