"""Choosing and downloading another model on the page; only if one person has the machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.shelf import Offer
from qwen35mm.cache.kv_keep import KVKeep
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import Qwen35mmError, RequestError, StorageError, report_bug
from qwen35mm.http.requests import request
from qwen35mm.model.load import WEIGHTS, choose_dtype
from qwen35mm.model.weight_formats import AS_STORED, ROUNDED_FORMATS
from qwen35mm.model_library import HUB_MODELS, BackendSwitch, DownloadCancelled, HubModel, download, installed_models
from qwen35mm.model_library.hub import lacking_disk_bytes, missing
from qwen35mm.model_library.installed import InstalledModel, weights_on_disk
from qwen35mm.model_library.plan import SMALLER_KV, Forecast, FormatPlan
from qwen35mm.model_library.switch import CONNECT_S
from qwen35mm.pools import REQUESTS
from qwen35mm.web.serving.progress import DownloadProgress
from qwen35mm.web.serving.servers import GIVEN, Server, Servers
from qwen35mm_kernels.kv_formats import KVFormats
from qwen35mm_preprocess.say import Said, decimal, said_of, say, size

logger = logging.getLogger(__name__)

# Most names of a server's models in a list.
MAX_NAMES = 1_000
Length = Annotated[int, Field(gt=0)]
# Shares of keys and values to choose from.
_KEEPS: dict[str, Said] = {
    "1": say("all"),
    "text=1,media=0.5": say("all text, half of pictures and videos"),
    "0.5": say("half"),
}
_PHASES = {
    "check": say("Checking the model"),
    "connect": say("Contacting the server"),
    "wait": say("Waiting for the answer in progress"),
    "close": say("Unloading the old model"),
    "load": say("Loading the model"),
}


class Models:
    """The page's requests about models. Only one change runs at a time.

    Args:
        rest: ends the model's idle work, which would delay the change.
        servers: other servers whose models can be chosen.
    """

    def __init__(self, switch: BackendSwitch, rest: Callable[[], Awaitable[None]], servers: Servers) -> None:
        self._switch = switch
        self._servers = servers
        # The id of the current server.
        self._server = GIVEN
        self._rest = rest
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._state = told("")
        self._download: DownloadProgress | None = None

    @request
    def models(self, person: Person) -> Any:
        """The models of the shelf, the other installed ones, servers' models, and models to download."""
        room, offers = self._switch.room(), self._switch.shelf.offers
        folders, installed = {offer.folder for offer in offers}, installed_models()
        here, sizes = {model.source for model in installed}, {model.folder: model.num_bytes for model in installed}
        others = [self._installed(model, room) for model in installed if model.folder not in folders]
        return {
            "models": [*(self._offered(offer, sizes) for offer in offers), *others],
            **self._listed_servers(),
            "downloads": [self._downloadable(model, room) for model in HUB_MODELS if model.hub_id not in here],
        }

    def state(self) -> dict[str, Any]:
        """The state of the change: `busy`, `is_download`, `is_waiting`, `is_cancelled`, `label`, `detail`, `share`,
        `error`."""
        if self._download is not None:
            return self._state | self._download.describe() | {"is_download": True}
        if (coming := self._switch.coming) is not None:
            step, share = self._switch.shelf.step(coming)
            return self._state | {"label": _PHASES[step or "wait"], "share": share, "is_waiting": self._is_waiting}
        return self._state

    def suggestion(self) -> dict[str, Any] | None:
        """The real model to offer beside the demo: the last one here that fits, else one to download. Asks no network.

        None if there is none, or if a real model answers already.
        """
        if not self._switch.is_demo or any(not offer.is_demo for offer in self._switch.shelf.offers):
            return None
        room = self._switch.room()
        for model in reversed(installed_models()):
            if model.usable and model.folder != demo_model_path() and self._switch.refusal(model, room) is None:
                words = {"size": size(model.num_bytes), "fit": say("fits this machine")}
                return {"name": model.name, "source": str(model.source), **words, "is_new": False}
        model = self._switch.suggestion(room)
        return model and {"name": model.hub_id, **self._downloadable(model, room), "is_new": True}

    @request
    def plan(
        self,
        person: Person,
        source: str | None = None,
        context_length: Length | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        kv_keep: str | None = None,
    ) -> Any:
        """The memory that `change_model` with these arguments needs, and settings that fit if these don't.

        Loads nothing; fetches config.json of a model that is neither installed nor in the catalogue.
        """
        settings = {"context_length": context_length, "weights": weights, "kv_dtype": kv_dtype, "kv_keep": kv_keep}
        found = self._switch.forecast(source, **settings)
        taken, options = found.taken, self._switch.options
        suggestion = None
        if not taken.fits:
            open_settings = {**settings, "weights": "auto", "kv_dtype": "auto"}
            suggestion = self._switch.forecast(source, **open_settings).suggestion
        needed, on_cpu = taken.needed, self._switch.on_cpu
        most = taken.most or needed
        leaving = self._switch.leaving(source, most.total_bytes if on_cpu else most.device_bytes) if taken.fits else []
        parts = {
            "weights": needed.weights_bytes,
            "kv": needed.kv_bytes,
            "states": needed.slot_bytes,
            "work": needed.work_bytes,
            # Neither the program nor the kept cache is in a GPU's memory.
            "program": needed.runtime_bytes if on_cpu else 0,
            "kept": taken.most.total_bytes - needed.total_bytes if on_cpu and taken.most is not None else 0,
        }
        asked, kv_asked = weights or options.weights, kv_dtype or options.cache.kv_dtype
        keep = str(KVKeep.of(kv_keep or options.cache.kv_keep))
        own = kv_formats_of(AUTO, dtype := choose_dtype(options.dtype))[0].name
        kv_types = {AUTO: say("Automatic: {name}", name=own), **{x: x for x in (*SMALLER_KV, kv_asked) if x != AUTO}}
        return {
            "download": None if (left := found.download_bytes) is None else say("{size} to download.", size=size(left)),
            "parts": parts,
            "memory": found.memory_bytes,
            "fits": taken.fits,
            "leaving": [{"name": offer.name, "is_demo": offer.is_demo} for offer in leaving],
            "slots": needed.num_slots,
            "context_length": needed.context_length,
            "largest_context": taken.largest_context,
            "num_positions": found.num_positions,
            "weights": _choices(_weights(found, asked), asked),
            "kv_types": _choices(kv_types, kv_asked),
            "kv_keeps": _choices(_KEEPS | {keep: _KEEPS.get(keep, keep)}, keep),
            "suggestion": suggestion and _suggested(suggestion, dtype),
        }

    @request
    async def change_model(
        self,
        person: Person,
        source: str | None = None,
        context_length: Length | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        kv_keep: str | None = None,
        is_new: bool = False,
        server: str | None = None,
    ) -> Any:
        """Begins to load another model, or the same one in another format or with another context length.

        Returns the state of the change.

        Args:
            source: a model's name on the shelf, folder or Hub id; None keeps the model.
            weights: auto, bf16, int8 or int4; None keeps the current choice.
            kv_dtype, kv_keep: format of the KV cache, and the share that is kept; None keeps the current choice.
            is_new: whether to download the model first.
            server: id of a server whose model is used instead; the other arguments are ignored then.

        Raises:
            RequestError: a change is in progress.
            NotFoundError: there is no such server.
        """
        found = None if server is None else await REQUESTS.run(self._servers.find, server)
        if self._download is not None:
            raise RequestError(say("A model is being downloaded. Wait until it is ready, or cancel the download."))
        if self._task is not None and not self._task.done():
            raise RequestError(say("Another model is already loading. Wait until it is ready."))
        if found is not None:
            change = self._connect(found)
        else:
            settings = {"context_length": context_length, "weights": weights, "kv_dtype": kv_dtype, "kv_keep": kv_keep}
            change = self._load(source, is_new, **settings)
        self._cancelled = False
        self._state = told(_PHASES["check"], busy=True)
        self._task = asyncio.create_task(self._change(change))
        if source is not None and self._switch.shelf.is_open(source):
            await self._task
        return self.state()

    @request
    async def change_state(self, person: Person) -> Any:
        """`state`."""
        return self.state()

    @request
    async def cancel_change(self, person: Person) -> Any:
        """Cancels a download and keeps the received part for the next try, or a model's wait for answers of others.
        Doesn't stop loading."""
        self._cancelled = True
        if self._is_waiting and self._task is not None:
            self._task.cancel()
        return {}

    @property
    def _is_waiting(self) -> bool:
        coming = self._switch.coming
        return coming is not None and self._switch.shelf.step(coming)[0] in (None, "wait")

    @request
    async def add_server(self, person: Person, address: str, model: str | None = None, key: str | None = None) -> Any:
        """Adds a server if it answers. If it has several models and none is given, returns their names instead."""
        server = Server(address := address.strip(), model or None, key or None)
        backend = server.backend(self._switch.media.limits, decoders=self._switch.options.decoders)
        try:
            if not model:
                names = await backend.list_models(CONNECT_S)
                if len(names) > 1:
                    return {"names": names[:MAX_NAMES], "server": None}
            await backend.connect(CONNECT_S)
            kept = await REQUESTS.run(self._servers.add, address, backend.info.name, key or None)
        finally:
            backend.close()
        return {"names": [], "server": kept.id}

    @request
    def remove_server(self, person: Person, server: str) -> Any:
        """Removes a server and its key."""
        self._servers.remove(server)
        return {}

    def _listed_servers(self) -> dict[str, Any]:
        """The servers for the page, without their keys."""
        try:
            servers, problem = self._servers.all(), None
        except StorageError as error:
            servers, problem = [], said_of(error)
        listed = [
            {
                "id": each.id,
                "name": each.model or (self._switch.info.name if self._is_current(each) else each.host),
                "host": each.host,
                "has_key": each.key is not None,
                "current": self._is_current(each),
                "kept": each.id != GIVEN,
            }
            for each in servers
        ]
        return {"servers": listed, "servers_problem": problem}

    def _is_current(self, server: Server) -> bool:
        return self._switch.server is not None and server.id == self._server

    def _offered(self, offer: Offer, sizes: dict[Path, int]) -> dict[str, Any]:
        shelf, num_bytes = self._switch.shelf, offer.num_bytes
        if offer.folder is not None:
            # One of another place than those that are looked through.
            num_bytes = sizes[offer.folder] if offer.folder in sizes else weights_on_disk(offer.folder)
        is_loaded = shelf.state(offer.name) == "loaded"
        return {
            "name": offer.name,
            "source": offer.name,
            "size": size(num_bytes),
            "reason": shelf.error(offer.name),
            "usable": True,
            "current": self._switch.offer is offer,
            "is_demo": offer.is_demo,
            "is_loaded": is_loaded,
            "is_offered": True,
            "displaces": not is_loaded and bool(shelf.leaving(offer.name, offer.num_bytes)),
        }

    def _installed(self, model: InstalledModel, room: int) -> dict[str, Any]:
        return {
            "name": model.name,
            "source": str(model.source),
            "size": size(model.num_bytes),
            "reason": model.reason if not model.usable else self._switch.refusal(model, room),
            "usable": model.usable,
            "current": False,
            "is_demo": model.folder == demo_model_path(),
            "is_loaded": False,
            "is_offered": False,
            "displaces": True,
        }

    def _downloadable(self, model: HubModel, room: int) -> dict[str, Any]:
        weights = self._switch.format_that_fits(model, room)
        left = missing(model.hub_id, model.download_bytes)
        more = lacking_disk_bytes(left)
        if weights is None:
            fit = say("needs more memory than this machine has")
        elif more:
            fit = say("needs {size} more disk space", size=size(more))
        elif weights in ROUNDED_FORMATS:
            fit = say("fits this machine with {weights} weights", weights=weights)
        else:
            fit = say("fits this machine")
        if weights and not more and left < model.download_bytes:
            fit = say("{fit}, {size} still to download", fit=fit, size=size(left))
        return {"source": model.hub_id, "size": size(model.download_bytes), "fit": fit}

    def taken(self) -> Said | None:
        """The settings of the current model, and whether they were picked to fit; None for a server's, and for none."""
        backend, offer, options = self._switch.answering, self._switch.offer, self._switch.options
        if not isinstance(backend, LocalBackend) or offer is None:
            return None
        plan, loaded = backend.engine.plan, backend.loaded
        settings = _in_words(loaded.weights, offer.options.cache.kv_formats(loaded.model.dtype), plan.context_length)
        words = say("{settings}; {n} {n|reply|replies} at a time.", settings=settings, n=plan.num_slots)
        if (most := options.max_memory) is None:
            return words
        return say("{words} Picked to fit --max-memory {size}.", words=words, size=size(most))

    async def _load(self, source: str | None, is_new: bool, **settings: Any) -> None:
        if is_new and source is not None:
            self._state = told(say("Downloading {name}", name=source), busy=True)
            self._download = DownloadProgress()
            try:
                how = {"progress": self._download.report, "cancelled": lambda: self._cancelled}
                await asyncio.to_thread(download, source, **how)
            finally:
                self._download = None
            self._state = told(_PHASES["check"], busy=True)
        await self._rest()
        await self._switch.switch(source, **settings)

    async def _connect(self, server: Server) -> None:
        await self._rest()
        self._state = told(_PHASES["connect"], busy=True)
        await self._switch.connect(server.backend(self._switch.media.limits, decoders=self._switch.options.decoders))
        self._server = server.id

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        error, is_cancelled = None, False
        try:
            await change
        except asyncio.CancelledError:
            is_cancelled = True
            logger.info("the model stays as it was: the person didn't wait")
        except DownloadCancelled:
            error = say("The download was cancelled. It resumes next time.")
        except Qwen35mmError as problem:
            error = said_of(problem)
        except Exception as problem:
            error = report_bug(logger, "the model could not be changed", problem)
        self._state = told("", error=error) | {"is_cancelled": is_cancelled}


