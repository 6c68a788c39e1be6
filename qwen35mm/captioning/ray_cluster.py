"""Captions from engines on a Ray cluster, each an actor that Ray restarts if it dies; others get its work meanwhile.

The run stays here: the scan, the manifest and the outputs. Only a slot's request goes to an actor, which also reads the
medium, with the same classes as a run without Ray. So its captions have the same keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.backends.engine_pool import MAX_LOST, EnginePool, Member
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Failed, FileSlice
from qwen35mm.captioning.media.workers import MediaWorkers, MediumForm, Prepared
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest, work_of
from qwen35mm.errors import ConfigError, EngineError, RequestError
from qwen35mm.ray_cluster import RayActorError, RayError, connect, engine_resources, last_line, ray

# Media of which an actor keeps the pixels for their next question.
_MOST_PREPARED = 16
# Fields of a Captioner that describe the actor and not the model.
_OWN = ("backend", "form", "num_at_once", "engines")


class CaptionActor:
    """An engine, and the processes that read its media.

    Args:
        load: starts the engine.
        cache: returns the folder for this machine's digests of weights, in `weights`; None for no cache.
    """

    def __init__(
        self, load: Callable[[], LocalBackend], num_workers: int, cache: Callable[[], Path | None] = lambda: None
    ) -> None:
        self._load = load
        self._cache = cache
        self._num_workers = num_workers
        self._prepared: dict[bytes, Prepared] = {}

    # Not in the constructor: there, Ray would hide the real error behind its own.
    @functools.cached_property
    def _captioner(self) -> Captioner:
        folder = self._cache()
        return Captioner.local(self._load(), None if folder is None else folder / "weights")

    @functools.cached_property
    def _workers(self) -> MediaWorkers:
        return MediaWorkers(self._captioner.processor, self._num_workers)

    async def describe(self) -> dict[str, Any]:
        """The arguments for `RayCaptioner`, from the engine's model. Raises Qwen35mmError."""
        own = vars(self._captioner)
        return {name: value for name, value in own.items() if name not in _OWN}

    async def caption(
        self, identity: Mapping[str, Any], request: CaptionRequest, known: Caption | None, judges: bool
    ) -> Caption | Failed | None:
        """The item's caption; None if `identity`, the expected model's, is another's."""
        captioner = self._captioner
        assert captioner.form is not None
        if captioner.identity != identity:
            return None
        prepared = await self._prepare(request, captioner.form)
        if isinstance(prepared, Failed):
            return prepared
        return await captioner.caption(request, prepared, known, judges=judges)

    async def answer(
        self, identity: Mapping[str, Any], request: CaptionRequest, facts: Caption
    ) -> Caption | Failed | None:
        """The answer to a question of text alone; None as in `caption`."""
        return await self._captioner.answer(request, facts) if self._captioner.identity == identity else None

    async def _prepare(self, request: CaptionRequest, form: MediumForm) -> Prepared | Failed:
        """The medium, decoded once for all questions about it."""
        work = work_of(request.item, request.content)
        prepared = self._prepared.pop(work, None) or await self._workers.prepare(request.item, request.content, form)
        if request.is_followed and isinstance(prepared, Prepared):
            self._prepared[work] = prepared
            if len(self._prepared) > _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
        return prepared


