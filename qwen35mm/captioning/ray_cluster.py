"""The same captions from engines on a Ray cluster.

The run stays here: the scan, what is needed, the manifest and the outputs. What a slot would ask of the model goes
through one Ray Data pipeline to the engines instead, an item a block: an engine that dies costs what it was at, Ray
starts it again, and those blocks are done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import pickle
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow

from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner, FailedError
from qwen35mm.captioning.items import FileSlice, Item
from qwen35mm.captioning.job import Model
from qwen35mm.captioning.media.worker import Failed
from qwen35mm.captioning.records import Caption
from qwen35mm.errors import CaptioningError, EngineError, MissingExtraError
from qwen35mm_preprocess import MediaPlan, MediaSource, PreparedMedia

try:
    import ray  # pyright: ignore[reportMissingImports] - an extra
    from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask  # pyright: ignore[reportMissingImports]
    from ray.data.block import BlockMetadata  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtraError("Captioning on a Ray cluster", "ray") from error

from qwen35mm.captioning.ray_actor import Answer, Ask, CaptionActor, Describe, Description, Line, Task, row

_ADDRESS = re.compile(r"([^/]+):(\d{1,5})")
_CONNECTING_S = 10.0
_CLOSING_S = 10.0


@contextlib.asynccontextmanager
async def open_cluster(
    address: str, load: Callable[[], LocalBackend], *, num_engines: int | None, slots: int, num_workers: int
) -> AsyncIterator[RayCluster]:
    """Connects to a Ray cluster and starts engines there.

    Args:
        address: `local` for a cluster on this machine that ends with the run, `auto` for the one that this machine
            belongs to, or HOST:PORT of that.
        load: starts an engine; it is called on the machines of the cluster.
        num_engines: None is one a GPU, or one a machine where there are no GPUs.
        slots: captions that an engine writes at one time.
        num_workers: processes that read media for an engine.

    Raises:
        CaptioningError: there is no such cluster, or it hasn't the resources.
        EngineError: the engines can't be started.
    """
    # Ray would report each cluster to its makers; what is wrong is said here.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        await asyncio.to_thread(_connect, address)
    except (OSError, ValueError, RuntimeError) as error:
        raise CaptioningError(f"There is no Ray cluster at '{address}': {_last_line(error)}") from error
    try:
        num_engines = num_engines or _default_engines()
        cluster = RayCluster(load, num_engines, slots, num_workers)
        try:
            await cluster.describe()
            yield cluster
        finally:
            await asyncio.to_thread(cluster.close)
    finally:
        await asyncio.to_thread(ray.shutdown)


class RayCluster:
    """Engines on a Ray cluster; made by `open_cluster`.

    Attributes:
        description: of the model that they have.
        num_at_once: tasks that keep all of them busy, media that are decoded ahead included.
    """

    def __init__(self, load: Callable[[], LocalBackend], num_engines: int, slots: int, num_workers: int) -> None:
        # Each slot has its next medium decoded.
        self.num_at_once = num_engines * 2 * slots
        num_cpus, num_gpus = _resources(num_engines)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Answer]] = {}
        self._ended: Exception | None = None
        self._lock = threading.Lock()
        # With the run's own machine the line would end anyway; no other may take it along.
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._line = ray.remote(Line).options(num_cpus=0, label_selector=here).remote()
        context = DataContext.get_current()
        # A block is a row: it moves on at once, and it is what is lost with an engine.
        context.target_max_block_size = 1
        context.enable_progress_bars = False
        tasks = ray.data.read_datasource(
            _LineSource(self._line), override_num_blocks=1, num_cpus=0, label_selector=here
        )
        self._answers = tasks.map_batches(
            CaptionActor,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(load, num_workers, self._line),
            compute=ActorPoolStrategy(
                size=num_engines, max_tasks_in_flight_per_actor=2 * slots, max_concurrent_calls_per_actor=2 * slots
            ),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
        self._thread = threading.Thread(target=self._receive, name="qwen35mm-ray", daemon=True)
        self._thread.start()

    async def describe(self) -> None:
        """Finds out which model the engines have, as soon as one of them is there. Raises EngineError."""
        answer = await self.do(Describe())
        if isinstance(answer, Failed):
            raise EngineError(answer.message)
        self.description: Description = answer

    def model(self) -> Model:
        """The model, for a run here."""
        found = self.description
        return Model(
            self, found.name, found.identity, found.params, found.processor, sends_files=True, captioner=RayCaptioner
        )

    async def do(self, task: Task) -> Any:
        """The task's answer.

        Raises:
            EngineError: the engines can't be started, or the cluster is gone.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._ended is not None:
                raise EngineError(_last_line(self._ended)) from self._ended
            number = next(self._numbers)
            self._waiting[number] = future
        self._line.put.remote((number, pickle.dumps(task)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the engines; what they are at is left."""
        if not self._waiting:
            self._line.put.remote(None)
            self._thread.join(_CLOSING_S)

    def _receive(self) -> None:
        try:
            table: Any
            for table in self._answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for number, data in zip(table["number"].to_pylist(), table["data"].to_pylist(), strict=True):
                    # None for one that came twice: its engine died between the answer and its end.
                    waiting = self._waiting.pop(number, None)
                    if waiting is not None and waiting.set_running_or_notify_cancel():
                        waiting.set_result(pickle.loads(data))
            ended: Exception = EngineError("The engines on the cluster have been closed.")
        except Exception as error:
            ended = error
        with self._lock:
            self._ended = ended
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(_last_line(ended)))


class RayCaptioner(Captioner):
    """Asks the engines of a cluster. Arguments are `Captioner`'s."""

    def __init__(self, backend: RayCluster, *arguments: Any, **options: Any) -> None:
        super().__init__(cast(Any, backend), *arguments, **options)
        self._cluster = backend

    async def caption(
        self,
        item: Item,
        medium: MediaSource | PreparedMedia,
        plan: MediaPlan,
        content: bytes,
        question: str,
        system: str = "",
    ) -> Caption:
        """As `Captioner`; an engine reads the item itself, and decodes it.

        Raises:
            FailedError: the item failed there.
            EngineError: the cluster is gone.
        """
        identity, there = self._cluster.description.identity, replace(item, source=_absolute(item.source))
        answer = await self._cluster.do(
            Ask(identity, self._params, self._style, self._thinking, there, content, question, system)
        )
        if isinstance(answer, Failed):
            raise FailedError(answer.kind, answer.message)
        return answer


def _absolute(source: Path | FileSlice | bytes) -> Path | FileSlice | bytes:
    """The source as another process finds it, whose folder is another."""
    if isinstance(source, FileSlice):
        return replace(source, path=source.path.absolute())
    return source if isinstance(source, bytes) else source.absolute()


class _LineSource(Datasource):
    """Gives the line's tasks as they come, each in a block of its own."""

    def __init__(self, line: Any) -> None:
        self._line = line

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None)
        return [ReadTask(functools.partial(_blocks, self._line), metadata)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None


def _blocks(line: Any) -> Iterator[pyarrow.Table]:
    while (entry := ray.get(line.get.remote())) is not None:
        yield row(*entry)


def _connect(address: str) -> None:
    if address not in ("local", "auto"):
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise ValueError("an address is 'local', 'auto' or HOST:PORT, on a machine of the cluster.")
        # Ray would wait for minutes.
        socket.create_connection((found[1].strip("[]"), int(found[2])), _CONNECTING_S).close()
    ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False)


def _default_engines() -> int:
    """One a GPU; without any, one a machine."""
    machines = _machines()
    return int(sum(machine.get("GPU", 0) for machine in machines)) or len(machines)


def _resources(num_engines: int) -> tuple[int, int]:
    """Processors and GPUs of an engine: a GPU, or as many processors as leave the other engines as many.

    Raises:
        CaptioningError: there aren't enough.
    """
    machines = _machines()
    num_gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    if num_gpus >= num_engines:
        return 1, 1
    cpus = [int(machine["CPU"]) for machine in machines]
    for num_cpus in range(max(cpus, default=0), 0, -1):
        if not num_gpus and sum(each // num_cpus for each in cpus) >= num_engines:
            return num_cpus, 0
    has = f"{num_gpus} GPUs" if num_gpus else f"{sum(cpus)} processors"
    raise CaptioningError(f"The Ray cluster has {has}, too few for {num_engines} engines. Ask for fewer.")


def _machines() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _last_line(error: Exception) -> str:
    """Where Ray shows a whole traceback, its cause."""
    return str(error).strip().rsplit("\n", 1)[-1]
