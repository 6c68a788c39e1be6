"""One prompt's work before its first token: look up the cache, read missing media, encode them, prefill.

Computed segments enter the cache one by one, so interrupted work isn't lost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from qwen35mm.cache import Chain, EvictedRows, OutOfBlocksError, SequenceCache, Start
from qwen35mm.cache.gates import GatedScores
from qwen35mm.cache.placement import moved
from qwen35mm.cache.policy import states_to_keep
from qwen35mm.contract import CacheReport, Progress, PromptRead
from qwen35mm.engine.pieces import by_layers
from qwen35mm.engine.reading import PromptReader, Reading
from qwen35mm.engine.request import CachedPrompt
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.schedule import work
from qwen35mm.engine.settings import chunk_tokens_at, pauses_in_chunks
from qwen35mm.engine.vision import UNIT_TEMPORAL_PATCHES, VisionUnit, VisionUnits, needed_units, place
from qwen35mm.model import Batch
from qwen35mm.model.batch import Watch
from qwen35mm_preprocess import PreparedMedia

T = TypeVar("T")


class Pause:
    """A step's end between two layers of a chunk, or before the vision tower."""


# What work yields: its progress, a pause, an error if there is no room (then tried again), or None while it waits for
# a file.
Work = Generator[Progress | Pause | OutOfBlocksError | None, None, T]


