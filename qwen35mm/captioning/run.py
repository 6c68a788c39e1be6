"""A captioning run: a scan, looks at media, decoding ahead, captions in slots, and everything that is written.

An item goes through `_look` (is it needed, under which key?), waits decoded in a short line, and is captioned by one of
the slots. What is found out goes into the ledger, so that a kill at any moment leaves what the next run can complete.
A failure is an item's own; only what can't be written ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Literal

from qwen35mm.backends.remote.media import VideoMode
from qwen35mm.captioning.captioner import Captioner, caption_failure_kind
from qwen35mm.captioning.counts import Counts
from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.looks import Look, Looks
from qwen35mm.captioning.media import worker as media_worker
from qwen35mm.captioning.media.worker import CHANGED, Decode, Encode, Failed
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.records import Caption, shared
from qwen35mm.errors import CaptioningError, EngineError, OutputError, Qwen35mmError
from qwen35mm.prompt import EncodedMedium
from qwen35mm_preprocess import MediaError, MediaPlan, MediaSource, PreparedMedia

# As many in a row aren't the media's fault.
_MAX_FAILURES_IN_A_ROW = 10
# An item at which the program was so often when it died is done last and by itself; and after so often, not at all.
_NUM_SUSPICIOUS = 3
_NUM_DEADLY = 6
_SCAN_BATCH = 16


@dataclass(frozen=True)
class RunSettings:
    """How a run goes about its work; nothing here changes a caption.

    Attributes:
        slots: captions at one time.
        ahead: decoded media that wait for a slot; each is as large as its pixels.
        limit: items that are decoded at most; None is all.
        retry_failed: whether items that failed for a lasting reason are tried again.
        max_distance: bits by which near-duplicates that share a caption may differ; None shares none.
        sends_files: whether the backend takes the files themselves, and nothing is to be decoded for it.
        encodes: how videos go to a server, whose media are encoded and not prepared; None where there is none.
    """

    slots: int = 4
    ahead: int = 4
    limit: int | None = None
    retry_failed: bool = False
    max_distance: int | None = None
    sends_files: bool = False
    encodes: VideoMode | None = None


@dataclass(frozen=True)
class _Ready:
    """An item that waits for a slot."""

    look: Look
    medium: MediaSource | PreparedMedia | EncodedMedium
    plan: MediaPlan
    similarity: int | None


class Run:
    """One run. `go` is called once, in an event loop; `stop` may be called from a signal's handler in it.

    Args:
        entries: the scan.
        looks: decides what an item is asked, and under which key.
        ledger: gets every caption and failure; it is closed at the end, whatever ends the run.
    """

    def __init__(
        self,
        entries: Iterable[Item | Unreadable],
        looks: Looks,
        captioner: Captioner,
        workers: MediaWorkers,
        ledger: Ledger,
        settings: RunSettings,
    ) -> None:
        self.counts = Counts()
        self.stopped: Literal["interrupted", "limit"] | Exception | None = None
        self._entries = entries
        self._looks = looks
        self._captioner = captioner
        self._workers = workers
        self._ledger = ledger
        self._settings = settings
        self._items: asyncio.Queue[Item | Unreadable | None] = asyncio.Queue(settings.slots + settings.ahead)
        self._ready: asyncio.Queue[_Ready | None] = asyncio.Queue(max(settings.ahead, 1))
        # Who waits for which work; the first of them is the one whose medium is captioned.
        self._at_work: dict[bytes, list[Look]] = {}
        self._suspicious: list[Item] = []
        # Items that failed before and that the scan hasn't given; behind a whole scan, they aren't there any more.
        self.missing: set[str] = set()
        self._num_looking = 0
        self._num_begun = 0
        self._num_failures_in_a_row = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def go(self) -> Counts:
        """Runs to the end, or to a stop; `stopped` then says why.

        Raises:
            Exception: a bug; everything that was captioned is stored.
        """
        try:
            await self._ledger.open()
            self.missing = await self._ledger.failed_names()
            slots = range(self._settings.slots)
            loops = [self._feed(), *(self._look_loop() for _ in slots), *(self._caption_loop() for _ in slots)]
            self._num_looking = len(slots)
            self._tasks = [asyncio.create_task(loop) for loop in loops]
            await asyncio.gather(*self._tasks)
            self._tasks.append(asyncio.create_task(self._do_suspicious()))
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
            await self._close()
        return self.counts

    def stop(self, reason: Literal["interrupted", "limit"] | Exception) -> None:
        """Begins nothing more; captions at work are finished. A second interruption leaves them too."""
        again = self.stopped == "interrupted" and reason == "interrupted"
        if self.stopped in (None, "limit") or (self.stopped == "interrupted" and isinstance(reason, Exception)):
            self.stopped = reason
        if again or isinstance(reason, Exception):
            for task in self._tasks:
                task.cancel()

    async def _feed(self) -> None:
        entries = iter(self._entries)
        while self.stopped is None:
            batch = await asyncio.to_thread(lambda: list(islice(entries, _SCAN_BATCH)))
            if not batch:
                self.counts.scanned = True
                break
            for entry in batch:
                self.counts.num_found += 1
                self.missing.discard(entry.name)
                await self._items.put(entry)
        await self._items.put(None)

    async def _look_loop(self) -> None:
        while (entry := await self._items.get()) is not None:
            if self.stopped is not None:
                self.counts.num_left += 1
            elif isinstance(entry, Unreadable):
                await self._fail(entry, None, entry.kind, entry.message)
            else:
                await self._look(entry)
        await self._items.put(None)
        self._num_looking -= 1
        if not self._num_looking:
            await self._ready.put(None)

    async def _do_suspicious(self) -> None:
        for item in self._suspicious:
            if self.stopped is None:
                await self._look(item, alone=True)
            else:
                self.counts.num_left += 1

    async def _look(self, item: Item, *, alone: bool = False) -> None:
        counts = self.counts
        try:
            if await self._ledger.wants(item, None) == {Wants.KEPT}:
                await self._ledger.forget_failure(item)
                counts.num_kept += 1
                return
            look = await self._looks.look(item)
            if isinstance(look, Failed):
                await self._fail(item, None, look.kind, look.message)
                return
            wants = await self._ledger.wants(item, look.key)
        except OutputError:
            raise
        except CaptioningError as error:
            await self._fail(item, None, "output", str(error))
            return
        if Wants.CAPTION not in wants:
            await self._ledger.forget_failure(item)
            counts.num_kept += Wants.KEPT in wants
            counts.num_present += Wants.KEPT not in wants
        elif look.key in self._at_work:
            self._at_work[look.key].append(look)
        else:
            # Claimed before anything is waited for: who comes with the same work from here on joins it.
            self._at_work[look.key] = [look]
            await self._begin(look, alone=alone)

    async def _begin(self, look: Look, *, alone: bool) -> None:
        """Takes up work that nobody is at, unless it was done, failed or was too much for the program before."""
        known = await self._ledger.known(look.key)
        if known.caption is not None:
            for waiting in self._at_work.pop(look.key):
                delivered = await self._deliver(waiting, known.caption)
                self.counts.num_recalled += delivered
        elif (failure := known.failure) is not None:
            for waiting in self._at_work.pop(look.key):
                self.counts.num_failed_before += 1
                # Under its own name, which may be new.
                await self._ledger.fail(waiting.item, look.key, failure.kind, failure.message)
        elif known.num_begun >= _NUM_SUSPICIOUS and not alone:
            self._suspicious += [waiting.item for waiting in self._at_work.pop(look.key)]
        elif self._settings.limit is not None and self._num_begun >= self._settings.limit:
            self.counts.num_left += len(self._at_work.pop(look.key))
            self.stop("limit")
        else:
            self._num_begun += 1
            await self._decode(look, alone=alone)

    async def _decode(self, look: Look, *, alone: bool) -> None:
        """Decodes an item for its slot, and finds its near-duplicate."""
        settings = self._settings
        medium, plan, similarity = None, look.plan, None
        if settings.max_distance is not None or not (settings.sends_files or settings.encodes):
            decoded = await self._workers.do(Decode(look.item, look.content, settings.max_distance is not None))
            if isinstance(decoded, Failed):
                await self._fail_work(look.key, decoded.kind, decoded.message)
                return
            medium, plan, similarity = decoded.media, decoded.media.plan, decoded.similarity
        if similarity is not None and plan is not None and await self._share(look, plan, similarity):
            return
        if settings.encodes is not None:
            encoded = await self._workers.do(Encode(look.item, look.content, settings.encodes))
            if isinstance(encoded, Failed):
                await self._fail_work(look.key, encoded.kind, encoded.message)
                return
            medium, plan = encoded, encoded.plan
        elif settings.sends_files:
            try:
                medium = await asyncio.to_thread(look.item.read)
            except OSError as error:
                await self._fail_work(look.key, "unreadable", f"The file can't be read: {error.strerror}.")
                return
        assert medium is not None
        assert plan is not None
        ready = _Ready(look, medium, plan, similarity)
        await (self._caption(ready) if alone else self._ready.put(ready))

    async def _share(self, look: Look, plan: MediaPlan, similarity: int) -> bool:
        """Takes a near-duplicate's caption, if there is one that was asked the same."""
        found = await self._ledger.similar(look.key, similarity)
        if found is None:
            return False
        self.counts.num_shared += await self._store(look.key, shared(*found, look.item, plan), None)
        return True

    async def _caption_loop(self) -> None:
        since = monotonic()
        while (ready := await self._ready.get()) is not None:
            got = monotonic()
            if self.stopped in (None, "limit"):
                await self._caption(ready)
            else:
                self.counts.num_left += len(self._at_work.pop(ready.look.key))
            self.counts.slots_idle_s += got - since
            self.counts.slots_s += monotonic() - since
            since = monotonic()
        await self._ready.put(None)

    async def _caption(self, ready: _Ready) -> None:
        look, counts = ready.look, self.counts
        try:
            num_begun = await self._ledger.begin(look)
            if num_begun > _NUM_DEADLY:
                message = f"The program ended {_NUM_DEADLY} times while it worked on this."
                await self._fail_work(look.key, "crash", message)
                return
            caption = await self._captioner.caption(
                look.item, ready.medium, ready.plan, look.content, look.question, look.system
            )
        except (Qwen35mmError, MediaError) as error:
            await self._fail_work(look.key, caption_failure_kind(error), str(error))
            return
        except asyncio.CancelledError:
            # Left on purpose: only what the program dies of counts.
            await self._ledger.take_back(look)
            raise
        if self._settings.sends_files and await self._has_changed(look):
            await self._fail_work(look.key, CHANGED.kind, CHANGED.message)
            return
        self._num_failures_in_a_row = 0
        counts.num_retries += caption.num_attempts - 1
        counts.num_prompt_tokens += caption.num_prompt_tokens
        counts.num_generated_tokens += caption.num_generated_tokens
        num_written = await self._store(look.key, caption, ready.similarity)
        counts.num_captioned += min(num_written, 1)
        counts.num_shared += max(num_written - 1, 0)

    async def _has_changed(self, look: Look) -> bool:
        """Whether what was sent, which the backend read by itself, may be other bytes than the caption is for."""
        if isinstance(look.item.source, bytes):
            return False
        seen = await self._workers.do(media_worker.Look(look.item, with_digest=True, with_plan=False))
        return isinstance(seen, Failed) or seen.digest != look.content

    async def _store(self, key: bytes, caption: Caption, similarity: int | None) -> int:
        """Keeps a caption, then writes it for every item that waits for it; how many got it."""
        await self._ledger.finish(self._at_work[key][0], caption, similarity)
        # Who comes from here on finds it in the manifest.
        return sum([await self._deliver(look, caption) for look in self._at_work.pop(key)])

    async def _deliver(self, look: Look, caption: Caption) -> bool:
        """Writes a kept caption to the outputs; False where it failed, and that is noted."""
        try:
            await self._ledger.deliver(look, caption)
        except OutputError:
            raise
        except CaptioningError as error:
            await self._fail(look.item, look.key, "output", str(error))
            return False
        return True

    async def _fail_work(self, key: bytes, kind: str, message: str) -> None:
        """Notes a failure for every item that waits for this work."""
        for look in self._at_work.pop(key):
            if kind == CHANGED.kind:
                await self._looks.forget(look.item)
            await self._fail(look.item, key, kind, message)
        self._num_failures_in_a_row = self._num_failures_in_a_row + 1 if kind == "engine" else 0
        if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self.stop(EngineError(f"{_MAX_FAILURES_IN_A_ROW} items in a row failed, the last one so: {message}"))

    async def _fail(self, item: Item | Unreadable, key: bytes | None, kind: str, message: str) -> None:
        self.counts.num_failed += 1
        await self._ledger.fail(item, key, kind, message)

    async def _close(self) -> None:
        try:
            await self._ledger.close(complete=not isinstance(self.stopped, OutputError))
        except OutputError as error:
            self.stop(error)
