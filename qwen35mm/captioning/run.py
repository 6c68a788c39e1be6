"""A captioning run: it scans the sources, decodes ahead, captions in slots and writes the outputs.

The scan runs ahead, so the total is known early. Items that need nothing end there; the others wait, packed. `_take_up`
decides whether an item needs a caption and whether another task already works on it. Then the item is prepared, waits
in a short queue, and a slot captions it. Every result goes into the ledger, so the next run can complete a killed one.
A failed item doesn't end the run; only a failed write does.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.filters import Filter
from qwen35mm.captioning.items import Failed, Item, Unreadable
from qwen35mm.captioning.judge import flagged, not_judged
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.media.workers import MediaWorkers, Prepared
from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.parts import Splitter
from qwen35mm.captioning.progress import Counts
from qwen35mm.captioning.records import Caption, combined, shared
from qwen35mm.captioning.requests import CaptionRequest
from qwen35mm.captioning.whole import WholeKind, facts_of, question_of, summarized, timeline, told_of
from qwen35mm.errors import CaptioningError, EngineError, OutputError

# After so many failures in a row, the media aren't the cause.
_MAX_FAILURES_IN_A_ROW = 10
# An item on which the program died so often is captioned last and alone; after the second number, not at all.
_NUM_SUSPICIOUS = 3
_NUM_DEADLY = 6
# A decoder's death. The kernel may have ended it for the memory that all of them took.
_CRASH = "crash"
# The most entries of one scan batch, unless the scan is slow or the entries hold their media's bytes. Then the most
# bytes of packed entries in the queue: a file in a folder takes about 100 bytes.
_SCAN_BATCH = 256
_SCAN_S = 0.1
_SCAN_BYTES = 4 << 20
_LINE_BYTES = 64 << 20
# Parts of one video that are lined up together.
_PARTS_AT_ONCE = 32


@dataclass(frozen=True)
class RunSettings:
    """How a run works; nothing here changes a caption.

    Attributes:
        slots: captions at one time.
        limit: the most items to caption; None for all.
        retry_failed: whether to retry items that failed for a lasting reason.
        max_distance: the most bits by which near-duplicates differ that share a caption; None shares no captions.
        skips_similar: only one of such near-duplicates gets a caption, and the others are left out.
        prune: whether a complete run removes the captions of deleted media from the outputs.
        judge_below: the model scores each caption's sentences, and a lower score is flagged as doubted; None scores
            none.
        checks_kept: whether media that keep a person's text are decoded too, so that broken ones are found.
        whole: what whole videos get besides the captions of their parts; None for nothing.
    """

    slots: int = 4
    limit: int | None = None
    retry_failed: bool = False
    max_distance: int | None = None
    skips_similar: bool = False
    prune: bool = False
    judge_below: float | None = None
    checks_kept: bool = False
    whole: WholeKind | None = None


class Run:
    """One run. Call `go` once, in an event loop; a signal handler of that loop may call `stop`.

    Args:
        entries: the scan.
        splitter: splits its videos; None for whole videos.
        kept: leaves media out; None for no filter.
        ledger: knows what each item needs, and gets every caption and failure. The run always closes it.
    """

    def __init__(
        self,
        entries: Iterable[Item | Unreadable],
        ledger: Ledger,
        captioner: Captioner,
        workers: MediaWorkers,
        settings: RunSettings,
        splitter: Splitter | None = None,
        kept: Filter | None = None,
    ) -> None:
        self.counts = Counts(engines=captioner.engines)
        self.stopped: Literal["interrupted", "limit"] | Exception | None = None
        # Items with earlier failures or flags that the scan hasn't given yet. After a complete scan, they are gone.
        self.missing: set[str] = set()
        self._entries = iter(entries)
        self._ledger = ledger
        self._do, self._manifest = ledger.do, ledger.manifest
        self._captioner = captioner
        self._workers = workers
        self._settings = settings
        self._splitter = splitter
        self._filter = kept
        # The queue: packed batches of entries. An empty one marks the end.
        self._line: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_line_bytes = 0
        self._has_room = asyncio.Event()
        self._unpacking = asyncio.Lock()
        self._unpacked: deque[Item | Unreadable] = deque()
        # For each free slot, since when it is free.
        self._free: asyncio.Queue[float] = asyncio.Queue()
        # The requests that wait for each key. The first one's medium is captioned.
        self._at_work: dict[bytes, list[CaptionRequest]] = {}
        # Captioned last and alone: what the program or its decoder died on.
        self._suspicious: list[Item] = []
        # For videos, by name: those parts, or the video's own name if it couldn't be split.
        self._suspicious_parts: dict[str, tuple[Item, set[str]]] = {}
        # Packed videos, which get a caption after their parts.
        self._wholes: list[bytes] = []
        # Parts of these videos that a filter leaves out: the whole caption says nothing of them.
        self._left_out: set[str] = set()
        self._num_begun = 0
        self._num_failures_in_a_row = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def go(self) -> Counts:
        """Runs to the end or to a stop; `stopped` then says why.

        Raises:
            Exception: a bug. All finished captions are stored.
        """
        slots = self._settings.slots
        # In slots; prepared and waiting for a slot, each as large as its pixels; being prepared.
        num_at_once = slots + max(slots, 2) + slots
        try:
            self.missing = await self._ledger.open()
            if self._filter is not None:
                await self._filter.open()
            for _ in range(slots):
                self._free.put_nowait(monotonic())
            self._tasks = [asyncio.create_task(self._scan())]
            self._tasks += [asyncio.create_task(self._work()) for _ in range(num_at_once)]
            await asyncio.gather(*self._tasks)
            for last in (self._do_suspicious, self._caption_wholes):
                self._tasks.append(asyncio.create_task(last()))
                await self._tasks[-1]
        except OutputError as error:
            self.stop(error)
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.counts.num_left += len(self._unpacked)
            while not self._line.empty():
                self.counts.num_left += len(_unpacked(self._line.get_nowait()))
            try:
                await self._ledger.close(complete=not isinstance(self.stopped, OutputError))
            except OutputError as error:
                self.stop(error)
        return self.counts

    def stop(self, reason: Literal["interrupted", "limit"] | Exception) -> None:
        """Begins no more captions and finishes the running ones; a second interruption drops those too."""
        again = self.stopped == "interrupted" and reason == "interrupted"
        if self.stopped in (None, "limit") or (self.stopped == "interrupted" and isinstance(reason, Exception)):
            self.stopped = reason
        self._has_room.set()
        if again or isinstance(reason, Exception):
            for task in self._tasks:
                task.cancel()

    async def _work(self) -> None:
        """Takes items from the queue, one after the other."""
        while (entry := await self._next()) is not None:
            if isinstance(entry, Unreadable):
                await self._fail(entry, None, Failed(entry.kind, entry.message))
            else:
                await self._take_up(entry)

    async def _scan(self) -> None:
        """Scans the sources, as far ahead of the slots as the queue has room."""
        try:
            while self.stopped is None:
                batch = await asyncio.to_thread(self._batch)
                if not batch:
                    self.counts.scanned = self.stopped is None
                    break
                await (self._line_up(batch) if self._splitter is None else self._split(batch, self._splitter))
        finally:
            self._line.put_nowait(b"")

    async def _line_up(self, batch: list[Item | Unreadable]) -> None:
        """Puts those entries that need something into the queue, and waits for room there."""
        found = await self._ledger.look(batch)
        self.counts.num_found += len(batch)
        self.missing.difference_update(entry.name for entry in batch)
        reads = {None, Wants.CAPTION, Wants.KEPT} if self._settings.checks_kept else {None, Wants.CAPTION}
        self.counts.num_kept += 0 if Wants.KEPT in reads else found.count(Wants.KEPT)
        self.counts.num_present += found.count(Wants.DONE)
        self.counts.num_known += found.count(Wants.CAPTION)
        waiting = [entry for entry, wants in zip(batch, found, strict=True) if wants in reads]
        if waiting:
            packed = pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL)
            self._num_line_bytes += len(packed)
            self._line.put_nowait(packed)
        while self._num_line_bytes > _LINE_BYTES and self.stopped is None:
            self._has_room.clear()
            await self._has_room.wait()

    async def _split(self, batch: list[Item | Unreadable], splitter: Splitter) -> None:
        """Lines up a batch with its videos in parts; the worker processes find them at the same time."""
        videos = [entry for entry in batch if isinstance(entry, Item) and entry.kind == "video"]
        await self._line_up([entry for entry in batch if not (isinstance(entry, Item) and entry.kind == "video")])

        async def split(video: Item) -> None:
            parts: list[Item | Unreadable] = []
            if self._settings.whole is not None:
                self._wholes.append(pickle.dumps(video, pickle.HIGHEST_PROTOCOL))
            async with contextlib.aclosing(splitter.of(video)) as found:
                async for part in found:
                    if isinstance(part, Unreadable) and part.kind == _CRASH:
                        self._suspicious_parts.setdefault(video.name, (video, set()))[1].add(part.name)
                        continue
                    parts.append(part)
                    if self.stopped is not None:
                        break
                    if len(parts) == _PARTS_AT_ONCE:
                        await self._line_up(parts)
                        parts = []
            await self._line_up(parts)

        await _together([split(video) for video in videos])

    def _batch(self) -> list[Item | Unreadable]:
        """The scan's next entries; empty at its end or after a stop."""
        batch: list[Item | Unreadable] = []
        num_bytes, began_s = 0, monotonic()
        while len(batch) < _SCAN_BATCH and num_bytes < _SCAN_BYTES and monotonic() - began_s < _SCAN_S:
            entry = next(self._entries, None) if self.stopped is None else None
            if entry is None:
                break
            batch.append(entry)
            if isinstance(entry, Item) and isinstance(entry.source, bytes):
                num_bytes += len(entry.source)
        return batch

    async def _next(self) -> Item | Unreadable | None:
        """The next entry of the queue; None at its end or after a stop."""
        async with self._unpacking:
            if not self._unpacked and self.stopped is None:
                packed = await self._line.get()
                self._num_line_bytes -= len(packed)
                self._has_room.set()
                self._unpacked.extend(_unpacked(packed))
                if not packed:
                    self._line.put_nowait(packed)
            return self._unpacked.popleft() if self._unpacked and self.stopped is None else None

    async def _do_suspicious(self) -> None:
        for item in self._suspicious:
            if self.stopped is None:
                await self._take_up(item, alone=True)
            else:
                self.counts.num_left += 1
        for video, names in self._suspicious_parts.values():
            assert self._splitter is not None, "it was split"
            async with contextlib.aclosing(self._splitter.of(video)) as found:
                async for part in found:
                    if names.isdisjoint((video.name, part.name)):
                        continue
                    self.counts.num_found += 1
                    self.missing.discard(part.name)
                    if self.stopped is not None:
                        self.counts.num_left += 1
                    elif isinstance(part, Unreadable):
                        await self._fail(part, None, Failed(part.kind, part.message))
                    else:
                        await self._take_up(part, alone=True)

    async def _caption_wholes(self) -> None:
        """Captions whole videos from the captions of their parts, as many at a time as there are slots."""
        assert self._settings.whole is None or self._splitter is not None, "only videos in parts"
        remaining = iter(self._wholes)

        async def work() -> None:
            for packed in remaining:
                if self.stopped is None and self._splitter is not None and self._settings.whole is not None:
                    await self._caption_whole(pickle.loads(packed), self._splitter, self._settings.whole)

        await _together([work() for _ in range(self._settings.slots)])

    async def _caption_whole(self, video: Item, splitter: Splitter, kind: WholeKind) -> None:
        found = [part async for part in splitter.of(video) if isinstance(part, Item) and part.part is not None]
        parts = [part for part in found if part.name not in self._left_out]
        captions = [(part, caption) for part in parts if (caption := await self._ledger.stored(part)) is not None]
        content = await splitter.digest(video)
        if not captions or content is None:
            return
        end_s = max(part.part.end_s for part in found if part.part is not None)
        counts, told, facts = self.counts, told_of(captions), facts_of(captions, len(parts), end_s)
        counts.num_found += 1
        self.missing.discard(video.name)
        try:
            needs = await self._ledger.whole(video, content, question_of(kind, told), facts)
        except OutputError:
            raise
        except CaptioningError as error:
            await self._fail(video, None, Failed("output", str(error)))
            return
        if isinstance(needs, Wants):
            await self._ledger.settle(video, needs)
            counts.num_kept += needs is Wants.KEPT
            counts.num_present += needs is Wants.DONE
            return
        caption = known = await self._ledger.known(needs)
        if caption is None:
            made = timeline(facts, told)
            caption = made if kind == "timeline" else await summarized(self._captioner, needs, facts, told)
            if isinstance(caption, Caption):
                await self._ledger.finish(needs, caption, None)
        if isinstance(caption, Failed):
            await self._fail(video, needs.key, caption)
            self._count_failure(caption)
            return
        self._num_failures_in_a_row = 0
        delivered = await self._deliver(needs, caption)
        counts.num_recalled += delivered and known is not None
        counts.num_captioned += delivered and known is None
        counts.num_prompt_tokens += 0 if known is not None else caption.num_prompt_tokens
        counts.num_generated_tokens += 0 if known is not None else caption.num_generated_tokens

    async def _take_up(self, item: Item, *, alone: bool = False) -> None:
        needs = await self._ledger.needs(item)
        if isinstance(needs, Failed):
            await self._fail_alone(item, needs, alone=alone)
        elif isinstance(needs, Wants):
            checks = needs is Wants.KEPT and self._settings.checks_kept
            if checks and (broken := await self._ledger.broken_as(item)) is not None:
                await self._fail_alone(item, broken, alone=alone)
                return
            await self._ledger.settle(item, needs)
            self.counts.num_kept += needs is Wants.KEPT
            self.counts.num_present += needs is Wants.DONE
        elif await self._is_left_out(needs):
            pass
        elif needs.key in self._at_work:
            self._at_work[needs.key].append(needs)
        else:
            # Claimed before the first await: later items with the same work join it.
            self._at_work[needs.key] = [needs]
            await self._begin(needs, alone=alone)

    async def _fail_alone(self, item: Item, failed: Failed, *, alone: bool) -> None:
        """Records a failure; but a medium whose decoder died is read once more, last and alone."""
        if failed.kind == _CRASH and not alone:
            self._suspicious.append(item)
        else:
            await self._fail(item, None, failed)

    async def _begin(self, request: CaptionRequest, *, alone: bool) -> None:
        """Begins new work, unless it is finished, failed before, or crashed the program before."""
        known = await self._ledger.known(request)
        if isinstance(known, Caption) and not self._ledger.lacks_judgement(known):
            for waiting in self._at_work.pop(request.key):
                # Not in one statement with the await: others count meanwhile.
                delivered = not await self._is_left_out(waiting, decodes=True) and await self._deliver(waiting, known)
                self.counts.num_recalled += delivered
        elif isinstance(known, Failed):
            for waiting in self._at_work.pop(request.key):
                self.counts.num_failed_before += 1
                # Under the item's own name, which may be new.
                await self._ledger.fail(waiting.item, request.key, known)
        elif not alone and await self._do(self._manifest.num_begun, request.key) >= _NUM_SUSPICIOUS:
            self._suspicious += [waiting.item for waiting in self._at_work.pop(request.key)]
        elif self._settings.limit is not None and self._num_begun >= self._settings.limit:
            self.counts.num_left += len(self._at_work.pop(request.key))
            self.stop("limit")
        else:
            self._num_begun += 1
            await self._prepare(request, known, alone=alone)

    async def _prepare(self, request: CaptionRequest, known: Caption | None, *, alone: bool) -> None:
        """Prepares a medium for its slot, or finds its near-duplicate.

        Args:
            known: its caption, if only the judgement is missing.
            alone: whether nothing else is decoded at this time.
        """
        form, shares = self._captioner.form, self._settings.max_distance is not None and known is None
        with_measures = self._filter is not None and self._filter.needs_pixels
        prepared = None
        if form is not None or shares or with_measures:
            prepared = await self._workers.prepare(
                request.item,
                request.content,
                form or "pixels",
                with_similarity=shares or (self._filter is not None and self._filter.needs_similarity),
                with_measures=with_measures,
            )
            if isinstance(prepared, Failed) and prepared.kind == _CRASH and not alone:
                self._num_begun -= 1
                self._suspicious += [waiting.item for waiting in self._at_work.pop(request.key)]
                return
            if isinstance(prepared, Failed):
                await self._fail_work(request.key, prepared)
                return
            if self._filter is not None:
                await self._filter.measured(request, prepared)
                if await self._are_left_out(request.key):
                    self._num_begun -= 1
                    return
            if prepared.similarity is not None and not self._settings.skips_similar:
                found = await self._ledger.similar(request.key, prepared.similarity)
                if found is not None:
                    caption = replace(shared(*found, request.item, prepared.medium.plan), **prepared.measured)
                    await self._ledger.share(request.as_shared(), caption)
                    waiting = await self._keep(request.key, caption, None, as_shared=True)
                    # Not in one statement with the await: others count meanwhile.
                    num_written = await self._deliver_all(waiting, caption)
                    self.counts.num_shared += num_written
                    return
        await self._wait_for_slot(request, prepared, known)

    async def _is_left_out(self, request: CaptionRequest, *, decodes: bool = False) -> bool:
        """Whether a filter leaves an item out; then it is listed. False if only its pixels can tell.

        Args:
            decodes: decodes its medium in that case.
        """
        reason = None if self._filter is None else await self._filter.reason(request, decodes=decodes)
        if reason is None:
            return False
        self.counts.num_filtered += 1
        if self._settings.whole is not None:
            self._left_out.add(request.item.name)
        await self._ledger.skip(request.item, reason)
        return True

    async def _are_left_out(self, key: bytes) -> bool:
        """Whether a filter leaves out all items that wait for this work; it ends then."""
        for request in list(self._at_work[key]):
            if await self._is_left_out(request):
                self._at_work[key] = [each for each in self._at_work[key] if each is not request]
        if not self._at_work[key]:
            del self._at_work[key]
            return True
        return False

    async def _wait_for_slot(self, request: CaptionRequest, prepared: Prepared | None, known: Caption | None) -> None:
        counts = self.counts
        free_since = await self._free.get()
        counts.slots_idle_s += monotonic() - free_since
        try:
            if self.stopped not in (None, "limit"):
                counts.num_left += len(self._at_work.pop(request.key))
                return
            caption = await self._caption(request, prepared, known)
            if caption is None:
                return
            waiting = await self._keep(request.key, caption, None if prepared is None else prepared.similarity)
        finally:
            counts.slots_s += monotonic() - free_since
            self._free.put_nowait(monotonic())
        # The manifest has the caption, so the slot is free while the outputs wait for the disk. The slot's next task
        # goes to the writing thread first, with its short call.
        await asyncio.sleep(0)
        num_written = await self._deliver_all(waiting, caption)
        if known is not None:
            counts.num_judged += num_written
            return
        if not request.styles:
            self._count(caption)
        counts.num_captioned += min(num_written, 1)
        counts.num_shared += max(num_written - 1, 0)

    async def _caption(
        self, request: CaptionRequest, prepared: Prepared | None, known: Caption | None
    ) -> Caption | None:
        """Asks the model. None if that failed; the failure is recorded."""
        counts, below = self.counts, self._settings.judge_below
        counts.began_s = counts.began_s or monotonic()
        try:
            if await self._do(self._manifest.begin, request.key) > _NUM_DEADLY:
                caption = Failed("deadly", f"The program ended {_NUM_DEADLY} times while it worked on this.")
                caption = caption if known is None else not_judged(known)
            elif request.styles:
                caption = await self._each_caption(request, prepared)
            else:
                caption = await self._captioner.caption(request, prepared, known, judges=below is not None)
        except asyncio.CancelledError:
            # Cancelled on purpose: only crashes count.
            await self._do(self._manifest.take_back, request.key)
            raise
        if isinstance(caption, Failed):
            await self._fail_work(request.key, caption)
            return None
        self._num_failures_in_a_row = 0
        return caption if below is None else flagged(caption, below)

    async def _each_caption(self, request: CaptionRequest, prepared: Prepared | None) -> Caption | Failed:
        """Asks for each of a medium's captions that is missing, and stores it, before it asks for the next.

        The medium is decoded and encoded once: from the second question on, its prefill is a cache hit.
        """
        below = self._settings.judge_below
        made: dict[str, Caption] = {}
        failed: Failed | None = None
        for name, each in request.styles.items():
            caption = known = await self._do(self._manifest.caption, each.key)
            if known is None or self._ledger.lacks_judgement(known):
                caption = await self._captioner.caption(each, prepared, known, judges=below is not None)
                if isinstance(caption, Failed):
                    failed = failed or replace(caption, message=f"{name}: {caption.message}")
                    if caption.kind == "engine":
                        break
                    continue
                if below is not None:
                    caption = flagged(caption, below)
                await self._ledger.finish(each, caption, None)
                if known is None:
                    self._count(caption)
            assert isinstance(caption, Caption)
            made[name] = caption
        return failed or combined(made)

    def _count(self, caption: Caption) -> None:
        self.counts.num_retries += caption.num_attempts - 1
        self.counts.num_prompt_tokens += caption.num_prompt_tokens
        self.counts.num_generated_tokens += caption.num_generated_tokens

    async def _keep(
        self, key: bytes, caption: Caption, similarity: int | None, *, as_shared: bool = False
    ) -> list[CaptionRequest]:
        """Stores a caption in the manifest; returns the requests that wait for it."""
        first = self._at_work[key][0]
        await self._ledger.finish(first.as_shared() if as_shared else first, caption, similarity)
        # Later requests find it in the manifest.
        waiting = self._at_work.pop(key)
        return [request.as_shared() for request in waiting] if as_shared else waiting

    async def _deliver_all(self, waiting: list[CaptionRequest], caption: Caption) -> int:
        """Writes a stored caption for every waiting item; returns how many got it."""
        num_written = 0
        for request in waiting:
            # Not in one statement with the await: others count meanwhile.
            is_left_out = await self._is_left_out(request, decodes=True)
            num_written += not is_left_out and await self._deliver(request, caption)
        return num_written

    async def _deliver(self, request: CaptionRequest, caption: Caption) -> bool:
        """Writes a stored caption to the outputs. False if that failed; the failure is recorded."""
        failed = await self._ledger.deliver(request, caption)
        if failed is not None:
            await self._fail(request.item, request.key, failed)
            return False
        self.counts.defaulted.update(request.defaulted)
        return True

    async def _fail_work(self, key: bytes, failed: Failed) -> None:
        """Records a failure for every item that waits for this work."""
        for request in self._at_work.pop(key):
            if request.styles:
                await self._ledger.deliver_finished(request)
            await self._fail(request.item, key, failed)
        self._count_failure(failed)

    def _count_failure(self, failed: Failed) -> None:
        """Stops the run when the engine fails again and again."""
        self._num_failures_in_a_row = self._num_failures_in_a_row + 1 if failed.kind == "engine" else 0
        if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self.stop(EngineError(f"{_MAX_FAILURES_IN_A_ROW} items in a row failed, the last one so: {failed.message}"))

    async def _fail(self, item: Item | Unreadable, key: bytes | None, failed: Failed) -> None:
        self.counts.num_failed += 1
        await self._ledger.fail(item, key, failed)


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them at one time. If one fails or this is cancelled, the others end first."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unpacked(batch: bytes) -> list[Item | Unreadable]:
    return pickle.loads(batch) if batch else []
