"""What runs on a Ray cluster: an engine an actor, and the line in which the run's tasks wait for one.

Tasks and answers are pickles. An actor does what a run without Ray does in its own process, with the same classes, so
its captions are the same work.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow

from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner, CaptionStyle, caption_failure_kind
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.job import local_model
from qwen35mm.captioning.media.worker import Decode, Failed
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.records import Caption
from qwen35mm.errors import Qwen35mmError
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaError, MediaProcessor

# An item at which so many actors died is left alone.
_MAX_BEGUN = 3


@dataclass(frozen=True)
class Describe:
    """Asks which model the actors have; the answer is a `Description`."""


@dataclass(frozen=True)
class Description:
    """As in `Model`.

    Attributes:
        is_demo: whether it is the bundled model.
    """

    name: str
    identity: Mapping[str, Any]
    params: SamplingParams
    processor: MediaProcessor
    is_demo: bool


@dataclass(frozen=True)
class Ask:
    """Asks for an item's caption; see `Captioner`. The answer is a `Caption`, or `Failed`.

    Attributes:
        identity: of the model that is to answer.
    """

    identity: Mapping[str, Any]
    params: SamplingParams
    style: CaptionStyle
    thinking: bool | None
    item: Item
    content: bytes
    question: str
    system: str


Task = Describe | Ask
Answer = Description | Caption | Failed


class Line:
    """Tasks on their way to the actors, each with its number; one for the cluster, in an actor of its own."""

    def __init__(self) -> None:
        self._tasks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._num_begun: Counter[int] = Counter()

    async def put(self, entry: tuple[int, bytes] | None) -> None:
        """A task to the end; None is the last."""
        await self._tasks.put(entry)

    async def get(self) -> tuple[int, bytes] | None:
        """The next task, as soon as there is one."""
        return await self._tasks.get()

    async def begin(self, number: int) -> int:
        """Counts a beginning; how many there were of this task."""
        self._num_begun[number] += 1
        return self._num_begun[number]

    async def end(self, number: int) -> None:
        """The task has its answer."""
        del self._num_begun[number]


class CaptionActor:
    """An engine, and the processes that read its media. Ray Data calls it with one row at a time, many at once.

    Args:
        load: starts the engine.
        line: the handle of `Line`.
    """

    def __init__(self, load: Callable[[], LocalBackend], num_workers: int, line: Any) -> None:
        self._line = line
        self._unable: Failed | None = None
        try:
            self._backend = load()
            self._model = local_model(self._backend, None)
            self._workers = MediaWorkers(self._model.processor, num_workers)
        except Qwen35mmError as error:
            # Ray would show what it did, instead of what is wrong.
            self._unable = Failed("engine", str(error))

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        number = batch["number"][0].as_py()
        num_begun = await self._line.begin.remote(number)
        if num_begun > _MAX_BEGUN:
            answer = Failed("worker", f"{_MAX_BEGUN} engines of the cluster ended while they worked on this.")
        else:
            answer = await self._answer(pickle.loads(batch["data"][0].as_py()))
        await self._line.end.remote(number)
        return row(number, pickle.dumps(answer))

    async def _answer(self, task: Task) -> Answer:
        if self._unable is not None:
            return self._unable
        model = self._model
        if isinstance(task, Describe):
            return Description(model.name, model.identity, model.params, model.processor, self._backend.is_demo)
        if task.identity != model.identity:
            return Failed("engine", "The machines of the cluster don't have the same weights, or not the same dtype.")
        decoded = await self._workers.do(Decode(task.item, task.content, with_similarity=False))
        if isinstance(decoded, Failed):
            return decoded
        captioner = Captioner(self._backend, model.name, task.params, task.style, enable_thinking=task.thinking)
        try:
            return await captioner.caption(
                task.item, decoded.media, decoded.media.plan, task.content, task.question, task.system
            )
        except (Qwen35mmError, MediaError) as error:
            return Failed(caption_failure_kind(error), str(error))


def row(number: int, data: bytes) -> pyarrow.Table:
    """A task or an answer as Ray Data moves it."""
    return pyarrow.table({"number": [number], "data": pyarrow.array([data], pyarrow.large_binary())})