@contextlib.asynccontextmanager
async def open_cluster(
    address: str,
    load: Callable[[], LocalBackend],
    *,
    num_engines: int | None,
    slots: int,
    num_workers: int,
    cache: Callable[[], Path | None] = lambda: None,
) -> AsyncIterator[RayCaptioner]:
    """Connects to a Ray cluster and starts engines there.

    Args:
        address: see `connect`; a local cluster ends with the run.
        load: starts an engine; it is called on the machines of the cluster.
        num_engines: see `engine_resources`.
        slots: captions that an engine writes at one time.
        num_workers: processes that read media for an engine.
        cache: see `CaptionActor`; it is called on the machines of the cluster.

    Raises:
        ClusterError: there is no such cluster, or it lacks the resources.
        EngineError: the engines can't be started.
    """
    machines = await asyncio.to_thread(connect, address)
    try:
        num_engines, num_cpus, num_gpus = engine_resources(machines, num_engines)
        # Each slot has its next medium decoded.
        num_an_engine = 2 * slots
        actor_class = ray.remote(CaptionActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,
            max_concurrency=num_an_engine,
        )
        actors = [actor_class.remote(load, num_workers, cache) for _ in range(num_engines)]
        # All engines begin to load. The first one's model is the run's.
        described = [actor.describe.remote() for actor in actors]
        try:
            model = await described[0]
        except RayError as error:
            raise EngineError(last_line(error)) from error
        members = [Member(f"engine {i}", actor, num_an_engine) for i, actor in enumerate(actors, 1)]
        pool = EnginePool(members, _probe)
        async with contextlib.aclosing(pool):
            yield RayCaptioner(**model, pool=pool, engines=members, num_at_once=sum(member.slots for member in members))
    finally:
        await asyncio.to_thread(ray.shutdown)


@dataclass(frozen=True, kw_only=True)
class RayCaptioner(Captioner):
    """Engines on a Ray cluster; made by `open_cluster`.

    Attributes:
        pool: the actors.
    """

    backend: Any = None
    form: MediumForm | None = None
    pool: EnginePool[Any]

    async def caption(
        self, request: CaptionRequest, prepared: Prepared | None, known: Caption | None = None, *, judges: bool = False
    ) -> Caption | Failed:
        """As `Captioner.caption`; an engine reads and decodes the item itself."""
        there = _there(request)
        caption = await self._ask(there, lambda actor: actor.caption.remote(self.identity, there, known, judges))
        if isinstance(caption, Failed) or prepared is None:
            return caption
        return replace(caption, **prepared.measured)

    async def answer(self, request: CaptionRequest, facts: Caption) -> Caption | Failed:
        """See `Captioner.answer`."""
        there = _there(request)
        return await self._ask(there, lambda actor: actor.answer.remote(self.identity, there, facts))

    async def _ask(
        self, request: CaptionRequest, call: Callable[[Any], Awaitable[Caption | Failed | None]]
    ) -> Caption | Failed:
        """Calls an engine, the one that has the request's medium; if it ends meanwhile, another one."""

        async def ask(actor: Any) -> Caption | Failed:
            try:
                caption = await call(actor)
            except RayActorError as error:
                raise _ActorLostError(last_line(error)) from error
            if caption is None:
                raise RequestError(
                    "Its machine doesn't have the weights of the first one, or not in one format (--weights, --dtype)."
                )
            return caption

        try:
            return await self.pool.use(ask, work_of(request.item, request.content))
        except _ActorLostError:
            return Failed("worker", f"{MAX_LOST} engines of the cluster ended while they worked on this.")
        except RayError as error:
            return Failed("engine", last_line(error))
        except (EngineError, RequestError) as error:
            return Failed("engine", str(error))


class _ActorLostError(EngineError):
    """An engine of the cluster ended."""


async def _probe(actor: Any) -> None:
    try:
        await actor.describe.remote()
    except RayActorError as error:
        raise EngineError(last_line(error)) from error
    except RayError as error:
        raise ConfigError(last_line(error)) from error


def _there(request: CaptionRequest) -> CaptionRequest:
    """The request for a process with another working directory."""
    item = request.item
    return replace(request, item=replace(item, source=_absolute(item.source)))


def _absolute(source: Path | FileSlice | bytes) -> Path | FileSlice | bytes:
    """The source with an absolute path, for a process with another working directory."""
    if isinstance(source, FileSlice):
        return replace(source, path=source.path.absolute())
    return source if isinstance(source, bytes) else source.absolute()
