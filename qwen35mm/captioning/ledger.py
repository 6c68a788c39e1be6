"""Stores what a run learns about its items: in the manifest first, then in the outputs.

One thread uses both. It finishes each call even if the waiting task is cancelled. So only a kill leaves a call half
done, and the next run completes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from qwen35mm.captioning.aside import Broken, broken_medium
from qwen35mm.captioning.items import BROKEN, Failed, Item, Unreadable
from qwen35mm.captioning.judge import flagged
from qwen35mm.captioning.manifest.listings import Listings
from qwen35mm.captioning.manifest.manifest import Manifest, is_settled
from qwen35mm.captioning.media.similar import SimilarIndex
from qwen35mm.captioning.media.workers import Inspected, MediaWorkers
from qwen35mm.captioning.outputs import DEFAULT_SUFFIX, Output, OutputSettings, Sidecars, Wants
from qwen35mm.captioning.records import Caption, Record, apart, combined
from qwen35mm.captioning.requests import CaptionRequest, RequestBuilder, asked_of, shared_key, work_of
from qwen35mm.errors import CaptioningError, OutputError

T = TypeVar("T")

# A fact of a medium: it could be decoded.
_READABLE = "readable"

# Kinds of failures that may not happen again.
_PASSING = frozenset({"engine", "timeout", "worker", "changed", "unreadable"})


class Ledger:
    """The manifest and the outputs of one run. Every method may raise OutputError: then nothing more can be stored.

    Args:
        listings: the files that list failures and flags; None if nothing is written.
        workers: read media whose digest or plan isn't known.
        wants_all: whether there are further outputs, not opened, that want every caption.
        retry_failed: whether to ignore lasting failures.
        retry_broken: whether to ignore those of media that nobody may be able to read: earlier versions gave other
            failures the same kinds.
        max_distance: the most bits by which near-duplicates differ that share a caption; None shares no captions.
        judge_below: sentences with a lower score are doubted; None judges no captions.

    Attributes:
        broken: the broken media that failed, by their paths.
    """

    def __init__(
        self,
        manifest: Manifest,
        outputs: Sequence[Output],
        requests: RequestBuilder,
        workers: MediaWorkers,
        *,
        listings: Listings | None = None,
        wants_all: bool = False,
        retry_failed: bool = False,
        retry_broken: bool = False,
        max_distance: int | None = None,
        judge_below: float | None = None,
    ) -> None:
        self.manifest = manifest
        self._outputs = outputs
        self._requests = requests
        self._workers = workers
        self._listings = listings
        self._wants_all = wants_all
        self._retry_failed = retry_failed
        self._passing = _PASSING | (BROKEN if retry_broken else frozenset())
        self._max_distance = max_distance
        self.judge_below = judge_below
        self.broken: dict[Path, Broken] = {}
        self._similar: dict[bytes, SimilarIndex] = {}
        # Where a person's own text may be: in the sidecars of this run, and beside the medium.
        own = next((output for output in outputs if isinstance(output, Sidecars)), None)
        beside = Sidecars(manifest, DEFAULT_SUFFIX, OutputSettings())
        self._texts = [beside] if own is None else [own, beside]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-captions")

    async def do(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that uses the manifest or the outputs, in their thread."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        # Reads the error even if the waiting task is cancelled; otherwise asyncio would print it.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(future)

    async def open(self) -> set[str]:
        """Reads the hashes of earlier runs; returns the names of items with failures or flags from those runs."""

        def read() -> set[str]:
            for similarity, key, name in self.manifest.similarities() if self._max_distance is not None else ():
                self._index(key, similarity, name)
            if self._listings is None:
                return set()
            self._listings.begin()
            return {name for name, _ in self._listings.listed()}

        return await self.do(read)

    async def look(self, entries: Sequence[Item | Unreadable]) -> list[Wants | None]:
        """What is known of each entry without reading a medium, in one transaction.

        DONE or KEPT, or CAPTION if the manifest has the caption and an output lacks it; None if nothing is known.
        """

        def read() -> list[Wants | None]:
            with self.manifest.together():
                return [self._settled(entry) if isinstance(entry, Item) else None for entry in entries]

        return await self.do(read)

    async def needs(self, item: Item) -> CaptionRequest | Wants | Failed:
        """What an item needs.

        A request if an output lacks its caption, or the caption its judgement. Otherwise DONE, or KEPT if another
        person's text stays. `Failed` if the item can't be read, lacks what its prompt names, or fits no output.
        """
        try:
            known = await self.do(self._look, item)
            if isinstance(known, Wants):
                return known
            seen, with_plan = Inspected(None, None, None), self._requests.needs_plan(item)
            if known is None or with_plan:
                seen = await self._workers.inspect(item, with_digest=known is None, with_plan=with_plan)
                if isinstance(seen, Failed):
                    return seen
            return await self.do(self._ask, item, known, seen)
        except OutputError:
            raise
        except CaptioningError as error:
            return Failed("output", str(error))

    async def broken_as(self, item: Item) -> Failed | None:
        """How a medium is broken; None if it isn't. What could be decoded isn't decoded again by later runs."""
        content = await self.do(self._digest, item)
        if content is None:
            seen = await self._workers.inspect(item, with_digest=True, with_plan=False)
            if isinstance(seen, Failed):
                return seen if await self.do(broken_medium, item, seen) else None
            content = await self.do(self._remembered, item, seen)
        work = work_of(item, content)
        if _READABLE in await self.do(self.manifest.facts, work):
            return None
        prepared = await self._workers.prepare(item, content, "pixels")
        if isinstance(prepared, Failed):
            return prepared if await self.do(broken_medium, item, prepared) else None
        await self.do(self.manifest.remember_facts, work, {_READABLE: True})
        return None

    async def stored(self, item: Item) -> Caption | None:
        """An item's finished caption. None if there is none, or the item can't be read."""

        def read(known: bytes | None, seen: Inspected) -> Caption | None:
            content = known or seen.digest
            assert content is not None, "it was asked for"
            request = self._as_it_was_done(self._requests.build(item, content, seen.plan, self._original))
            return self.manifest.caption(request.key)

        try:
            known, seen = await self.do(self._digest, item), Inspected(None, None, None)
            with_plan = self._requests.needs_plan(item)
            if known is None or with_plan:
                found = await self._workers.inspect(item, with_digest=known is None, with_plan=with_plan)
                if isinstance(found, Failed):
                    return None
                seen = found
            return await self.do(read, known, seen)
        except OutputError:
            raise
        except CaptioningError:
            return None

    async def whole(self, item: Item, content: bytes, question: str, facts: Caption) -> CaptionRequest | Wants:
        """What a whole video needs whose caption follows from those of its parts; `facts` has its size and duration.

        Raises:
            CaptioningError: no output can take it, or it lacks what its prefix, suffix or trigger word names.
        """

        def ask() -> CaptionRequest | Wants:
            request = self._as_it_was_done(self._requests.of_text(item, content, question, facts))
            wants = self._wants(item, request)
            return request if Wants.CAPTION in wants else Wants.KEPT if Wants.KEPT in wants else Wants.DONE

        return await self.do(ask)

    async def known(self, request: CaptionRequest) -> Caption | Failed | None:
        """The finished caption of this work, or its failure if a retry would fail too.

        Several captions that were all finished one by one are stored together here.
        """
        key = request.key

        def read() -> Caption | Failed | None:
            failed = self.manifest.failure(key)
            if failed is not None and (failed.kind in self._passing or self._retry_failed):
                failed = None
            caption = self.manifest.caption(key)
            if caption is None and request.styles:
                finished = self._finished(request)
                if len(finished) == len(request.styles) and not any(map(self.lacks_judgement, finished.values())):
                    caption = self._flagged(combined(finished))
                    self.manifest.finish(key, caption, name=request.item.name)
            if caption is not None and not self.lacks_judgement(caption) and caption != (now := self._flagged(caption)):
                self.manifest.finish(key, now)
                return now
            return caption or failed

        return await self.do(read)

    def lacks_judgement(self, caption: Caption) -> bool:
        """Whether the model has yet to judge a caption."""
        return self.judge_below is not None and caption.judged is None

    def _flagged(self, caption: Caption) -> Caption:
        """A judged caption with the flags for this run's threshold."""
        return caption if self.judge_below is None else flagged(caption, self.judge_below)

    async def similar(self, key: bytes, similarity: int) -> tuple[Caption, str] | None:
        """The caption of a near-duplicate with the same question, and its item's name."""
        index = self._similar.get(asked_of(key))
        found = index.find(similarity) if index is not None else None
        if found is None:
            return None
        other, name = found
        caption = await self.do(self.manifest.caption, other)
        assert caption is not None, "what the index has is finished"
        return caption, name

    async def finish(self, request: CaptionRequest, caption: Caption, similarity: int | None) -> None:
        """Stores a caption in the manifest, durably."""
        key, name = request.key, request.item.name
        await self.do(lambda: self.manifest.finish(key, caption, name=name, similarity=similarity))
        if similarity is not None and self._max_distance is not None:
            self._index(key, similarity, name)

    async def share(self, request: CaptionRequest, caption: Caption) -> None:
        """Stores the captions of a near-duplicate one by one, under a request's own keys."""

        def store() -> None:
            for name, each in request.styles.items():
                self.manifest.finish(each.key, apart(caption, name), name=request.item.name)

        await self.do(store)

    async def deliver(self, request: CaptionRequest, caption: Caption) -> Failed | None:
        """Writes a stored caption to every output that lacks it; `Failed` if one can't take this item."""

        def write() -> Failed | None:
            styles = {name: self.manifest.caption(each.key) for name, each in request.styles.items()}
            made = {name: each or apart(caption, name) for name, each in styles.items()}
            refused = _each(self._outputs, lambda output: self._write(output, request, caption, made))
            if refused is not None:
                return Failed("output", str(refused))
            if self._listings is not None:
                self._listings.settle(request.item, caption.flags)
            return None

        return await self.do(write)

    async def deliver_finished(self, request: CaptionRequest) -> None:
        """Writes those of several captions that are finished, where the others failed, to outputs that take only one.

        What an output refuses, the next run reports.
        """

        def write() -> None:
            made = self._finished(request)
            _each(self._outputs, lambda output: self._write(output, request, None, made))

        await self.do(write)

    def _finished(self, request: CaptionRequest) -> dict[str, Caption]:
        """Those of several captions that are finished."""
        found = {name: self.manifest.caption(each.key) for name, each in request.styles.items()}
        return {name: caption for name, caption in found.items() if caption is not None}

    def _write(
        self, output: Output, request: CaptionRequest, whole: Caption | None, styles: Mapping[str, Caption]
    ) -> None:
        """Writes what an output takes: all captions together, or the one of its style."""
        caption = whole if output.style is None else styles.get(output.style)
        if caption is not None:
            key, trigger = request.of_style(output.style).key, request.around.trigger
            output.write(Record(request.item, key, request.content, caption, trigger))

    async def fail(self, item: Item | Unreadable, key: bytes | None, failed: Failed) -> None:
        """Stores and lists why an item has no caption; `key` is None if it failed before its work was known."""
        if self._listings is not None:
            await self.do(self._listings.fail, item, key, failed)
        if (broken := await self.do(broken_medium, item, failed)) is not None:
            self.broken[broken.path] = broken

    async def skip(self, item: Item, reason: str) -> None:
        """Lists an item that a filter leaves out."""
        if self._listings is not None:
            await self.do(self._listings.skip, item, reason)

    async def settle(self, item: Item, wants: Wants) -> None:
        """Forgets the failures of an item that needs nothing."""
        await self.do(self._forget, item, wants)

    async def close(self, *, complete: bool) -> None:
        """Ends the writing.

        Args:
            complete: whether to finish the outputs. If they can't be written, the next run finishes them.
        """
        failed: OutputError | None = None
        try:
            for output in self._outputs if complete else ():
                try:
                    await self.do(output.finish)
                except OutputError as error:
                    failed = failed or error
        finally:
            self._thread.shutdown()
        if failed is not None:
            raise failed

    def _settled(self, item: Item) -> Wants | None:
        try:
            found = self._look(item)
            if isinstance(found, bytes) and not self._requests.needs_plan(item):
                found = self._ask(item, found, Inspected(None, None, None))
        except OutputError:
            raise
        except CaptioningError:
            return None  # reported when the item is taken up
        if isinstance(found, CaptionRequest):
            caption = self.manifest.caption(found.key)
            return None if caption is None or self.lacks_judgement(caption) else Wants.CAPTION
        if not isinstance(found, Wants):
            return None
        self._forget(item, found)
        return found

    def _forget(self, item: Item, wants: Wants) -> None:
        if wants is Wants.KEPT and self._listings is not None:
            self._listings.forget(item.name)
        else:
            self.manifest.forget_failure(item.name)

    def _look(self, item: Item) -> Wants | bytes | None:
        """The digest of the item's bytes if it is known; KEPT if it isn't needed."""
        known = self._digest(item)
        if (known is None or self._requests.needs_plan(item)) and self._wants(item, None) == {Wants.KEPT}:
            return Wants.KEPT
        return known

    def _digest(self, item: Item) -> bytes | None:
        """The digest of the item's bytes if it is known."""
        # Reading a deleted file later says why.
        with contextlib.suppress(OSError):
            return self.manifest.digest(item.source, item.source.stat()) if isinstance(item.source, Path) else None
        return None

    def _remembered(self, item: Item, seen: Inspected) -> bytes:
        """The digest that was read; stored unless the file may still change within its timestamp's resolution."""
        assert seen.digest is not None, "it was asked for"
        if seen.status is not None and is_settled(seen.status):
            assert isinstance(item.source, Path)
            self.manifest.remember_digest(item.source, seen.status, seen.digest)
        return seen.digest

    def _ask(self, item: Item, known: bytes | None, seen: Inspected) -> CaptionRequest | Wants | Failed:
        """The item's request if an output wants its caption."""
        content = known or self._remembered(item, seen)
        try:
            request = self._as_it_was_done(self._requests.build(item, content, seen.plan, self._original))
        except OutputError:
            raise
        except CaptioningError as error:
            return Wants.KEPT if self._wants(item, None) == {Wants.KEPT} else Failed("prompt", str(error))
        wants = self._wants(item, request)
        if Wants.CAPTION in wants and self._is_edited(item, content, seen):
            return Wants.KEPT
        if Wants.CAPTION in wants or (Wants.DONE in wants and self._is_to_judge(request.key)):
            return request
        return Wants.KEPT if Wants.KEPT in wants else Wants.DONE

    def _is_to_judge(self, key: bytes) -> bool:
        """Whether a stored caption lacks its judgement or the flags for this run's threshold."""
        caption = None if self.judge_below is None else self.manifest.caption(key)
        return caption is not None and (self.lacks_judgement(caption) or caption != self._flagged(caption))

    def _as_it_was_done(self, request: CaptionRequest) -> CaptionRequest:
        """The request under the first key that has a caption.

        First its own key, then those of the same model elsewhere, then those for near-duplicates' captions if wanted.
        """
        if request.styles:
            styles = {name: self._as_it_was_done(each) for name, each in request.styles.items()}
            request = replace(request, styles=styles)
        names = [[request.key], request.others]
        if self._max_distance is not None:
            names.append([shared_key(key) for key in (request.key, *request.others)])
        if not any(names[1:]):
            return request
        found = (self.manifest.finished(keys) for keys in names if keys)
        return replace(request, key=next(filter(None, found), request.key))

    def _is_edited(self, item: Item, content: bytes, seen: Inspected) -> bool:
        """Whether a person edited what this question overwrote: their edit is `{sidecar}` now, so the key changed."""
        if not self._requests.needs_plan(item):
            return False
        try:
            before = partial(self._original, overwritten=True)
            request = self._requests.build(item, content, seen.plan, before)
            return Wants.CAPTION not in self._wants(item, self._as_it_was_done(request))
        except OutputError:
            raise
        except CaptioningError:
            return False

    def _original(self, item: Item, *, overwritten: bool = False) -> str | None:
        """A person's own text for an item; see `Sidecars.original`."""
        texts = (sidecars.original(item, overwritten=overwritten) for sidecars in self._texts)
        return next((text for text in texts if text is not None), None)

    def _wants(self, item: Item, request: CaptionRequest | None) -> set[Wants]:
        """What the outputs want of an item; `request` is None if its work isn't known yet.

        Raises:
            CaptioningError: an output can't take it, and no other wants its caption.
        """
        wants = {Wants.CAPTION} if self._wants_all else set[Wants]()

        def ask(output: Output) -> None:
            wants.add(output.wants(item, None if request is None else request.of_style(output.style).key))

        refused = _each(self._outputs, ask)
        if refused is not None and Wants.CAPTION not in wants:
            raise refused
        return wants

    def _index(self, key: bytes, similarity: int, name: str) -> None:
        assert self._max_distance is not None
        self._similar.setdefault(asked_of(key), SimilarIndex(self._max_distance)).add(similarity, (key, name))


def _each(outputs: Sequence[Output], do: Callable[[Output], None]) -> CaptioningError | None:
    """Calls `do` for every output; returns the first CaptioningError. Raises OutputError at once."""
    refused = None
    for output in outputs:
        try:
            do(output)
        except OutputError:
            raise
        except CaptioningError as error:
            refused = refused or error
    return refused
