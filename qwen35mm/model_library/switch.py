"""The model that a page uses: one of a shelf, onto which others of this machine come when they are chosen, or a
server's. The page needn't know of a change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.backends.shelf import LentBackend, Offer, Shelf
from qwen35mm.cache.gates import NONE
from qwen35mm.cache.kv_types import AUTO
from qwen35mm.contract import Event, GenerationRequest
from qwen35mm.errors import CheckpointError, ConfigError, EngineError
from qwen35mm.model import DeviceRequest, LoadedModel
from qwen35mm.model.load import read_config
from qwen35mm.model.weight_formats import ROUNDED_FORMATS
from qwen35mm.model_library.catalogue import HUB_MODELS, SUGGESTED_ON_CPU, SUGGESTED_ON_GPU, HubModel
from qwen35mm.model_library.fit import fit
from qwen35mm.model_library.installed import InstalledModel, find_model
from qwen35mm.model_library.memory import (
    Available,
    MemoryNeed,
    NoRoomError,
    available_within,
    largest_context,
    measure_room,
    tokenizer_bytes,
)
from qwen35mm.model_library.options import BackendOptions
from qwen35mm.model_library.plan import Forecast, forecast
from qwen35mm.model_library.sharing import NamedModel, PlannedModel
from qwen35mm_preprocess.say import Said, said_of, say

# Short, because a user is waiting.
CONNECT_S = 20.0


class BackendSwitch(LentBackend):
    """A page's backend. All calls of `stream`, `switch` and `connect` come from one event loop.

    Args:
        name: of the first model; None if the server answers first.
        options: as they were asked for, for other models and other settings; keys and values stay in memory.
        server: connected; closed at the end.
        available: returns a device's free memory in bytes; tests pass their own.

    Attributes:
        has_several: whether there were several models at the start.
        coming: the name of the model that is being loaded, to be used then; None while there is none.
    """

    def __init__(
        self,
        shelf: Shelf,
        name: str | None,
        options: BackendOptions | None = None,
        *,
        server: RemoteBackend | None = None,
        available: Available | None = None,
    ) -> None:
        super().__init__(shelf, name or "")
        self._options = replace(options or BackendOptions(), kv_directory=None)
        self._available = available or available_within(self._options)
        # All models share the options, so they share the devices.
        self._devices = DeviceRequest.parse(self._options.device).devices
        self._server = server
        # One may still answer after another one was chosen.
        self._servers = [] if server is None else [server]
        # Adapters change the models that they were named with, and no others.
        self._adapted = {each.folder for each in shelf.offers}
        self.has_several = len(shelf.offers) > 1
        self.coming: str | None = None
        self._unloading: asyncio.Future[None] | None = None

    @classmethod
    def of(
        cls,
        backend: LocalBackend | RemoteBackend,
        options: BackendOptions | None = None,
        *,
        fitted: BackendOptions | None = None,
        available: Available | None = None,
    ) -> BackendSwitch:
        """A switch that begins with one backend, and closes it.

        Args:
            options: the options for it and its successors.
            fitted: `fit_source`'s version of them; its slots and KV type stay.
        """
        options = options or BackendOptions()
        devices, free = DeviceRequest.parse(options.device).devices, available or available_within(options)
        if isinstance(backend, RemoteBackend):
            shelf = Shelf([], measure_room([], devices, free))
            return cls(shelf, None, options, server=backend, available=available)
        if fitted is None:
            integers = backend.loaded.model.integers
            plain = "bf16" if options.weights == "bf16" else "auto"
            fitted = replace(options, weights=integers if integers in ROUNDED_FORMATS else plain, kv_directory=None)
        else:
            cache = replace(options.cache, kv_dtype=fitted.cache.kv_dtype)
            options = replace(options, cache=cache, settings=replace(options.settings, slots=fitted.settings.slots))
        loaded = backend.loaded
        # The program's own memory is no model's.
        plan = replace(backend.engine.plan, runtime_bytes=tokenizer_bytes(loaded.config))
        need = MemoryNeed(plan, fitted.cache, all(device.type == "cpu" for device in devices))
        offer = _planned(loaded.name, loaded.path, fitted, need, has_tower=loaded.config.tower is not None).offer(free)
        shelf = Shelf([offer], max(measure_room([backend], devices, free), offer.num_bytes))
        shelf.put(offer.name, backend)
        return cls(shelf, offer.name, options, available=available)

    @property
    def server(self) -> RemoteBackend | None:
        """The server that answers now."""
        return self._server

    @property
    def known(self) -> Any:
        """See `OnShelf`; the server if one answers."""
        return self._server or super().known

    @property
    def answering(self) -> Any:
        """See `known`."""
        return self._server or super().answering

    @property
    def loaded(self) -> LoadedModel:
        """The current model; without its weights while it isn't loaded. Raises EngineError: it is a server's."""
        self._current()
        return self.known.loaded

    @property
    def folder(self) -> Path | None:
        """The current model's folder; None while a server answers."""
        return None if (offer := self.offer) is None else offer.folder

    @property
    def offer(self) -> Offer | None:
        """The current model; None while a server answers."""
        return None if self._server is not None else self.shelf.offer(self.name)

    @property
    def idles(self) -> bool:
        return self._server is None

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
        source = self._current().folder or "" if source is None else source
        if (offer := self.shelf.offer(str(source))) is not None:
            source = offer.folder or ""
        options = self._with_adapters_of(self._changed(**changes), Path(source))
        return forecast(source, options, room_bytes=self.room())

    def leaving(self, source: str | Path | None, num_bytes: int) -> list[Offer]:
        """The models that have to leave for one of this size; not the one that is loaded again."""
        offer = self._offer_of(Path(source)) if source is not None else self._current()
        return self.shelf.leaving(None if offer is None else offer.name, num_bytes)

    def room(self) -> int:
        """The bytes for a model if all others leave. Measure once for several models: it takes a while."""
        loaded = [self.shelf.loaded(each.name) for each in self.shelf.offers]
        return measure_room([each for each in loaded if isinstance(each, LocalBackend)], self._devices, self._available)

    def refusal(self, model: InstalledModel, room_bytes: int) -> Said | None:
        """Why a usable model doesn't fit this machine, for the user; None if it does. Reads no weights."""
        try:
            self._fit(model.folder, model.name, self._options.with_context(None), room_bytes)
        except (CheckpointError, ConfigError) as error:
            return said_of(error)
        return None

    def format_that_fits(self, model: HubModel, room_bytes: int) -> str | None:
        """The format in which a Hub model could replace the current one; None if it doesn't fit in any."""
        how = {"devices": self._devices, "memory_bytes": room_bytes}
        return model.format_that_fits(self._options.with_context(None), **how)

    def suggestion(self, room_bytes: int) -> HubModel | None:
        """The model to download on this machine; None if none fits."""
        largest = SUGGESTED_ON_CPU if self.on_cpu else SUGGESTED_ON_GPU
        candidates = reversed(HUB_MODELS[: HUB_MODELS.index(largest) + 1])
        return next((each for each in candidates if self.format_that_fits(each, room_bytes)), None)

    @property
    def on_cpu(self) -> bool:
        """Whether models lie in the machine's own memory."""
        return all(device.type == "cpu" for device in self._devices)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """See `LentBackend`: the model that the request was made for, whatever was chosen since."""
        server = self._server
        is_for_server = server is not None and request.model in (None, server.info.name)
        async with contextlib.aclosing(server.stream(request) if is_for_server else super().stream(request)) as events:  # pyright: ignore
            async for event in events:
                yield event

    async def switch(
        self,
        source: str | Path | None = None,
        *,
        context_length: int | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        kv_keep: str | None = None,
    ) -> None:
        """Answers with another model, or with the same one with other settings.

        Checks everything that it can before another model leaves. The old one answers until the new one is loaded; if
        that fails, it stays, and is loaded again for the next answer if it had to leave.

        Args:
            source: the name of a model on the shelf, a folder or an installed Hub id; None keeps the model.
            context_length: most tokens of a conversation; None leaves it to the model.
            weights: auto, bf16, int8 or int4, for this model and later ones; None keeps the previous choice and leaves
                the current model's weights as they are.
            kv_dtype, kv_keep: see `CacheSettings`; None as for `weights`.

        Raises:
            CheckpointError, ConfigError: the model or the context can't be used; the message says why.
            EngineError: it can't be loaded, with the reason.
        """
        if self.shelf.is_closed:
            raise EngineError(say("The program is shutting down."))
        named = None if source is None else self.shelf.offer(str(source))
        if named is not None and context_length is weights is kv_dtype is kv_keep is None:
            await self._take(named)
            return
        options = self._changed(context_length, weights, kv_dtype, kv_keep)
        old = named or (self._current() if source is None else None)
        offer = await asyncio.to_thread(self._planned_offer, source, old, options, weights)
        await self._take(offer)
        self._options = options

    def return_to(self, name: str) -> bool:
        """Answers with a model that was chosen before, if it is loaded still; whether it is."""
        if not self.shelf.is_open(name):
            return False
        self._server = None
        self.choose(name)
        return True

    async def connect(self, server: RemoteBackend) -> None:
        """Answers with a server's model; frees the memory of models in this process that answer nobody.

        Args:
            server: connected here; closed here if it can't be used, else at the end.

        Raises:
            ConfigError, RequestError, EngineError: it can't be used; the previous backend stays.
        """
        try:
            await server.connect(CONNECT_S)
        except BaseException:
            server.close()
            raise
        self._servers.append(server)
        self._server = server
        self.choose("")
        # Its turn may come only after a model that waits for answers, and the server answers already.
        self._unloading = asyncio.ensure_future(self.shelf.unload_idle(0))

    async def larger_context(self, limit: int | None = None) -> int | None:
        """The largest context length above the current one that the model and the memory allow.

        Args:
            limit: the longest wanted.
        """
        backend = self.answering
        if not isinstance(backend, LocalBackend):
            return None
        return await asyncio.to_thread(lambda: largest_context(backend, self._options, limit, self.room()))

    def close(self) -> None:
        """Closes all backends; returns once the disk cache is written."""
        for server in self._servers:
            server.close()
        self.shelf.close()

    def _current(self) -> Offer:
        if (offer := self.offer) is None:
            raise EngineError(say("The model runs on {host}, not on this machine.", host=self.info.host or ""))
        return offer

    def _offer_of(self, folder: Path) -> Offer | None:
        """The model of the shelf with this name or folder; the current one if there are several."""
        found = [each for each in self.shelf.offers if folder == each.folder or str(folder) == each.name]
        return next((each for each in found if each.name == self.name), found[0] if found else None)

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
        """Other models take neither the adapters nor the gates of those of the command line."""
        offer = self._offer_of(folder) if folder in self._adapted else None
        if offer is not None and offer.options is not None:
            return replace(options, lora=offer.options.lora)
        gates = NONE if options.cache.kv_gates == NONE else AUTO
        return replace(options, lora=(), cache=replace(options.cache, kv_gates=gates))

    def _planned_offer(
        self, source: str | Path | None, old: Offer | None, options: BackendOptions, weights: str | None
    ) -> Offer:
        """A model with these options, for the shelf; what is there already if nothing changes."""
        if old is not None and old.folder is not None:
            name, folder = old.name, old.folder
        else:
            assert source is not None
            model = find_model(source)
            if not model.usable:
                raise CheckpointError(
                    say("'{name}' can't be used: {reason}", name=model.name, reason=model.reason or "")
                )
            folder, old = model.folder, self._offer_of(model.folder)
            name = self._free_name(model.name) if old is None else old.name
        room_bytes, kept = self.room(), None
        backend = None if old is None else self.shelf.loaded(old.name)
        tried = [options]
        if old is not None and isinstance(backend, LocalBackend) and weights in (None, backend.loaded.weights):
            # As it was loaded: `fit` may have chosen its layer that drafts tokens, which may leave too little room.
            options = replace(options, weights=old.options.weights)
            settings = replace(options.settings, speculate=old.options.settings.speculate)
            tried, kept = [replace(options, settings=settings), options], backend.loaded
        for each in tried:
            try:
                fitted, need = self._fit(folder, name, each, room_bytes)
                break
            except NoRoomError:
                if each == tried[-1]:
                    raise
        how = (fitted.weights, fitted.settings.speculate, fitted.lora)
        if kept is not None and old is not None:
            if how != (old.options.weights, old.options.settings.speculate, old.options.lora):
                kept = None
            elif self._is_same(old, fitted, need):
                return old
        config = read_config(folder)
        planned = _planned(name, folder, fitted, need, has_tower=config.tower is not None)
        return planned.offer(self._available, kept)

    def _is_same(self, old: Offer, fitted: BackendOptions, need: MemoryNeed) -> bool:
        kept = [(each.cache.kv_dtype, each.cache.keep) for each in (old.options, fitted)]
        return kept[0] == kept[1] and need.plan.context_length == old.context_length

    def _free_name(self, name: str) -> str:
        taken, number = {each.name for each in self.shelf.offers}, 2
        if name not in taken:
            return name
        while f"{name}-{number}" in taken:
            number += 1
        return f"{name}-{number}"

    def _fit(
        self, folder: Path, name: str, options: BackendOptions, room_bytes: int
    ) -> tuple[BackendOptions, MemoryNeed]:
        how = {"devices": self._devices, "memory_bytes": room_bytes}
        return fit(self._with_adapters_of(options, folder), folder, name, **how)

    async def _take(self, offer: Offer) -> None:
        """Answers with a model once it is loaded; what was offered by its name before stays if that fails."""
        before = self.shelf.offer(offer.name)
        self.shelf.set(offer)
        self.coming = offer.name
        try:
            async with self.shelf.lease(offer.name):
                self._server = None
                self.choose(offer.name)
        except BaseException:
            if before is None:
                self.shelf.remove(offer.name)
            elif before is not offer:
                self.shelf.set(before)
            raise
        finally:
            self.coming = None


def _planned(name: str, folder: Path, options: BackendOptions, need: MemoryNeed, *, has_tower: bool) -> PlannedModel:
    sizes = (need.least_bytes, need.total_bytes, need.plan.context_length)
    return PlannedModel(NamedModel(folder, name), folder, options, *sizes, has_tower)
