"""Where what a run finds out is kept: in the manifest first and in the outputs then, all by one thread.

A write that was begun is carried to its end even where the task that waits for it is cancelled, so that a run leaves
nothing half done but what a kill leaves, and that the next run completes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.looks import Look
from qwen35mm.captioning.manifest.manifest import Failure, Manifest
from qwen35mm.captioning.media.similar import SimilarIndex
from qwen35mm.captioning.outputs import Output, Wants
from qwen35mm.captioning.records import Caption, Record
from qwen35mm.captioning.work import asked_of
from qwen35mm.errors import CaptioningError, OutputError

T = TypeVar("T")

# Kinds of failures that another try may not have.
_PASSING = frozenset({"engine", "timeout", "worker", "changed", "unreadable"})


@dataclass(frozen=True)
class Known:
    """What the manifest has of a piece of work.

    Attributes:
        caption: the finished one.
        failure: how it failed, where another try would fail so, too.
        num_begun: how often the program died at it.
    """

    caption: Caption | None
    failure: Failure | None
    num_begun: int

    @classmethod
    def of(cls, key: bytes, manifest: Manifest, *, retry_failed: bool) -> Known:
        """Looks work up.

        Args:
            retry_failed: whether a lasting failure counts as none.
        """
        failure = manifest.failure(key)
        if failure is not None and (failure.kind in _PASSING or retry_failed):
            failure = None
        return cls(manifest.caption(key), failure, manifest.num_begun(key))


class Ledger:
    """The manifest and the outputs of one run. Every method may raise OutputError: then nothing can be kept any more.

    Args:
        retry_failed: see `Known.of`.
        max_distance: bits by which near-duplicates that share a caption may differ; None shares none.
    """

    def __init__(
        self, manifest: Manifest, outputs: Sequence[Output], *, retry_failed: bool, max_distance: int | None
    ) -> None:
        self._manifest = manifest
        self._outputs = outputs
        self._retry_failed = retry_failed
        self._max_distance = max_distance
        self._similar: dict[bytes, SimilarIndex] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-captions")

    async def open(self) -> None:
        """Reads the near-duplicates of earlier runs."""
        if self._max_distance is not None:
            await self._write(self._read_similarities)

    async def failed_names(self) -> set[str]:
        """The items that failed, in earlier runs too."""
        return await self._write(lambda: {failure.name for failure in self._manifest.failures()})

    async def wants(self, item: Item, key: bytes | None) -> set[Wants]:
        """What the outputs want of an item; `key` is None where its work isn't known yet.

        Raises:
            CaptioningError: an output can't take it, and no other wants its caption.
        """

        def asked() -> set[Wants]:
            wants = set[Wants]()
            refused = _each(self._outputs, lambda output: wants.add(output.wants(item, key)))
            if refused is not None and Wants.CAPTION not in wants:
                raise refused
            return wants

        return await asyncio.to_thread(asked)

    async def known(self, key: bytes) -> Known:
        """What is known of this work."""
        return await self._write(lambda: Known.of(key, self._manifest, retry_failed=self._retry_failed))

    async def similar(self, key: bytes, similarity: int) -> tuple[Caption, str] | None:
        """The caption of a near-duplicate that was asked the same, and its item's name."""
        index = self._similar.get(asked_of(key))
        found = index.find(similarity) if index is not None else None
        if found is None:
            return None
        other, name = found
        caption = await asyncio.to_thread(self._manifest.caption, other)
        assert caption is not None, "what the index has is finished"
        return caption, name

    async def begin(self, look: Look) -> int:
        """Counts a beginning; see `Manifest.begin`."""
        return await self._write(self._manifest.begin, look.key)

    async def take_back(self, look: Look) -> None:
        """The beginning was ended on purpose."""
        await self._write(self._manifest.take_back, look.key)

    async def finish(self, look: Look, caption: Caption, similarity: int | None) -> None:
        """Keeps a caption in the manifest, durably."""
        key, name = look.key, look.item.name
        await self._write(lambda: self._manifest.finish(key, caption, name=name, similarity=similarity))
        if similarity is not None:
            self._index(key, similarity, name)

    async def deliver(self, look: Look, caption: Caption) -> None:
        """Writes a kept caption to every output that lacks it.

        Raises:
            CaptioningError: an output can't take this item; the others have it.
        """
        await self._write(self._write_outputs, Record(look.item, look.key, look.content, caption))

    async def fail(self, item: Item | Unreadable, key: bytes | None, kind: str, message: str) -> None:
        """Remembers why an item has no caption."""
        path = None if item.path is None else str(item.path)
        await self._write(self._manifest.fail, item.name, path, key, kind, message)

    async def forget_failure(self, item: Item) -> None:
        """The item is all right now."""
        await self._write(self._manifest.forget_failure, item.name)

    async def close(self, *, complete: bool) -> None:
        """Ends the writing.

        Args:
            complete: whether the outputs are finished; where they can't be written to, the next run does it.
        """
        failed: OutputError | None = None
        try:
            for output in self._outputs if complete else ():
                try:
                    await self._write(output.finish)
                except OutputError as error:
                    failed = failed or error
        finally:
            self._writer.shutdown()
        if failed is not None:
            raise failed

    def _write_outputs(self, record: Record) -> None:
        refused = _each(self._outputs, lambda output: output.write(record))
        if refused is not None:
            raise refused
        self._manifest.forget_failure(record.item.name)

    def _read_similarities(self) -> None:
        for similarity, key, name in self._manifest.similarities():
            self._index(key, similarity, name)

    def _index(self, key: bytes, similarity: int, name: str) -> None:
        assert self._max_distance is not None
        self._similar.setdefault(asked_of(key), SimilarIndex(self._max_distance)).add(similarity, (key, name))

    async def _write(self, function: Callable[..., T], *arguments: Any) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)
        return await asyncio.shield(future)


def _each(outputs: Sequence[Output], do: Callable[[Output], None]) -> CaptioningError | None:
    """Does something with every output; what the first one said that couldn't. Raises OutputError at once."""
    refused = None
    for output in outputs:
        try:
            do(output)
        except OutputError:
            raise
        except CaptioningError as error:
            refused = refused or error
    return refused