class Prefill:
    """Prefills one prompt into a sequence's cache.

    Args:
        runtime: model, pools and caches.
        source: the prompt and its media.
        with_tail: whether to compute the tail after the last cut, too; a history commit doesn't.
        reading: what to read of the prompt's own tokens; cached segments are used up to the first token that is read.
        watch: sees the attention layers of every chunk; see `Batch`. By default the gates do, where there are any.

    Attributes:
        start: what the cache gave; None until it has answered.
        last_hidden: [1, hidden], the last token's hidden state, once `done`; None without the tail.
        in_tower: whether a unit is in the vision tower, whose memory is planned for one.
        spent: the work done so far; see `schedule.work`.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: CachedPrompt,
        *,
        with_tail: bool = True,
        reading: Reading | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.source = source
        self.done = False
        self.start: Start | None = None
        self.last_hidden: torch.Tensor | None = None
        self._runtime = runtime
        self._prompt = source.prompt
        self._root, self._adapters = runtime.root_of(source.adapter), runtime.groups_of(source.adapter)
        salt = {"salt": source.salt, "salt_from": source.salt_from}
        self._chain = Chain.of(source.prompt, self._root, **salt, keep=runtime.kv_keep)
        self._stop = len(source.prompt.token_ids) if with_tail else source.prompt.tail_start
        self._reader: PromptReader | None = None
        if reading is not None:
            self._reader = PromptReader(reading, source.prompt, runtime.loaded, runtime.check_numbers)
        self._keeps = runtime.reuse and source.retain != "nothing"
        self._on_disk = source.retain not in ("memory", "prompt")
        self._created_s = time.monotonic()
        self._num_cached_units = self._num_encoded_units = 0
        self._gated = None if runtime.gates is None else GatedScores(runtime.gates)
        self._watch = watch or self._gated
        self._reading: Future[Any] | None = None
        self.in_tower = False
        self.spent = 0.0
        # The work in all, and its part in the vision tower: known once the cache has answered.
        self._total, self._num_patches = 0.0, 0
        # The segment that is computed now, and how many of the first ones enter the cache.
        self._segment_index = self._num_published = 0
        self._work = self._run()

    @property
    def blocked(self) -> bool:
        """Whether it waits for a file to be read."""
        return self._reading is not None and not self._reading.done()

    @property
    def cache(self) -> SequenceCache:
        """The sequence; this object owns it until `close`."""
        assert self.start is not None, "the prefill hasn't begun"
        return self.start.sequence

    @property
    def needs_tower(self) -> bool:
        """Whether it has units to encode."""
        return self._num_patches > 0

    @property
    def left(self) -> float:
        """The work until the last token. Before the cache has answered, what is in memory counts as cached."""
        if self.start is not None:
            return max(self._total - self.spent, 0.0)
        return self._work_after(self._chain.stop(self._num_matched()))

    def waits_for(self, other: Prefill) -> bool:
        """Whether this prompt hasn't begun and would first compute a segment that `other` is about to cache."""
        if self.start is not None or other.start is None or other.blocked:
            return False
        index = self._num_matched()
        is_to_come = other._segment_index <= index < min(other._num_published, len(self._chain))
        return is_to_come and other._chain.addresses[index] == self._chain.addresses[index]

    def _num_matched(self) -> int:
        return self._runtime.prefixes.match(self._usable) if self._runtime.reuse else 0

    def _work_after(self, num_cached: int) -> float:
        """The work after the cached tokens, if no embeddings are cached."""
        spans = [span for span in self._prompt.spans if num_cached <= span.start < self._stop]
        per_token = self._runtime.model.config.spatial_merge_size**2 if spans else 0
        patches = sum(span.stop - span.start for span in spans) * per_token
        return work(num_cached, self._stop) + patches

    def step(self) -> list[Progress]:
        """Does a bounded unit of work: some vision layers, a chunk, or on a CPU one layer of it.

        Returns [] between the layers of a chunk, and while it waits for a file.

        Raises:
            OutOfBlocksError: no room now; the step can be tried again.
            MediaError: a required medium can't be read any more.
        """
        told: list[Progress] = []
        while not (self.done or self.blocked):
            found = next(self._work)
            if isinstance(found, OutOfBlocksError):
                try:
                    raise found
                finally:
                    del found  # else the error and its traceback form a cycle that keeps us in memory
            if isinstance(found, Pause):
                break
            if found is not None:
                told.append(found)
                if found.phase != "read":
                    break
        if self.done:
            self._work.close()  # frees hidden states and pixels: the reply may take long
            self.source = self.source.without_pixels()
        return told

    def unpin(self) -> bool:
        """Allows eviction of the cached segments that the sequence uses; False if it uses none."""
        if self.start is None or not self.start.pinned:
            return False
        self._runtime.prefixes.unpin(self.start)
        return True

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        # An unfinished generator and this object refer to each other: pixels would stay until garbage collection.
        self._work.close()
        if self.start is not None:
            self.start.sequence.free()
        self.unpin()

    def read(self) -> PromptRead | None:
        """What was read of the prompt, once `done`; None if nothing was requested."""
        return None if self._reader is None else self._reader.result(self.report(time.monotonic(), 0.0, 0))

    def report(self, first_token_s: float | None, decode_s: float, cache_bytes: int) -> CacheReport:
        """The cache's report on a reply.

        Args:
            first_token_s: on the clock of `time.monotonic`; None if there was no token.
        """
        assert self.start is not None
        num_cached = self._chain.stop(self.start.num_segments)
        return CacheReport(
            num_cached_tokens=num_cached,
            cached_from=dict(self.start.tokens_from),
            num_prefilled_tokens=len(self._prompt.token_ids) - num_cached,
            num_evicted_tokens=self.start.sequence.num_evicted,
            miss=self.start.miss,
            num_encoded_units=self._num_encoded_units,
            num_cached_units=self._num_cached_units,
            prefill_s=0.0 if first_token_s is None else first_token_s - self._created_s,
            decode_s=decode_s,
            cache_bytes=cache_bytes,
        )

    def _run(self) -> Work[None]:
        self.start = start = yield from self._begin()
        keeps_shared = self._keeps and self.source.retain == "shared"
        num_seen = self._runtime.prefixes.sight(self._chain) if keeps_shared else 0
        plans = [medium.plan for medium in self.source.media]
        first, root, salt = self._chain.stop(start.num_segments), self._root, self.source.salt
        units = needed_units(self._prompt, plans, first, self._stop, root=root, salt=salt)
        features = yield from self._find_features(list(units.values()))
        missing = [unit for unit in units.values() if unit.address not in features]
        self._num_cached_units, self._num_encoded_units = len(units) - len(missing), len(missing)
        self._num_patches = sum(unit.grid_thw.num_patches for unit in missing)
        self._total = work(first, self._stop) + self._num_patches
        self._segment_index = start.num_segments
        if self._keeps:
            self._num_published = num_seen if keeps_shared else len(self._chain)
        if missing:
            yield Pause()  # another prompt's unit may be in the tower
        features |= yield from self._encode(missing, self._worth_keeping(units))
        yield from self._run_chunks(start, units, features, num_seen)
        self.done = True
        # Ends the step if nothing was left to run.
        yield None

    def _result(self, future: Future[T]) -> Work[T]:
        self._reading = future
        while not future.done():
            yield None
        self._reading = None
        return future.result()

    def _with_room(self, attempt: Callable[[], T]) -> Work[T]:
        """Retries a call that takes blocks until it succeeds."""
        while True:
            try:
                return attempt()
            except OutOfBlocksError as error:
                yield error

    @functools.cached_property
    def _usable(self) -> Chain:
        """The segments that needn't be computed even if they are cached."""
        return self._chain if self._reader is None else self._chain.up_to(self._reader.first_row)

    def _begin(self) -> Work[Start]:
        """Looks up the longest cached prefix, in memory first, and begins a sequence with it."""
        runtime, chain = self._runtime, self._usable
        if not runtime.reuse:
            return Start(runtime.pools.new_sequence(), 0)
        loading = runtime.prefixes.load(chain)
        loaded = None if loading is None else (yield from self._result(loading))
        return (yield from self._with_room(lambda: runtime.prefixes.begin(chain, loaded)))

    def _find_features(self, units: Sequence[VisionUnit]) -> Work[dict[bytes, torch.Tensor]]:
        """The units' cached embeddings, from memory or disk, by address."""
        runtime = self._runtime
        if not (runtime.reuse and units):
            return {}
        device = runtime.model.tower.device
        kept = {unit.address: runtime.vision.features(unit.address) for unit in units}
        found = {address: moved(features, device) for address, features in kept.items() if features is not None}
        missing = [unit for unit in units if unit.address not in found]
        if not missing or runtime.disk is None:
            return found
        loaded = yield from self._result(runtime.disk.load_vision([unit.address for unit in missing]))
        config, dtype = runtime.model.config, runtime.model.dtype
        for unit in missing:
            features = loaded.get(unit.address)
            shape = (unit.grid_thw.num_tokens(config.spatial_merge_size), config.text.hidden_size)
            if features is not None and features.shape == shape and features.dtype == dtype:
                found[unit.address] = moved(features, device)
                runtime.vision.keep(unit.address, features, is_new=False)
        return found

    def _worth_keeping(self, units: VisionUnits) -> frozenset[bytes]:
        """The addresses of units whose embeddings the cache keeps, by the request's `retain`."""
        addresses = frozenset(unit.address for unit in units.values()) if self._keeps else frozenset()
        return self._runtime.vision.sight(addresses) if self.source.retain == "shared" else addresses

    def _encode(self, units: Sequence[VisionUnit], worth_keeping: frozenset[bytes]) -> Work[dict[bytes, torch.Tensor]]:
        """Encodes the units that aren't cached; their embeddings by address."""
        runtime, found = self._runtime, {}
        indices = list(dict.fromkeys(unit.media_index for unit in units))
        medium: PreparedMedia | None = None
        for index, unit in enumerate(units):
            tower = runtime.model.tower
            if medium is None:
                medium = yield from self._read(unit.media_index, indices)
            encoding, num_run, self.in_tower = runtime.tower.encode(unit, medium, self._adapters), 0, True
            if unit.media_index not in [following.media_index for following in units[index + 1 : index + 2]]:
                medium = None  # keep one medium's pixels at a time
            for num_layers, features in encoding:
                self.spent += unit.grid_thw.num_patches * (num_layers - num_run) / tower.config.depth
                num_run = num_layers
                if features is not None:
                    self.in_tower, self._num_patches = False, self._num_patches - unit.grid_thw.num_patches
                    found[unit.address] = features
                    if unit.address in worth_keeping:
                        runtime.vision.keep(unit.address, features, is_new=self._on_disk)
                yield Progress("encode", index * tower.config.depth + num_layers, len(units) * tower.config.depth)
        return found

    def _read(self, media_index: int, indices: Sequence[int]) -> Work[PreparedMedia]:
        """A medium with its pixels; `indices` are all media to read."""
        medium = self.source.media[media_index]
        if isinstance(medium, PreparedMedia):
            return medium
        future = self._runtime.reader.submit(medium.load)
        yield Progress("read", indices.index(media_index), len(indices))
        return (yield from self._result(future))

    def _run_chunks(
        self, start: Start, units: VisionUnits, features: dict[bytes, torch.Tensor], num_seen: int
    ) -> Work[None]:
        """Prefills the rest of the prompt.

        Args:
            features: by address; each is dropped after its last token.
            num_seen: how many of the first segments an earlier request with `retain` "shared" asked for.
        """
        model, pieces, prompt, cache = self._runtime.model, self._runtime.pieces, self._prompt, start.sequence
        num_tokens = len(prompt.token_ids)
        used_until = {
            unit.address: span.stop
            for span in prompt.spans
            if (unit := units.get((span.media_index, span.unit_index // UNIT_TEMPORAL_PATCHES))) is not None
        }
        # The state of the last place, for the MTP layer; a cache hit doesn't know it, so a segment begins without.
        before: torch.Tensor | None = None
        for begin, stop, segment_index in self._chunks(start.num_segments):
            yield from self._with_room(lambda size=stop - begin: cache.prepare(size))
            inputs = pieces.inputs(cache, prompt.token_ids[begin:stop], prompt.positions[:, begin:stop])
            # What is read or watched must hold longer than until another prompt's piece.
            is_seen = self._reader is not None or self._watch is not None
            graph = None if is_seen else pieces.graph(inputs.num_rows, self._adapters)
            inputs = inputs.to(model.device) if graph is None else graph.take(inputs)
            embeds = model.embed_tokens(inputs.token_ids)
            place(prompt, units, features, embeds[: stop - begin], begin)
            for address in [each for each in features if used_until[each] <= stop]:
                del features[address]
            if graph is None:
                batch = inputs.batch(cache, embeds, self._adapters, self._watch)
                hidden = yield from self._run_layers(batch, begin, stop, before)
                del batch
            else:
                hidden = graph.run(embeds, before)
                self.spent += work(begin, stop)
            hidden = hidden[: stop - begin]
            before = hidden[-1:].clone() if segment_index is None else None
            cache.advance(stop - begin)
            if segment_index is not None:
                self._runtime.pools.states.round_to_kept(cache.slot)
                rows = EvictedRows.of(prompt, segment_index, self._runtime.kv_keep)
                scores = {} if self._gated is None else self._gated.take()
                if rows is not None:
                    cache.evict(rows, scores)
                if self._keeps:
                    self._publish(start, segment_index, num_seen)
                self._segment_index = segment_index + 1
            for _ in () if self._reader is None else self._reader.take(hidden, begin):
                yield Progress("prefill", stop, num_tokens)
            if stop == num_tokens:
                self.last_hidden = hidden[-1:].clone()  # a view would keep all of them
                cache.rope_delta = prompt.rope_delta
            self.done = stop == self._stop
            del inputs, embeds, hidden
            yield Progress("prefill", stop, num_tokens)

    def _run_layers(self, batch: Batch, begin: int, stop: int, before: torch.Tensor | None) -> Work[torch.Tensor]:
        """Runs one chunk; the device decides whether steps end between its layers.

        Args:
            before: [1, hidden], the state of the place before the chunk; None at a segment's start.
        """
        model = self._runtime.model
        pauses, per_layer = pauses_in_chunks(model.device), work(begin, stop) / model.num_parts
        hidden = None
        for hidden in by_layers(model, batch, before):
            self.spent += per_layer
            if pauses and hidden is None:
                yield Pause()
        assert hidden is not None
        return hidden

    def _chunks(self, num_segments: int) -> Iterator[tuple[int, int, int | None]]:
        """The chunks after the first segments: (start, stop, the index of the segment that ends there or None)."""
        segments = list(enumerate(self._chain.segments))[num_segments:]
        bounds: list[tuple[int, int, int | None]] = [(each.start, each.stop, index) for index, each in segments]
        if self._prompt.tail_start < self._stop:
            bounds.append((self._prompt.tail_start, self._stop, None))
        for start, stop, index in bounds:
            size = chunk_tokens_at(start, self._runtime.chunk_tokens, self._runtime.model.device)
            for at in range(start, stop, size):
                yield at, min(at + size, stop), index if at + size >= stop else None

    @functools.cached_property
    def _kept_states(self) -> frozenset[int]:
        return states_to_keep(self._chain.segments, system_stop=self._prompt.system_stop)

    def _publish(self, start: Start, index: int, num_seen: int) -> None:
        """Enters a computed segment in the cache, by the request's `retain`."""
        prefixes, chain, system_stop = self._runtime.prefixes, self._chain, self._prompt.system_stop
        if self.source.retain == "shared":
            if index < num_seen:
                keep = index == num_seen - 1 or chain.segments[index].stop == system_stop
                prefixes.publish(chain, index, start.sequence, start, keep_state=keep)
            return
        kept = self._kept_states
        # Keep the newest state until the next one: interrupted work resumes at its last cut.
        prefixes.publish(chain, index, start.sequence, start, keep_state=True, on_disk=self._on_disk)
        if index == len(chain) - 1:
            prefixes.thin(chain, kept)
        elif index > start.num_segments and index - 1 not in kept:
            prefixes.drop_state(chain, index - 1)
