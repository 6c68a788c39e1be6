"""Choosing and downloading another model on the page; only if one person has the machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

import torch
from pydantic import Field

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.kv_keep import KVKeep
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import Qwen35mmError, RequestError, StorageError, report_bug
from qwen35mm.http.requests import request
from qwen35mm.model.load import WEIGHTS, choose_dtype
from qwen35mm.model.weight_formats import AS_STORED, ROUNDED_FORMATS
from qwen35mm.model_library import HUB_MODELS, BackendSwitch, DownloadCancelled, HubModel, download, installed_models
from qwen35mm.model_library.hub import lacking_disk_bytes, missing
from qwen35mm.model_library.installed import InstalledModel
from qwen35mm.model_library.memory import Room
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
    "close": say("Unloading the old model"),
    "load": say("Loading the model"),
    "restore": say("Restoring the old model"),
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
        self._server: str | None = GIVEN if switch.info.host is not None else None
        self._rest = rest
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._state = told("")
        self._download: DownloadProgress | None = None

    @request
    def models(self, person: Person) -> Any:
        """Installed models, servers' models, and models to download."""
        room = self._switch.room()
        installed = [self._installed(model, room) for model in installed_models()]
        here = {model["source"] for model in installed}
        return {
            "models": installed,
            **self._listed_servers(),
            "downloads": [self._downloadable(model, room) for model in HUB_MODELS if model.hub_id not in here],
        }

    def state(self) -> dict[str, Any]:
        """The state of the change: `busy`, `is_download`, `label`, `detail`, `share`, `error`."""
        download = self._download
        return self._state if download is None else self._state | download.describe() | {"is_download": True}

    def suggestion(self) -> dict[str, Any] | None:
        """The real model to offer beside the demo: the last one here that fits, else one to download. Asks no network.

        None if there is none, or if a real model answers already.
        """
        if not self._switch.is_demo:
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
            source: a model's folder or Hub id; None keeps the model.
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
        return self.state()

    @request
    async def change_state(self, person: Person) -> Any:
        """`state`."""
        return self.state()

    @request
    async def cancel_change(self, person: Person) -> Any:
        """Cancels a download and keeps the received part for the next try. Doesn't stop loading."""
        self._cancelled = True
        return {}

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
                "name": each.model or (self._switch.info.name if each.id == self._server else each.host),
                "host": each.host,
                "has_key": each.key is not None,
                "current": each.id == self._server,
                "kept": each.id != GIVEN,
            }
            for each in servers
        ]
        return {"servers": listed, "servers_problem": problem}

    def _installed(self, model: InstalledModel, room: Room) -> dict[str, Any]:
        is_current = model.folder == self._switch.folder
        # The current model fits.
        reason = None if is_current else model.reason if not model.usable else self._switch.refusal(model, room)
        return {
            "name": model.name,
            "source": str(model.source),
            "size": size(model.num_bytes),
            "reason": reason,
            "usable": model.usable,
            "current": is_current,
            "is_demo": model.folder == demo_model_path(),
            "is_loaded": is_current,
        }

    def _downloadable(self, model: HubModel, room: Room) -> dict[str, Any]:
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
        backend, options = self._switch.current if self._switch.is_ready else None, self._switch.options
        if not isinstance(backend, LocalBackend):
            return None
        plan, loaded = backend.engine.plan, backend.loaded
        settings = _in_words(loaded.weights, options.cache.kv_formats(loaded.model.dtype), plan.context_length)
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
            # The person may have kept chatting.
            self._state = told(say("Waiting for the answer in progress"), busy=True)
            await self._switch.until_idle()
        await self._rest()
        await self._switch.switch(source, **settings, on_progress=self._phase, on_read=self._read)
        self._server = None

    async def _connect(self, server: Server) -> None:
        await self._rest()
        backend = server.backend(self._switch.media.limits, decoders=self._switch.options.decoders)
        await self._switch.connect(backend, on_progress=self._phase)
        self._server = server.id

    def _phase(self, phase: str) -> None:
        self._state = told(_PHASES[phase], busy=True)

    def _read(self, done: int, total: int) -> None:
        """Called in a thread while the weights are read."""
        self._state = told(_PHASES["load"], busy=True) | {"share": done / total}

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        error = None
        try:
            await change
        except DownloadCancelled:
            error = say("The download was cancelled. It resumes next time.")
        except Qwen35mmError as problem:
            error = said_of(problem)
        except Exception as problem:
            error = report_bug(logger, "the model could not be changed", problem)
        self._state = told("", error=error)


def told(label: Said, *, busy: bool = False, error: Said | None = None) -> dict[str, Any]:
    """A change's state for the page."""
    return {"busy": busy, "is_download": False, "label": label, "detail": "", "share": None, "error": error}


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