def told(label: Said, *, busy: bool = False, error: Said | None = None) -> dict[str, Any]:
    """A change's state for the page."""
    how = {"busy": busy, "is_download": False, "is_waiting": False, "is_cancelled": False}
    return {**how, "label": label, "detail": "", "share": None, "error": error}


def _suggested(plan: FormatPlan, dtype: torch.dtype) -> dict[str, Any]:
    """The settings of a plan, as arguments of `change_model` and as text."""
    length = plan.needed.context_length if plan.fits else plan.largest_context
    label = _in_words(plan.weights, kv_formats_of(plan.kv_dtype, dtype), length or 0)
    weights = plan.weights if plan.weights in ROUNDED_FORMATS else "auto"
    return {"context_length": length, "weights": weights, "kv_dtype": plan.kv_dtype, "label": label}


def _in_words(weights: str, kv: KVFormats, context_length: int) -> Said:
    return say(
        "Weights: {weights}; KV cache: {kv}; {n} tokens of context",
        weights=_as_said(weights),
        kv=", ".join(dict.fromkeys(each.name for each in kv)),
        n=context_length,
    )


def _choices(labels: dict[str, Said], chosen: str) -> list[dict[str, Any]]:
    return [{"value": value, "label": label, "chosen": value == chosen} for value, label in labels.items()]


def _weights(found: Forecast, chosen: str) -> dict[str, Said]:
    """The formats of weights to choose from; empty if there is no choice."""
    auto = say("Automatic: {name}", name=_as_said(found.taken.weights)) if chosen == "auto" else say("Automatic")
    labels: dict[str, Said] = {}
    for offer in found.offers:
        name, num_bytes = offer.weights, size(offer.num_bytes)
        words = say("{name}, {size}", name=name, size=num_bytes)
        if offer.speedup is not None:
            times = decimal(offer.speedup, 1)
            words = say("{name}, {size}, up to {n} times as fast", name=name, size=num_bytes, n=times)
        # float32 is chosen by --dtype, not here; `auto` takes it then.
        if name in WEIGHTS:
            labels[name] = words
    return {"auto": auto, **labels} if labels else {}


def _as_said(weights: str) -> Said:
    return say("as in the checkpoint") if weights == AS_STORED else weights
