"""The backend that answers, behind one object that stays, so that its users needn't know of a change of model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.cache.gates import NONE
from qwen35mm.cache.kv_types import AUTO
from qwen35mm.contract import Event, GenerationRequest, Message, ModelInfo, SamplingParams
from qwen35mm.errors import CheckpointError, ConfigError, EngineError
from qwen35mm.model import DeviceRequest, LoadedModel
from qwen35mm.model.load import choose_dtype, read_config
from qwen35mm.model.weight_formats import ROUNDED_FORMATS
from qwen35mm.model.weights import OnRead
from qwen35mm.model_library.catalogue import HUB_MODELS, SUGGESTED_ON_CPU, SUGGESTED_ON_GPU, HubModel
from qwen35mm.model_library.changes import Changes
from qwen35mm.model_library.fit import fit
from qwen35mm.model_library.installed import InstalledModel, find_model
from qwen35mm.model_library.memory import (
    Available,
    MemoryNeed,
    NoRoomError,
    Room,
    available_within,
    largest_context,
    measure_room,
    memory_need,
)
from qwen35mm.model_library.options import BackendOptions
from qwen35mm.model_library.plan import Forecast, forecast
from qwen35mm_preprocess import MediaProcessor
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

# Short, because a user is waiting.
CONNECT_S = 20.0
Answering = LocalBackend | RemoteBackend
SwitchPhase = Literal["check", "connect", "close", "load", "restore"]
OnProgress = Callable[[SwitchPhase], None]


class BackendSwitch:
    """Owns the running backend; replaces it by one with another model or settings, or by a server's.

    It offers the backend methods that a page uses. All calls of `stream` and `switch` come from one event loop.

    Args:
        backend: the first one, which the switch closes from now on.
        options: the options for it and its successors, with keys and values in memory.
        fitted: `fit_source`'s version of them; its slots and KV type stay.
        available: returns a device's free memory in bytes; tests pass their own.
    """

    def __init__(
        self,
        backend: Answering,
        options: BackendOptions | None = None,
        *,
        fitted: BackendOptions | None = None,
        available: Available | None = None,
    ) -> None:
        self._options = self._fitted = replace(options or BackendOptions(), kv_directory=None)
        if fitted is not None:
            settings = replace(self._options.settings, slots=fitted.settings.slots)
            self._options = replace(self._changed(kv_dtype=fitted.cache.kv_dtype), settings=settings)
        self._available = available or available_within(self._options)
        self._backend: Answering | None = backend
        # None while a server answers.
        self._last: LoadedModel | None = None
        # All models share the options, so they share the devices.
        self._devices = DeviceRequest.parse(self._options.device).devices
        # The options that would make the current backend again.
        if fitted is not None:
            self._fitted = fitted
        elif isinstance(backend, LocalBackend):
            integers, asked = backend.loaded.model.integers, self._options.weights
            plain = "bf16" if asked == "bf16" else "auto"
            self._fitted = replace(self._options, weights=integers if integers in ROUNDED_FORMATS else plain)
        self._changes = Changes()
        # Adapters change the model that they were named with, and no other.
        self._adapted = backend.loaded.path if isinstance(backend, LocalBackend) else None
        self._closed = False
        self._take(backend)

    @property
    def current(self) -> Answering:
        """The backend that answers now.

        Raises:
            EngineError: there is none: it was closed, or nothing could be loaded.
        """
        if self._backend is None:
            raise EngineError(say("No model is loaded at the moment. Choose one, or start the program again."))
        return self._backend

    @property
    def is_ready(self) -> bool:
        """Whether a model is loaded and none is being loaded in its place."""
        return self._backend is not None and not self._changes.is_going_on

    @property
    def loaded(self) -> LoadedModel:
        """The current model; between two models the previous one, without its weights.

        Raises:
            EngineError: the current model is a server's.
        """
        if self._last is None:
            raise EngineError(say("The model runs on {host}, not on this machine.", host=self._info.host or ""))
        return self._last

    @property
    def folder(self) -> Path | None:
        """The current model's folder; None while a server answers."""
        return None if self._last is None else self._last.path

    @property
    def info(self) -> ModelInfo:
        """The current model's; between two models the previous one's."""
        return self._info if self._backend is None else self._backend.info

    @property
    def media(self) -> MediaProcessor:
        return self._media

    @property
    def is_demo(self) -> bool:
        return self.folder == demo_model_path()

    @property
    def idles(self) -> bool:
        return self._info.host is None

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def options(self) -> BackendOptions:
        """The options for successors. Their `weights` are the requested ones; `loaded.weights` are the actual ones."""
        return self._options

    def forecast(self, source: str | Path | None = None, **changes: Any) -> Forecast:
        """What `switch` with these arguments would take of the memory free then; fetches a Hub id's config.json.

        Raises:
            CheckpointError, ConfigError: the model or a setting can't be used.
            EngineError: `source` is None and the current model is a server's.
        """
        source = self.loaded.path if source is None else source
        options = self._with_adapters_of(self._changed(**changes), Path(source))
        return forecast(source, options, room_bytes=self.room().after_bytes)

    def room(self) -> Room:
        """The memory for a successor. Measure once for several models: it takes a while."""
        return measure_room(self._local, self._devices, self._available)

    def refusal(self, model: InstalledModel, room: Room) -> Said | None:
        """Why a usable model doesn't fit this machine, for the user; None if it does. Reads no weights."""
        try:
            self._check_fit(model, self._options.with_context(None), room)
        except (CheckpointError, ConfigError) as error:
            return said_of(error)
        return None

    def format_that_fits(self, model: HubModel, room: Room) -> str | None:
        """The format in which a Hub model could replace the current one; None if it doesn't fit in any."""
        how = {"devices": self._devices, "memory_bytes": room.after_bytes}
        return model.format_that_fits(self._options.with_context(None), **how)

    def suggestion(self, room: Room) -> HubModel | None:
        """The model to download on this machine; None if none fits."""
        largest = SUGGESTED_ON_CPU if self.on_cpu else SUGGESTED_ON_GPU
        candidates = reversed(HUB_MODELS[: HUB_MODELS.index(largest) + 1])
        return next((each for each in candidates if self.format_that_fits(each, room)), None)

    @property
    def on_cpu(self) -> bool:
        """Whether models lie in the machine's own memory."""
        return all(device.type == "cpu" for device in self._devices)

    @property
    def _local(self) -> LocalBackend | None:
        """The backend in this process, if it is the one that answers."""
        return self._backend if isinstance(self._backend, LocalBackend) else None

    def count_tokens(self, messages: Sequence[Message], **options: Any) -> int:
        """The current backend's."""
        return self.current.count_tokens(messages, **options)

    def memory(self) -> dict[str, Any]:
        """The current backend's."""
        return self.current.memory()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """The current backend's; never idle while the model is being changed."""
        backend = self._backend
        return backend is not None and not self._changes.is_going_on and backend.wait_idle(timeout_s)

    async def until_idle(self) -> None:
        """Returns once no reply is in progress."""
        await self._changes.until_idle()

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The current backend's `stream`; during a change of model it waits for the new one.

        Raises:
            EngineError: there is no model; also the backend's own errors.
        """
        return self._streamed(lambda backend: backend.stream(request))

    def stream_prompt(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Event, None]:
        """The current backend's, as `stream`."""
        return self._streamed(lambda backend: backend.stream_prompt(prompt, params, **options))

    def stream_score(self, text: Any, given: Any = None, **options: Any) -> AsyncGenerator[Event, None]:
        """The current backend's, as `stream`."""
        return self._streamed(lambda backend: backend.stream_score(text, given, **options))

    def stream_embedding(self, given: Any, **options: Any) -> AsyncGenerator[Event, None]:
        """The current backend's, as `stream`."""
        return self._streamed(lambda backend: backend.stream_embedding(given, **options))

    def _streamed(self, begin: Callable[[Any], AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
        return self._changes.stream(lambda: begin(self.current))

    async def switch(
        self,
        source: str | Path | None = None,
        *,
        context_length: int | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        kv_keep: str | None = None,
        on_progress: OnProgress | None = None,
        on_read: OnRead | None = None,
    ) -> Answering:
        """Answers with another model, or with the same one with other settings.

        Checks everything that it can before it closes the old backend; if the new one fails to load, the old one comes
        back. Runs to its end even if the caller is cancelled.

        Args:
            source: a folder or an installed Hub id; None keeps the model.
            context_length: most tokens of a conversation; None leaves it to the model.
            weights: auto, bf16, int8 or int4, for this model and later ones; None keeps the previous choice and leaves
                the current model's weights as they are.
            kv_dtype, kv_keep: see `CacheSettings`; None as for `weights`.
            on_progress: called in the event loop as each phase begins.
            on_read: called in a thread with the bytes of weights that were read, and all of them.

        Raises:
            CheckpointError, ConfigError: the model or the context can't be used; the message says why. The old backend
                stays.
            RequestError: replies are in progress, or another model is being loaded.
            EngineError: neither the new model nor the old one could be loaded.
        """
        self._check_open()
        options = replace(self._changed(context_length, weights, kv_dtype, kv_keep), progress=on_read)
        keeps = weights is None or (self._last is not None and weights == self._last.weights)
        report = on_progress or (lambda phase: None)
        await self._changes.make(lambda: self._change(source, options, keeps, report))
        return self.current

    def _changed(
        self,
        context_length: int | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        kv_keep: str | None = None,
    ) -> BackendOptions:
        options = self._options.with_context(context_length)
        options = options if weights is None else replace(options, weights=weights)
        kept = {name: value for name, value in (("kv_dtype", kv_dtype), ("kv_keep", kv_keep)) if value is not None}
        return replace(options, cache=replace(options.cache, **kept))

    def _with_adapters_of(self, options: BackendOptions, folder: Path) -> BackendOptions:
        """Another model takes neither the first one's adapters nor its gates."""
        if folder == self._adapted:
            return options
        gates = NONE if options.cache.kv_gates == NONE else AUTO
        return replace(options, lora=(), cache=replace(options.cache, kv_gates=gates))

    async def connect(self, server: RemoteBackend, *, on_progress: OnProgress | None = None) -> None:
        """Answers with a server's model; frees the memory of a model in this process.

        Args:
            server: connected here; closed here if it can't be used, else later by the switch.

        Raises:
            ConfigError, RequestError, EngineError: it can't be used; the previous backend stays. Or `switch`'s errors.
        """

        async def change() -> None:
            report = on_progress or (lambda phase: None)
            report("connect")
            try:
                await server.connect(CONNECT_S)
            except BaseException:
                server.close()
                raise
            await self._close_old(report)
            self._take(server)

        self._check_open()
        await self._changes.make(change)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(say("The program is shutting down."))

    async def larger_context(self, limit: int | None = None) -> int | None:
        """The largest context length above the current one that the model and the memory allow.

        Args:
            limit: the longest wanted.
        """
        backend = self.current
        if not isinstance(backend, LocalBackend):
            return None
        return await asyncio.to_thread(largest_context, backend, self._options, limit, self._available)

    def close(self) -> None:
        """Closes the backend; returns once the disk cache is written."""
        self._closed = True
        if self._backend is not None:
            self._backend.close()

    async def _change(
        self, source: str | Path | None, options: BackendOptions, keeps_weights: bool, report: OnProgress
    ) -> None:
        """keeps_weights: whether to reuse the current model's weights if it is the requested model."""
        report("check")
        model = _installed(self.loaded) if source is None else await asyncio.to_thread(find_model, source)
        same = self._local is not None and model.folder == self.folder and keeps_weights
        try:
            fitted, need, fits_beside = await asyncio.to_thread(self._check, model, options, keep_weights=same)
        except NoRoomError:
            if not same or self._fitted.settings.speculate == options.settings.speculate:
                raise
            # The layer that only `auto` took leaves too little room: the model is loaded again without it.
            same, again = False, replace(options, weights=self._fitted.weights)
            fitted, need, fits_beside = await asyncio.to_thread(self._check, model, again, keep_weights=False)
        kept = [(each.cache.kv_dtype, each.cache.keep) for each in (options, self._options)]
        is_kv_same = kept[0] == kept[1]
        if same and is_kv_same and need.plan.context_length == self._context_length:
            return

        # If both fit, the new one loads beside the old one, which stays if loading fails. With the same weights, only
        # the engine is made again. Nothing here may refer to the old backend, or its memory stays.
        kept = self.loaded if same else None
        was_running = self._backend is not None
        # A server takes no memory here.
        fits_beside = (fits_beside or (was_running and self._local is None)) and not same
        if not fits_beside:
            await self._close_old(report)
        report("load")
        try:
            new = await asyncio.to_thread(fitted.make, model.folder, model.name, kept)
        except BaseException:
            if was_running and not fits_beside:
                await self._restore(kept, report)
            raise
        if fits_beside:
            await self._close_old(report)
        # What was called with this change's progress isn't for later ones.
        self._options, self._fitted = (replace(each, progress=None) for each in (options, fitted))
        self._take(new)

    async def _close_old(self, report: OnProgress) -> None:
        if self._backend is None:
            return
        report("close")
        # The page still shows the model, but its weights have to go.
        if self._last is not None:
            self._last = replace(self._last, model=None)  # pyright: ignore[reportArgumentType]
        # A thread keeps its function a moment longer than its caller waits, so it gets a list to empty.
        old, self._backend = [self._backend], None
        await asyncio.to_thread(lambda: old.pop().close())

    async def _restore(self, kept: LoadedModel | None, report: OnProgress) -> None:
        report("restore")
        options = self._fitted.with_context(self._context_length)
        try:
            self._take(await asyncio.to_thread(options.make, self.loaded.path, self.loaded.name, kept))
        except Exception as error:
            logger.exception("the model before could not be loaded again")
            raise EngineError(
                say(
                    "The new model can't be used, and '{name}' couldn't be loaded again. Choose another model, or "
                    "start the program again.",
                    name=self._info.name,
                )
            ) from error

    def _take(self, backend: Answering) -> None:
        self._backend, self._info, self._media = backend, backend.info, backend.media
        self._last = backend.loaded if isinstance(backend, LocalBackend) else None
        self._context_length = backend.context_length
        if self._closed:
            backend.close()

    def _check(
        self, model: InstalledModel, options: BackendOptions, *, keep_weights: bool
    ) -> tuple[BackendOptions, MemoryNeed, bool]:
        """The model's options and memory, and whether it fits beside the current one; raises if it doesn't fit."""
        if not model.usable:
            raise CheckpointError(say("'{name}' can't be used: {reason}", name=model.name, reason=model.reason or ""))
        local = self._local
        if not keep_weights or local is None:
            return self._check_fit(model, options, self.room())
        devices = local.loaded.model.devices
        room = measure_room(local, devices, self._available, keep_weights=True)
        where = {"devices": devices, "memory_bytes": room.after_bytes}
        # As the model was loaded: `fit` may have chosen its layer that drafts tokens.
        options = replace(options, settings=replace(options.settings, speculate=self._fitted.settings.speculate))
        config = read_config(model.folder, rope_scaling=options.rope_scaling, mtp=options.mtp)
        need = memory_need(model.name, config, 0, options, dtype=choose_dtype(options.dtype), **where)
        fitted = replace(options, weights=self._fitted.weights, lora=self._fitted.lora, cache=need.settings)
        return fitted, need, need.total_bytes <= room.beside_bytes

    def _check_fit(
        self, model: InstalledModel, options: BackendOptions, room: Room
    ) -> tuple[BackendOptions, MemoryNeed, bool]:
        """`_check` for other weights than the current ones."""
        how = {"devices": self._devices, "memory_bytes": room.after_bytes}
        fitted, need = fit(self._with_adapters_of(options, model.folder), model.folder, model.name, **how)
        return fitted, need, need.total_bytes <= room.beside_bytes


def _installed(loaded: LoadedModel) -> InstalledModel:
    return InstalledModel(loaded.name, str(loaded.path), loaded.path, 0, True)
