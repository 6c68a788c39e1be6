"""What a run finds out about its items, and where that is kept: in the manifest first and in the outputs then.

One thread writes. A write that was begun is carried to its end even where the task that waits for it is cancelled, so
that a run leaves nothing half done but what a kill leaves, and that the next run completes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.manifest.manifest import Failure, Manifest
from qwen35mm.captioning.media.similar import SimilarIndex
from qwen35mm.captioning.media.workers import CHANGED, Failed
from qwen35mm.captioning.outputs import Output, Wants
from qwen35mm.captioning.records import Caption, Record
from qwen35mm.captioning.requests import CaptionRequest, RequestBuilder, asked_of
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


class Ledger:
    """The manifest and the outputs of one run. Every method may raise OutputError: then nothing can be kept any more.

    Args:
        wants_all: whether there are outputs besides, not opened, that want every caption.
        retry_failed: whether a lasting failure counts as none.
        max_distance: bits by which near-duplicates that share a caption may differ; None shares none.
    """

    def __init__(
        self,
        manifest: Manifest,
        outputs: Sequence[Output],
        requests: RequestBuilder,
        *,
        wants_all: bool = False,
        retry_failed: bool = False,
        max_distance: int | None = None,
    ) -> None:
        self._manifest = manifest
        self._outputs = outputs
        self._requests = requests
        self._wants_all = wants_all
        self._retry_failed = retry_failed
        self._max_distance = max_distance
        self._similar: dict[bytes, SimilarIndex] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-captions")

    async def open(self) -> set[str]:
        """Reads the near-duplicates of earlier runs; the names of the items that failed in them."""

        def read() -> set[str]:
            for similarity, key, name in self._manifest.similarities() if self._max_distance is not None else ():
                self._index(key, similarity, name)
            return {failure.name for failure in self._manifest.failures()}

        return await self._write(read)

    async def needs(self, item: Item) -> CaptionRequest | Wants | Failed:
        """What an item needs.

        The request where an output lacks its caption; else DONE, or KEPT where somebody else's text stays; `Failed`
        where it can't be read, or no output can take it.
        """
        try:
            if await asyncio.to_thread(self._wants, item, None) == {Wants.KEPT}:
                return Wants.KEPT
            request = await self._requests.build(item)
            if isinstance(request, Failed):
                return request
            wants = await asyncio.to_thread(self._wants, item, request.key)
        except OutputError:
            raise
        except CaptioningError as error:
            return Failed("output", str(error))
        if Wants.CAPTION in wants:
            return request
        return Wants.KEPT if Wants.KEPT in wants else Wants.DONE

    async def known(self, key: bytes) -> Known:
        """What is known of this work."""

        def read() -> Known:
            failure = self._manifest.failure(key)
            if failure is not None and (failure.kind in _PASSING or self._retry_failed):
                failure = None
            return Known(self._manifest.caption(key), failure, self._manifest.num_begun(key))

        return await self._write(read)

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

    async def begin(self, request: CaptionRequest) -> int:
        """Counts a beginning; see `Manifest.begin`."""
        return await self._write(self._manifest.begin, request.key)

    async def take_back(self, request: CaptionRequest) -> None:
        """The beginning was ended on purpose."""
        await self._write(self._manifest.take_back, request.key)

    async def finish(self, request: CaptionRequest, caption: Caption, similarity: int | None) -> None:
        """Keeps a caption in the manifest, durably."""
        key, name = request.key, request.item.name
        await self._write(lambda: self._manifest.finish(key, caption, name=name, similarity=similarity))
        if similarity is not None:
            self._index(key, similarity, name)

    async def deliver(self, request: CaptionRequest, caption: Caption) -> None:
        """Writes a kept caption to every output that lacks it.

        Raises:
            CaptioningError: an output can't take this item; the others have it.
        """
        record = Record(request.item, request.key, request.content, caption)

        def write() -> None:
            refused = _each(self._outputs, lambda output: output.write(record))
            if refused is not None:
                raise refused
            self._manifest.forget_failure(record.item.name)

        await self._write(write)

    async def fail(self, item: Item | Unreadable, key: bytes | None, failed: Failed) -> None:
        """Remembers why an item has no caption."""
        path = None if item.path is None else str(item.path)

        def write() -> None:
            if failed.kind == CHANGED.kind and isinstance(item, Item) and isinstance(item.source, Path):
                self._manifest.forget_digest(item.source)
            self._manifest.fail(item.name, path, key, failed.kind, failed.message)

        await self._write(write)

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

    def _wants(self, item: Item, key: bytes | None) -> set[Wants]:
        """What the outputs want of an item; `key` is None where its work isn't known yet.

        Raises:
            CaptioningError: an output can't take it, and no other wants its caption.
        """
        wants = {Wants.CAPTION} if self._wants_all else set[Wants]()
        refused = _each(self._outputs, lambda output: wants.add(output.wants(item, key)))
        if refused is not None and Wants.CAPTION not in wants:
            raise refused
        return wants

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
