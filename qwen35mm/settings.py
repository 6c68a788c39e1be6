"""The settings of a model and of the chat page: name, type, limits and help.

The command line and the environment come from these classes: `max_frames` is the option `--max-frames` and the variable
QWEN35MM_MAX_FRAMES. The option wins. An empty variable counts as not set.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.lora_choices import read_choices
from qwen35mm.checkpoints.shards import model_name
from qwen35mm.errors import ConfigError
from qwen35mm.folders import user_folder
from qwen35mm.option_values import (
    Logins,
    Names,
    parse_folder,
    parse_json_options,
    parse_logins,
    parse_names,
    parse_size,
    parse_time,
    parse_token,
)

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.cache.planner import CacheSettings
    from qwen35mm.decoding import Decoders
    from qwen35mm.http.settings import HttpSettings
    from qwen35mm.model.weights import OnRead
    from qwen35mm.model_library import BackendOptions
    from qwen35mm_preprocess import MediaBudget, MediaLimits

logger = logging.getLogger(__name__)

DEMO_NOTE = (
    "This is the bundled demo model: it knows coloured shapes and nothing else. For a real one: --model Qwen/Qwen3.5-2B"
)

# Headings of the help.
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
    """A model, its limits and its cache. None leaves the choice to the model or the machine."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    model: Annotated[
        str | None, _model(help="A folder, a GGUF file, ollama:NAME or a Hugging Face id; by default the bundled demo.")
    ] = None
    dtype: Annotated[str, _model(help="auto, bfloat16 or float32.")] = "auto"
    weights: Annotated[
        str,
        _model(
            help="Format of the weights: auto, bf16, int8, int4 or, on cards, fp8. int8 and fp8 take a little over "
            "half the memory, int4 less than half. auto keeps the checkpoint's format; on a processor it takes int8, "
            "then int4, if it doesn't fit."
        ),
    ] = "auto"
    device: Annotated[
        str,
        _model(
            help="auto, cpu, cuda or cuda:N. cuda:0,cuda:1 splits the layers over two cards. With cuda:0,cpu the "
            "processor computes the layers that don't fit on the card, slowly."
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        _model(
            help="Most tokens of a conversation; by default the model's limit, at most 32,768. On a processor, keys "
            "and values that don't fit into memory go to a file in the disk cache's folder, which is slower.",
            min=1,
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        _model(
            metavar="yarn,factor=N",
            help="N times as many positions by YaRN, for contexts beyond the model's own. Short ones get a bit worse.",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        _size(
            rich_help_panel="Model",
            help="Most memory of the program on a processor: weights, context and slots are chosen to fit.",
        ),
    ] = None
    template_option: Annotated[
        list[str] | None,
        _model(
            metavar="NAME=VALUE",
            help="A switch of the chat template for requests that don't set it, such as preserve_thinking=true or "
            "reasoning_effort=low; may be repeated.",
        ),
    ] = None
    slots: Annotated[
        int | None, _model(help="Most replies at one time; by default 4, for captions up to 16.", min=1)
    ] = None
    lora: Annotated[
        list[str] | None,
        _model(
            "--lora",
            "--lora-modules",
            metavar="[NAME=]FOLDER[=SCALE]",
            help="An adapter (LoRA) that PEFT saved, for this model: a folder or a Hugging Face id; may be repeated: "
            "their changes are added up. =0.5 takes half of its change. With a name it stays apart, and requests "
            "choose it: `serve` offers it as a model, the page in a menu.",
        ),
    ] = None
    batch_invariant: Annotated[
        bool | None,
        _model(
            "--batch-invariant/--no-batch-invariant",
            help="Give a reply the same bits whatever else runs in its batch. Costs a GPU a little speed.",
        ),
    ] = None

    speculate: Annotated[
        str | None,
        _model(
            metavar="auto|off|mtp|ngram",
            help="Compute several tokens of an answer at once where they can be guessed. auto, the default, does where "
            "the answer stays the same: on a processor, with the model's own layer for guesses if memory allows. mtp "
            "always loads that layer, ngram never.",
        ),
    ] = None

    threads: Annotated[
        int | None,
        _model(help="Threads on the processor; by default OMP_NUM_THREADS, or one for each core it may use.", min=1),
    ] = None

    max_image_tokens: Annotated[int | None, _media(help="Most tokens of one image.", min=1)] = None
    max_video_tokens: Annotated[int | None, _media(help="Most tokens of one video.", min=1)] = None
    max_frames: Annotated[int | None, _media(help="Most frames of one video.", min=1)] = None
    fps: Annotated[float | None, _media(help="Frames a second that are read from a video.", min=0.001)] = None
    max_pixels: Annotated[
        int | None, _media(help="Most pixels of an image or a video's frame; by default 100000000.", min=1)
    ] = None
    max_image_size: Annotated[
        int | None, _size(rich_help_panel="Media", help="Largest image file; by default 64MiB.")
    ] = None
    max_video_size: Annotated[
        int | None, _size(rich_help_panel="Media", help="Largest video file; by default 512MiB.")
    ] = None
    max_seconds: Annotated[
        float | None, _media(help="Longest video in seconds; by default 14400 (four hours).", min=0.001)
    ] = None
    color: Annotated[
        str,
        _media(
            metavar="MODE",
            help="srgb: colours as a viewer shows them. checkpoint: the file's numbers, as transformers reads them.",
        ),
    ] = "srgb"

    kv_memory: Annotated[
        int | None,
        _size(rich_help_panel="Cache", help="Memory for keys and values, of running replies and of cached prompts."),
    ] = None
    kv_dtype: Annotated[
        str,
        _cache(
            metavar="TYPE",
            help="Type of keys and values: auto (the model's own), bf16, f16, fp8, fp8_e5m2, int8, int4; rotated, on a "
            "processor: int4r, tq4, tq3; separate types: k=int8,v=int4. int8 holds nearly twice as many tokens, int4 "
            "more than three times.",
        ),
    ] = "auto"
    kv_keep: Annotated[
        str,
        _cache(
            metavar="SHARE",
            help="Share of keys and values that a finished part of a prompt keeps, above 0 and up to 1 (all), or one "
            "for each kind of token: text=1,media=0.5. Less memory and faster long chats; details may be forgotten.",
        ),
    ] = "1"
    kv_gates: Annotated[
        str,
        _cache(
            metavar="FILE",
            help="Trained gates that choose what --kv-keep keeps, made by `qwen35mm gates`. auto: those beside the "
            "model, if there are any. none: by the keys alone.",
        ),
    ] = "auto"
    kept_states: Annotated[
        str,
        _cache(
            metavar="TYPE",
            help="Type of the cached recurrent states: float32, or bf16, which takes half the memory.",
        ),
    ] = "float32"
    state_memory: Annotated[
        int | None, _size(rich_help_panel="Cache", help="Memory for the recurrent states of cached prompts.")
    ] = None
    cache_dir: Annotated[
        Path | None, _folder(rich_help_panel="Cache", help="Folder of the disk cache, which outlives the program.")
    ] = None
    no_disk_cache: Annotated[
        bool,
        _cache(
            "--no-disk-cache",
            help="Keep nothing on disk, even if a folder is named; also no int8 and int4 weights for the next start.",
        ),
    ] = False
    cache_size: Annotated[
        int | None, _size(rich_help_panel="Cache", help="Largest size of the disk cache; by default 8GiB.")
    ] = None

    @property
    def source(self) -> str | Path:
        """The checkpoint to load."""
        return _split_name(self.model)[0] or demo_model_path()

    @property
    def name(self) -> str:
        """The model's name: the given one, else that of its folder or file, or the Hub id."""
        return _split_name(self.model)[1] or model_name(self.source)

    @property
    def limits(self) -> MediaLimits:
        """The limits of media. Raises MediaConfigError."""
        from qwen35mm_preprocess import MediaLimits

        return MediaLimits(
            **given(
                max_source_pixels=self.max_pixels,
                max_image_bytes=self.max_image_size,
                max_video_bytes=self.max_video_size,
                max_duration_s=self.max_seconds,
            )
        )

    def load(
        self,
        *,
        prompts_first: bool = False,
        more_slots: bool = False,
        named: bool = False,
        progress: OnRead | None = None,
        decoders: Decoders | None = None,
    ) -> LocalBackend:
        """Loads the model in the format that fits and starts its engine; the disk cache needs a named folder.

        Args:
            progress: called with the bytes of weights that were read, and all of them.
            prompts_first: see `EngineSettings`.
            decoders: processes for reading media; None reads them in this process.
            more_slots: whether requests always wait, so that more slots help; see `with_slots_for_many`.
            named: whether adapters may have names, by which requests choose them.

        Raises:
            Qwen35mmError: the model or a setting can't be used.
        """
        from qwen35mm.model_library import fit_source, with_slots_for_many

        names = [str(each) for each in read_choices(self.lora) if each.name is not None]
        if names and not named:
            raise ConfigError(
                f"--lora {names[0]}: only `serve` and `chat` choose among adapters by name. Give the folder without "
                "its name, and it becomes a part of the model."
            )
        asked = replace(self.backend_options(), progress=progress, decoders=decoders)
        options, folder = fit_source(asked, self.source, self.name)
        if more_slots:
            # Captions are short and share the drafted rows: the layer would cost their prompts more than it gives.
            settings = replace(options.settings, speculate=asked.settings.speculate)
            options = with_slots_for_many(replace(options, settings=settings), folder, self.name)
        options = replace(options, settings=replace(options.settings, prompts_first=prompts_first))
        return options.load(folder, name=self.name)

    def for_another_folder(self) -> ModelOptions:
        """The same with absolute paths, for a process that starts in another folder, for example on a cluster."""
        changes: dict[str, Any] = {"model": _absolute(self.model)}
        if self.cache_dir is not None:
            changes["cache_dir"] = self.cache_dir.absolute()
        if self.kv_gates not in ("auto", "none", ""):
            changes["kv_gates"] = str(Path(self.kv_gates).expanduser().absolute())
        if self.lora:
            changes["lora"] = [str(each.absolute()) for each in read_choices(self.lora)]
        return replace(self, **changes)

    def backend_options(self, default_cache_dir: Path | None = None) -> BackendOptions:
        """The options of a backend, without its checkpoint. Sets this process's number of threads.

        Args:
            default_cache_dir: the disk cache's folder if none is named; None means no disk cache. If it can't be used,
                a warning is logged and there is no disk cache. A named folder that can't be used is an error.

        Raises:
            ConfigError: a setting can't be used.
        """
        from qwen35mm.cpu import set_num_threads
        from qwen35mm.engine import EngineSettings
        from qwen35mm.model_library import BackendOptions

        set_num_threads(self.threads)
        chosen = given(
            context_length=self.context_length,
            slots=self.slots,
            batch_invariant=self.batch_invariant,
            speculate=self.speculate,
        )
        return BackendOptions(
            self.dtype,
            self.device,
            self.weights,
            self.rope_scaling,
            budget=self._media_budget(),
            limits=self.limits,
            settings=EngineSettings(**chosen),
            template_options=parse_json_options(self.template_option or ()),
            cache=self._cache_settings(default_cache_dir),
            max_memory=self.max_memory,
            fixed_slots=self.slots is not None,
            kv_directory=self._kv_directory(default_cache_dir),
            lora=read_choices(self.lora),
        )

    def _kv_directory(self, default_directory: Path | None) -> Path | None:
        """The folder for keys and values that don't fit into memory; None unless a context length was asked for."""
        if self.no_disk_cache or self.context_length is None:
            return None
        return self.cache_dir or default_directory or user_folder("cache")

    def _cache_settings(self, default_directory: Path | None) -> CacheSettings:
        from qwen35mm.cache import CacheSettings, DiskStore

        directory = None if self.no_disk_cache else self.cache_dir or default_directory
        if self.no_disk_cache and self.cache_size is not None:
            raise typer.BadParameter("--cache-size limits the disk cache, and there is none.")
        kv_dtype = self.kv_dtype or "auto"
        chosen = given(kv_bytes=self.kv_memory, state_bytes=self.state_memory, disk_bytes=self.cache_size)
        kept_states = self.kept_states or "float32"
        chosen |= {"kv_dtype": kv_dtype, "kv_keep": self.kv_keep or "1", "kept_states": kept_states}
        chosen["kv_gates"] = gates = self.kv_gates or "auto"
        if gates not in ("auto", "none") and not Path(gates).is_file():
            raise ConfigError(f"--kv-gates: there is no file {gates}.")
        cache = CacheSettings(directory=directory, keep_weights=not self.no_disk_cache, **chosen)
        if directory is None:
            return cache
        try:
            # Tried before the model is loaded, which may take minutes.
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


@dataclass(frozen=True)
class ModelsOptions(ModelOptions):
    """Several models that share the other options."""

    model: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride] - `each` has the single ones
        list[str] | None,
        _model(
            metavar="MODEL[=NAME]",
            help="A folder, a GGUF file, ollama:NAME or a Hugging Face id; by default the bundled demo. May be "
            "repeated: requests choose a model by its name, and --max-memory decides how many are loaded at a time.",
        ),
    ] = None
    keep_alive: Annotated[
        float | None,
        _model(
            parser=parse_time,
            metavar="TIME",
            help="Unload a model that nobody has used for so long: 10m, 1h, 0, or never (the default). A model also "
            "leaves when another one needs its memory.",
        ),
    ] = None

    def each(self) -> list[ModelOptions]:
        """The options of each model.

        Raises:
            ConfigError: two models or adapters have the same name.
        """
        shared: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(ModelOptions) if each.name != "model"
        }
        given, variable = self.model or [None], os.environ.get(f"{self.ENVIRONMENT}MODEL", "")
        if given == variable.split():
            # Typer splits a variable at spaces, and a folder may have one, or a comma.
            is_one = Path(_split_name(variable)[0] or "").expanduser().exists()
            given = [variable] if is_one else [each.strip() for each in variable.split(",") if each.strip()]
        found = [ModelOptions(model=model, **shared) for model in given or [None]]
        names = [*(each.name for each in found), *(each.name for each in read_choices(self.lora))]
        for name in names:
            if name is not None and names.count(name) > 1 and len(found) > 1:
                raise ConfigError(f"Two models have the name '{name}': give one another name, as in MODEL=NAME.")
        return found

    def for_another_folder(self) -> ModelsOptions:
        own = replace(self, model=None)
        found: Any = ModelOptions.for_another_folder(own)  # pyright: ignore[reportArgumentType]
        return replace(found, model=None if self.model is None else [_absolute(each) or "" for each in self.model])


