"""The models of one program: loaded when a request names one, unloaded when another one needs their memory.

All models are in this process, each with an engine of its own. So they share decoders and folders, and a page counts
tokens without asking another process. An error of Python, such as a damaged file or too little memory while a model is
loaded, ends nothing but the requests for that model. A crash of the process ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Event, GenerationRequest, Message, ModelInfo, Progress
from qwen35mm.engine.request import is_shortage
from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, report_bug
from qwen35mm.malloc import give_back_freed
from qwen35mm.model.weights import OnRead
from qwen35mm_preprocess import MediaProcessor
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

_EARLY_S = 0.01
# As llama-server calls them.
State = Literal["unloaded", "loading", "loaded", "failed"]
# Of a model that is being loaded.
Step = Literal["check", "wait", "close", "load"]


@dataclass(frozen=True)
class Offer:
    """A model that the program offers, loaded or not.

    Attributes:
        name: by which a request chooses it.
        num_bytes: the most memory that it takes, by its plan.
        load: loads it; called in a thread, with what to call with the bytes of weights read, and all of them.
        check: raises if its files can't be used; called in a thread, before other models are unloaded for it.
        has_room: whether the machine has the least memory that it needs; called in a thread.
        names: further names.
        adapters: names of adapters that a request may choose instead.
        context_length: most tokens of a conversation.
        num_slots: requests that it computes at one time.
        sees: whether it takes pictures and videos.
        is_demo: whether it is the bundled demo model.
        folder: of the checkpoint.
        options: that it is loaded with, for whoever makes another offer of it.
    """

    name: str
    num_bytes: int
    load: Callable[[OnRead], LocalBackend]
    check: Callable[[], object] = lambda: None
    has_room: Callable[[], bool] = lambda: True
    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    context_length: int = 0
    num_slots: int = 4
    sees: bool = True
    is_demo: bool = False
    folder: Path | None = None
    options: Any = None


class _Place:
    """A model's place on the shelf.

    Attributes:
        made_by: the offer that `backend` was loaded by.
        shell: the model without its weights, if the page shows it: it still makes and counts prompts.
        num_leases: requests that are answered.
        used_at: when the last one began or ended.
        is_leaving: whether it takes no more requests, because another model waits for its memory.
        step: what is done to load it; None while it isn't loaded.
        share: of the weights, that is read.
        timer: looks whether it has been idle for long enough.
        error: why it couldn't be loaded; None if it could.
    """

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.made_by = offer
        self.backend: LocalBackend | None = None
        self.shell: LocalBackend | None = None
        self.num_leases = 0
        self.used_at = 0.0
        self.is_leaving = False
        self.step: Step | None = None
        self.share: float | None = None
        self.error: Said | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_loaded(self) -> bool:
        # An engine that failed answers nothing more; the log has the reason. The next one may do better.
        return self.backend is not None and not self.backend.has_ended and self.made_by is self.offer

    @property
    def must_go(self) -> bool:
        """Whether the backend can be unloaded now, in favour of another one for this place."""
        return self.backend is not None and not self.is_loaded and (self.backend.has_ended or not self.num_leases)

    @property
    def is_open(self) -> bool:
        return self.is_loaded and not self.is_leaving

    def put(self, backend: LocalBackend, offer: Offer, now: float) -> None:
        self.backend, self.made_by, self.error, self.used_at = backend, offer, None, now

    def read(self, done: int, total: int) -> None:
        self.share = done / total


class Shelf:
    """Lends the backends of models. For use from one event loop.

    Requests for a model that isn't loaded wait in a line, and the model of the first one is loaded next. If the memory
    doesn't hold it beside the others, the least recently used one leaves, but never one that answers: then new requests
    for that one wait, too, so that its running answers come to an end.

    Args:
        memory_bytes: for all loaded models together, by their plans.
        keep_alive_s: a model that answers nobody for so long is unloaded; None keeps it until memory is needed.
        max_waiting: requests that may wait for each model; more are refused.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        offers: Iterable[Offer],
        memory_bytes: int,
        *,
        keep_alive_s: float | None = None,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = {each.name: _Place(each) for each in offers}
        self._memory_bytes = memory_bytes
        self._keep_alive_s = keep_alive_s
        self._shown: str | None = None
        self._max_waiting = max_waiting
        self._clock = clock
        self._line: list[tuple[_Place, asyncio.Future[LocalBackend]]] = []
        # One model is loaded or unloaded at a time.
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._mover: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def offers(self) -> list[Offer]:
        """All models, in the order in which they were offered."""
        # A page's threads ask for these while others are offered: they go through a list of their own.
        return [place.offer for place in [*self._places.values()]]

    def offer(self, name: str | None) -> Offer | None:
        """The model of this name; None if there is none."""
        return place.offer if (place := self._places.get(name or "")) else None

    def set(self, offer: Offer) -> None:
        """Offers one more model, or one with other settings: what is loaded with the old ones answers to its end."""
        place = self._places.setdefault(offer.name, _Place(offer))
        place.offer, place.error = offer, None
        self._changed.set()

    def remove(self, name: str) -> None:
        """Takes back an offer, unless it is loaded by now, or somebody else waits for it."""
        place = self._places[name]
        is_used = place.backend is not None or place.num_leases or self._is_wanted(place)
        # A step before `load` ends without it once nobody waits.
        if not is_used and place.step != "load":
            del self._places[name]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def shown(self) -> str | None:
        """The model that a page shows: unloaded, it still makes and counts prompts."""
        return self._shown

    @shown.setter
    def shown(self, name: str | None) -> None:
        self._shown = name
        for place in self._places.values():
            if place.offer.name != name:
                place.shell = None

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def used_bytes(self) -> int:
        """The most that the loaded models take, by their plans."""
        return sum(place.made_by.num_bytes for place in [*self._places.values()] if place.backend is not None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a model."""
        return len(self._line)

    def state(self, name: str) -> State:
        place = self._places.get(name)
        if place is None:
            return "unloaded"
        if place.is_loaded:
            return "loaded"
        return "loading" if place.step is not None else "unloaded" if place.error is None else "failed"

    def step(self, name: str) -> tuple[Step | None, float | None]:
        """What is done to load a model, and the share of its weights that is read."""
        place = self._places.get(name)
        return (None, None) if place is None else (place.step, place.share)

    def leaving(self, name: str | None, num_bytes: int) -> list[Offer]:
        """The models that would be unloaded for one of this size; not the one whose place it takes, by its name."""
        others = [each for each in [*self._places.values()] if each.backend is not None and each.offer.name != name]
        return [place.made_by for place in self._in_the_way(others, num_bytes)]

    def error(self, name: str) -> Said | None:
        """Why a model couldn't be loaded; None if it could, or wasn't tried."""
        return place.error if (place := self._places.get(name)) else None

    def put(self, name: str, backend: LocalBackend) -> None:
        """Puts a model that is loaded already into its place."""
        self._places[name].put(backend, self._places[name].offer, self._clock())

    def known(self, name: str) -> LocalBackend:
        """A model's backend; the page's between two loads without its weights and its engine.

        Raises:
            EngineError: it isn't loaded.
        """
        place = self._places.get(name)
        found = place and (place.backend or place.shell)
        if found is None:
            raise EngineError(say("The model '{name}' isn't loaded.", name=name))
        return found

    def loaded(self, name: str) -> LocalBackend | None:
        return self._places[name].backend if name in self._places else None

    def is_open(self, name: str) -> bool:
        """Whether a request for the model begins at once."""
        return name in self._places and self._places[name].is_open

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[LocalBackend]:
        """Lends a model's backend, which isn't unloaded until the end of the block. Loads the model if necessary.

        Raises:
            EngineError: it can't be loaded, with the reason, or the program ends.
            QueueFullError: too many requests wait for the model.
        """
        backend = await self.take(name)
        try:
            yield backend
        finally:
            del backend
            self.give_back(name)

    async def take(self, name: str) -> LocalBackend:
        """As `lease`, until `give_back`."""
        if self._is_closed:
            raise EngineError(say("The program is shutting down."))
        place = self._places.get(name)
        if place is None:
            raise EngineError(say("The model '{name}' isn't loaded.", name=name))
        if place.is_open:
            assert place.backend is not None
            self._lend(place)
            return place.backend
        num_waiting = sum(each is place for each, _ in self._line)
        if num_waiting >= self._max_waiting:
            words = say("{n} {n|request is|requests are} waiting already. Try again in a moment.", n=num_waiting)
            raise QueueFullError(words)
        turn: asyncio.Future[LocalBackend] = asyncio.get_running_loop().create_future()
        entry = (place, turn)
        self._line.append(entry)
        if self._mover is None or self._mover.done():
            self._mover = asyncio.ensure_future(self._move())
        try:
            return await turn
        except asyncio.CancelledError:
            if entry in self._line:
                self._line.remove(entry)
                self._changed.set()
            elif not turn.cancelled() and turn.exception() is None:
                self.give_back(name)
            raise

    def give_back(self, name: str) -> None:
        """Ends a lease."""
        place = self._places[name]
        place.num_leases -= 1
        place.used_at = self._clock()
        self._changed.set()
        self._look_later(place)

    def watch(self) -> None:
        """Begins to count the time of models that nobody has used since the start."""
        for place in self._places.values():
            self._look_later(place)

    async def unload_idle(self, after_s: float | None = None) -> None:
        """Unloads the models that have been idle for `after_s`; None is `keep_alive_s`."""
        after_s = self._keep_alive_s if after_s is None else after_s
        async with self._changing:
            for place in [*self._places.values()]:
                is_idle = place.backend is not None and not place.num_leases
                if is_idle and after_s is not None and self._idle_s(place) >= after_s:
                    logger.info("%s is unloaded: nobody has used it for a while", place.offer.name)
                    await self._unload(place)

    def close(self) -> None:
        """Closes all backends; returns once their disk caches are written."""
        self._is_closed = True
        for place in self._places.values():
            if place.backend is not None:
                self._take_off(place).pop().close()

    def _idle_s(self, place: _Place) -> float:
        return self._clock() - place.used_at

    def _look_later(self, place: _Place) -> None:
        if self._keep_alive_s is not None and place.backend is not None and not place.num_leases:
            # A timer may come a moment early.
            wait_s = max(self._keep_alive_s - self._idle_s(place), 0) + _EARLY_S
            if place.timer is not None:
                place.timer.cancel()
            place.timer = asyncio.get_running_loop().call_later(wait_s, lambda: self._run(self.unload_idle()))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    def _lend(self, place: _Place) -> None:
        place.num_leases += 1
        place.used_at = self._clock()

    async def _move(self) -> None:
        """Lets the line in, model by model."""
        while self._line:
            place = self._line[0][0]
            error = None
            async with self._changing:
                try:
                    if not place.is_open:
                        await self._load(place)
                except Qwen35mmError as problem:
                    error = said_of(problem)
                except Exception as problem:
                    if is_shortage(problem):
                        error = say("there isn't enough memory")
                    else:
                        error = report_bug(logger, "a model could not be loaded", problem)
            self._let_in(place, error)

    def _let_in(self, place: _Place, error: Said | None) -> None:
        # One that was cancelled a moment ago is still in the line.
        turns = [turn for each, turn in self._line if each is place and not turn.done()]
        if error is not None:
            place.error = error
            logger.warning("%s can't be loaded: %s", place.offer.name, error)
        elif not place.is_open:
            return  # whoever waited for it has left
        self._line = [entry for entry in self._line if entry[0] is not place]
        for turn in turns:
            if error is not None:
                words = say("The model '{name}' can't be loaded: {reason}", name=place.offer.name, reason=error)
                turn.set_exception(EngineError(words))
            else:
                assert place.backend is not None
                self._lend(place)
                turn.set_result(place.backend)

    def _is_wanted(self, place: _Place) -> bool:
        return any(each is place for each, _ in self._line)

    async def _load(self, place: _Place) -> None:
        """Loads a model once there is room; does nothing if everybody who waited for it has left."""
        offer = place.offer
        place.step = "check"
        try:
            await asyncio.to_thread(offer.check)
            if not await self._make_room(place):
                return
            place.step = "load"
            began_s = self._clock()
            backend = await asyncio.to_thread(offer.load, place.read)
            if self._is_closed:
                backend.close()
                raise EngineError(say("The program is shutting down."))
            place.put(backend, offer, self._clock())
            logger.info("%s was loaded in %.1f s", offer.name, self._clock() - began_s)
            self._look_later(place)
        finally:
            place.step = place.share = None

    async def _make_room(self, wanted: _Place) -> bool:
        """Unloads models until there is room; False if nobody waits for it any more.

        Raises:
            EngineError: the machine has no room although no other model is loaded.
        """
        others = [place for place in self._places.values() if place is not wanted]
        try:
            while True:
                wanted.step = "close"
                if wanted.must_go:
                    await self._unload(wanted)
                fits_plan = self.used_bytes + wanted.offer.num_bytes <= self._memory_bytes
                has_room = fits_plan and await asyncio.to_thread(wanted.offer.has_room)
                # The offer that its backend was loaded by may be back.
                if wanted.is_open or not self._is_wanted(wanted):
                    return False
                if wanted.backend is None:
                    loaded = [place for place in others if place.backend is not None]
                    if not loaded and fits_plan and not has_room:
                        raise EngineError(say("there isn't enough memory"))
                    if has_room or not loaded:
                        return True  # the plan of one that is larger than all memory is for this case
                    if idle := [place for place in loaded if not place.num_leases]:
                        await self._unload(min(idle, key=lambda place: place.used_at))
                        continue
                    staying = [place for place in loaded if not place.is_leaving]
                    for place in self._in_the_way(staying, wanted.offer.num_bytes, one=len(staying) == len(loaded)):
                        place.is_leaving = True
                wanted.step = "wait"
                self._changed.clear()
                await self._changed.wait()
        finally:
            for place in others:
                place.is_leaving = False

    def _in_the_way(self, loaded: Sequence[_Place], num_bytes: int, *, one: bool = False) -> list[_Place]:
        """As many of the least recently used models as have to leave, so that the others go on; at least `one`."""
        num_bytes += sum(place.made_by.num_bytes for place in loaded)
        found: list[_Place] = []
        for place in sorted(loaded, key=lambda place: place.used_at):
            if num_bytes > self._memory_bytes or (one and not found):
                found.append(place)
                num_bytes -= place.made_by.num_bytes
        return found

    def _take_off(self, place: _Place) -> list[LocalBackend]:
        """A place's backend, in a list to empty: a thread keeps its function a moment longer than its caller waits."""
        assert place.backend is not None
        if place.offer.name == self._shown:
            # First: a thread of the page may ask for either at any moment.
            place.shell = place.backend.without_weights()
        found, place.backend, place.is_leaving = [place.backend], None, False
        return found

    async def _unload(self, place: _Place) -> None:
        leaving = self._take_off(place)
        await asyncio.to_thread(lambda: leaving.pop().close())
        await asyncio.to_thread(_give_back_unloaded)


def _give_back_unloaded() -> None:
    # An unloaded backend has reference cycles, and its memory has to go now.
    gc.collect()
    give_back_freed()


class OnShelf:
    """A model of a shelf as a backend, for those who hold a lease.

    Attributes:
        name: of the model.
        has_ended: never: a request has the model loaded anew if its engine failed.
    """

    has_ended = False

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.shelf = shelf
        self.name = name

    @property
    def known(self) -> Any:
        """The model, at least without its weights."""
        return self.shelf.known(self.name)

    @property
    def answering(self) -> Any:
        """The model if it is loaded, else None."""
        return self.shelf.loaded(self.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known, name)

    @property
    def info(self) -> ModelInfo:
        return self.known.info

    @property
    def media(self) -> MediaProcessor:
        return self.known.media

    @property
    def is_demo(self) -> bool:
        return self.known.is_demo

    @property
    def idles(self) -> bool:
        return self.known.idles

    @property
    def context_length(self) -> int:
        return self.known.context_length

    def count_tokens(self, messages: Sequence[Message], **options: Any) -> int:
        """See `ModelBackend`."""
        return self.known.count_tokens(messages, **options)

    def memory(self) -> dict[str, int]:
        """The loaded model's; zeros while it isn't loaded."""
        backend = self.answering
        if backend is not None:
            return backend.memory()
        return {f"{part}{kind}_bytes": 0 for part in ("kv", "states", "vision") for kind in ("", "_budget")}

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """The loaded model's; a model that isn't loaded is idle."""
        backend = self.answering
        return backend is None or backend.wait_idle(timeout_s)


class LentBackend(OnShelf):
    """A model of a shelf as a backend for others: each stream is a lease, and loads the model if necessary."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        super().__init__(shelf, name)
        self.choose(name)

    def choose(self, name: str) -> None:
        """Answers with another model from now on; a request that names its model keeps it."""
        self.name = self.shelf.shown = name

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """See `LocalBackend`; also raises `Shelf.lease`'s errors."""
        name = request.model or self.name
        if not self.shelf.is_open(name):
            if not request.loads:
                raise EngineError(say("The model '{name}' isn't loaded.", name=name))
            yield Progress("load", 0, 0)
        async with self.shelf.lease(name) as backend:
            events = backend.stream(request)
            del backend
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