def _absolute(model: str | None) -> str | None:
    """A model with its path from the root, if it is one."""
    source, name = _split_name(model)
    if source is None or not Path(source).exists():
        return model
    return "=".join([str(Path(source).absolute()), *([name] if name else [])])


def _split_name(model: str | None) -> tuple[str | None, str | None]:
    """A model and its name, of MODEL or MODEL=NAME. A folder may have the mark in its name."""
    if model is None or "=" not in model or Path(model).expanduser().exists():
        return model or None, None
    source, _, name = model.rpartition("=")
    if not source or not name.strip():
        raise ConfigError(f"--model is MODEL or MODEL=NAME; got {model!r}.")
    return source, name.strip()


data_dir_option = _folder(
    rich_help_panel="Page",
    help="Folder of the conversations; by default your user's data folder, or none where strangers share the page.",
    envvar="QWEN35MM_DATA_DIR",
)


auth_file_option = typer.Option(
    parser=parse_folder,
    metavar="FILE",
    rich_help_panel="Page",
    help="File with names and password hashes of those who may log in; `qwen35mm account add` writes it.",
    envvar="QWEN35MM_AUTH_FILE",
)


@dataclass(frozen=True)
class PageOptions:
    """The chat page: its address, its users and their limits."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    host: Annotated[
        str, _page(help="Address to listen on. Any but this machine's own, or a Space's, is shared by strangers.")
    ] = "127.0.0.1"
    port: Annotated[int, _page(help="Port; 0 takes a free one.", min=0, max=65_535)] = 7860
    ui: Annotated[
        str, _page(metavar="PAGE", help="own, or gradio: the page of examples/gradio_chat.py, for one person.")
    ] = "own"
    auth: Annotated[
        Logins | None,
        _page(
            parser=parse_logins,
            metavar="PAIRS",
            help="Who may log in: name:password pairs, separated by lines or commas; by default everybody may enter. "
            "The variable keeps it out of the process list.",
        ),
    ] = None
    auth_file: Annotated[Path | None, auth_file_option] = None
    guests: Annotated[
        bool, _page("--guests", help="Also let people in without a login, each with their own conversations.")
    ] = False
    token: Annotated[
        str | None,
        _page(
            parser=parse_token,
            metavar="TOKEN",
            help="Secret in the address of your own page, against other users of the machine; by default a new one at "
            "each start. 'none' lets all of them in.",
        ),
    ] = None
    data_dir: Annotated[Path | None, data_dir_option] = None
    api_key_file: Annotated[
        Path | None,
        _page(
            parser=parse_folder,
            metavar="FILE",
            help="File with API keys, one a line: programs with a key use the model as with `qwen35mm serve`. On your "
            "own page the token is a key already.",
        ),
    ] = None
    no_api: Annotated[bool, _page("--no-api", help="Answer only the page: no programs, no Gradio clients.")] = False
    mcp: Annotated[bool, _page("--mcp", help="Offer the endpoint /chat as an MCP tool.")] = False
    read_web: Annotated[
        bool,
        _page(
            "--read-web",
            help="Let people have web addresses read into their messages. On your own page the settings can allow it.",
        ),
    ] = False
    mcp_config: Annotated[
        Path | None,
        _page(
            parser=parse_folder,
            metavar="FILE",
            help="JSON file with MCP servers, whose tools chats may switch on. Each call is asked for first.",
        ),
    ] = None
    mcp_accounts: Annotated[
        Names | None,
        _page(parser=parse_names, metavar="NAMES", help="Accounts that may use --mcp-config; the others can't."),
    ] = None
    backend: Annotated[
        str | None,
        _server(metavar="URL", help="An OpenAI-compatible server that answers instead of a model on this machine."),
    ] = None
    backend_model: Annotated[str | None, _server(metavar="NAME", help="The server's model, if it has several.")] = None
    backend_key_file: Annotated[
        Path | None, _server(parser=parse_folder, metavar="FILE", help="File with the server's key.")
    ] = None
    backend_key: Annotated[
        str | None, _server(metavar="KEY", help="The server's key. The variable keeps it out of the process list.")
    ] = None
    max_upload: Annotated[
        int | None,
        _size(
            rich_help_panel="Page",
            help="Largest video file, instead of --max-video-size; 100MB where strangers share the page.",
        ),
    ] = None
    max_queue: Annotated[int | None, _page(help="Most requests in the queue; by default 16.", min=1, max=10_000)] = None
    max_gpu_seconds: Annotated[int, _page(help="Most seconds of one call on ZeroGPU.", min=15, max=600)] = 60


@dataclass(frozen=True)
class HttpOptions:
    """How the server is reached: see `HttpSettings`. Several values are separated by commas."""

    ENVIRONMENT: ClassVar[str] = "QWEN35MM_"

    allowed_host: Annotated[Names | None, _names(metavar="NAME", help="Host names that it also answers to.")] = None
    cors_origin: Annotated[
        Names | None,
        _names(metavar="ORIGIN", help="Websites whose scripts may call it, for example https://example.org."),
    ] = None
    embed_origin: Annotated[
        Names | None, _names(metavar="ORIGIN", help="Websites that may show the page in a frame.")
    ] = None
    trust_proxy: Annotated[
        Names | None,
        _names(metavar="ADDRESS", help="Reverse proxies that are trusted about the client: addresses or networks."),
    ] = None
    base_path: Annotated[str | None, _http(metavar="PATH", help="Path under which a proxy serves it: /chat.")] = None
    tls_cert: Annotated[
        Path | None, _folder(metavar="FILE", rich_help_panel="Network", help="Certificate (chain) in PEM: serve HTTPS.")
    ] = None
    tls_key: Annotated[
        Path | None,
        _folder(
            metavar="FILE", rich_help_panel="Network", help="The certificate's private key, if it is in another file."
        ),
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
    """The values that aren't None; the others keep their default."""
    return {name: value for name, value in values.items() if value is not None}
