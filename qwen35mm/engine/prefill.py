"""The work on one prompt before its first token: find what is cached, read the rest's media, encode, prefill.

What it computes goes into the cache segment by segment, so that work that is broken off is not lost.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from qwen35mm.cache import Chain, OutOfBlocksError, SequenceCache, Start
from qwen35mm.cache.policy import states_to_keep
from qwen35mm.cache.report import MissReason, Tier
from qwen35mm.engine.batches import prefill_batch, upload
from qwen35mm.engine.events import Progress
from qwen35mm.engine.request import CachedPrompt
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.vision import VisionUnit, VisionWork, needed_units
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import PreparedMedia

T = TypeVar("T")
# What a piece of work comes to: how far it is, that there is no room for it (it is tried again), or None: it waits for
# a file.
Work = Generator[Progress | OutOfBlocksError | None, None, T]


class Prefill:
    """Brings one prompt into a sequence's cache.

    Args:
        runtime: model, pools and caches.
        source: the prompt and its media.
        with_tail: whether what follows the last cut is computed too; a history commit leaves it.

    Attributes:
        start: where in the cache it began; None before.
        vision: the tower's work, once it is known.
        last_hidden: [1, hidden] of the prompt's last token, once `done`; None without the tail.
    """

    def __init__(self, runtime: Runtime, source: CachedPrompt, *, with_tail: bool = True) -> None:
        self.source = source
        self.done = False
        self.start: Start | None = None
        self.vision: VisionWork | None = None
        self.last_hidden: torch.Tensor | None = None
        self._runtime = runtime
        self._chain = Chain.of(source.prompt, runtime.root, salt=source.salt, salt_from=source.salt_from)
        self._stop = len(source.prompt.token_ids) if with_tail else source.prompt.tail_start
        self._reading: Future[Any] | None = None
        self._work = self._run()

    @property
    def prompt(self) -> Prompt:
        return self.source.prompt

    @property
    def blocked(self) -> bool:
        """Whether a step would only find that a file isn't read yet."""
        return self._reading is not None and not self._reading.done()

    @property
    def cache(self) -> SequenceCache:
        """The sequence; it is this object's until `close`."""
        assert self.start is not None, "the prefill hasn't begun"
        return self.start.sequence

    @property
    def num_cached_tokens(self) -> int:
        return self._chain.stop(self.start.num_segments) if self.start else 0

    @property
    def tokens_from(self) -> Mapping[Tier, int]:
        return self.start.tokens_from if self.start else {}

    @property
    def miss(self) -> MissReason | None:
        """Why no more of the prompt was found in the cache."""
        return self.start.miss if self.start else None

    def step(self) -> list[Progress]:
        """Does a bounded piece of work: some vision layers, or one piece of the prompt; [] where it waits for a file.

        Raises:
            OutOfBlocksError: no room now; the same step may be tried again.
            MediaError: a medium that is needed can't be read any more.
        """
        told: list[Progress] = []
        while not (self.done or self.blocked):
            try:
                found = next(self._work)
            except StopIteration:
                break
            if isinstance(found, OutOfBlocksError):
                raise found
            if found is not None:
                told.append(found)
                if found.phase != "read":
                    break
        return told

    def unpin(self) -> bool:
        """Lets the cached segments that the sequence stands on be evicted; False where it stands on none."""
        if self.start is None or not self.start.pinned:
            return False
        self._runtime.prefixes.unpin(self.start)
        return True

    def close(self) -> None:
        """Gives back everything; a second call does nothing."""
        if self.start is not None:
            self.start.sequence.free()
        self.unpin()

    def _run(self) -> Work[None]:
        self.start = yield from self._begin()
        keeps_shared = self._runtime.reuse and self.source.retain == "shared"
        num_seen = self._runtime.prefixes.sight(self._chain) if keeps_shared else 0
        units = self._needed_units()
        kept = yield from self._find_features(units)
        media = yield from self._read_media(units, kept)
        self.vision = vision = self._encoding(units, kept, media)
        while not vision.finished:
            vision.step()
            yield Progress("encode", vision.done, vision.total)
        yield from self._run_pieces(vision, num_seen)

    def _result(self, future: Future[T]) -> Work[T]:
        self._reading = future
        while not future.done():
            yield None
        self._reading = None
        return future.result()

    def _begin(self) -> Work[Start]:
        """Looks up the longest cached beginning, in memory first, and begins a sequence there."""
        runtime, chain = self._runtime, self._chain
        if not runtime.reuse:
            return Start(runtime.pools.new_sequence(), 0)
        loading = runtime.prefixes.load(chain)
        loaded = None if loading is None else (yield from self._result(loading))
        while True:
            try:
                start = runtime.prefixes.begin(chain, loaded)
                break
            except OutOfBlocksError as error:
                yield error
        return start

    def _needed_units(self) -> list[VisionUnit]:
        """The vision units of what is to be computed."""
        plans = [medium.plan for medium in self.source.media]
        root, salt = self._runtime.root, self.source.salt
        return needed_units(self.prompt, plans, self.num_cached_tokens, self._stop, root=root, salt=salt)

    def _find_features(self, units: Sequence[VisionUnit]) -> Work[dict[bytes, torch.Tensor]]:
        """The units' embeddings that are kept, in memory or on the disk, by address."""
        runtime = self._runtime
        if not runtime.reuse:
            return {}
        kept = {unit.address: runtime.vision.features(unit.address) for unit in units}
        kept = {address: features for address, features in kept.items() if features is not None}
        missing = [unit for unit in units if unit.address not in kept]
        if not missing or runtime.disk is None:
            return kept
        loaded = yield from self._result(runtime.disk.load_vision([unit.address for unit in missing]))
        config, dtype = runtime.model.config, runtime.model.dtype
        for unit in missing:
            features = loaded.get(unit.address)
            shape = (unit.grid_thw.num_tokens(config.vision.spatial_merge_size), config.text.hidden_size)
            if features is not None and features.shape == shape and features.dtype == dtype:
                kept[unit.address] = features
                runtime.vision.keep(unit.address, features, is_new=False)
        return kept

    def _read_media(
        self, units: Sequence[VisionUnit], kept: Mapping[bytes, torch.Tensor]
    ) -> Work[dict[int, PreparedMedia]]:
        """The pixels that units without kept embeddings are made of, by medium."""
        indices = list(dict.fromkeys(unit.media_index for unit in units if unit.address not in kept))
        media: dict[int, PreparedMedia] = {}
        for index in indices:
            medium = self.source.media[index]
            if not isinstance(medium, PreparedMedia):
                future = self._runtime.background.read(medium.load)
                yield Progress("read", len(media), len(indices))
                medium = yield from self._result(future)
            media[index] = medium
        return media

    def _encoding(
        self, units: Sequence[VisionUnit], kept: Mapping[bytes, torch.Tensor], media: Mapping[int, PreparedMedia]
    ) -> VisionWork:
        """The tower's work; its embeddings are kept as the request's purpose asks for."""
        runtime, to_keep = self._runtime, frozenset(unit.address for unit in units)
        if not runtime.reuse or self.source.retain == "nothing":
            to_keep = frozenset()
        elif self.source.retain == "shared":
            to_keep = runtime.vision.sight(to_keep)
        return VisionWork(runtime.model.visual, runtime.vision, units, kept, media, to_keep)

    def _run_pieces(self, vision: VisionWork, num_seen: int) -> Work[None]:
        model, prompt, cache = self._runtime.model, self.prompt, self.cache
        token_ids, positions = upload(prompt.token_ids, model.device), upload(prompt.positions, model.device)
        for start, stop, segment_index in self._pieces():
            while True:
                try:
                    cache.prepare(stop - start)
                    break
                except OutOfBlocksError as error:
                    yield error
            embeds = model.embed_tokens(token_ids[start:stop])
            vision.place(prompt, embeds, start)
            hidden = model(prefill_batch(cache, embeds, positions[:, start:stop]))
            cache.advance(stop - start)
            if segment_index is not None:
                self._publish(segment_index, num_seen)
            if stop == len(prompt.token_ids):
                self.last_hidden = hidden[-1:]
                cache.rope_delta = prompt.rope_delta
            self.done = stop == self._stop
            yield Progress("prefill", stop, len(prompt.token_ids))
        self.done = True

    def _pieces(self) -> Iterator[tuple[int, int, int | None]]:
        """What is left to run: (start, stop, the segment that ends there, if one does)."""
        assert self.start is not None
        segments = list(enumerate(self._chain.segments))[self.start.num_segments :]
        bounds: list[tuple[int, int, int | None]] = [(each.start, each.stop, index) for index, each in segments]
        if self.prompt.tail_start < self._stop:
            bounds.append((self.prompt.tail_start, self._stop, None))
        size = self._runtime.piece_tokens
        for start, stop, index in bounds:
            for at in range(start, stop, size):
                yield at, min(at + size, stop), index if at + size >= stop else None

    def _publish(self, index: int, num_seen: int) -> None:
        """Enters a segment that was just computed, as the request's purpose asks for.

        Args:
            num_seen: how many of the first segments were asked for before.
        """
        runtime, chain, retain = self._runtime, self._chain, self.source.retain
        assert self.start is not None
        if not runtime.reuse or retain == "nothing":
            return
        if retain == "shared":
            if index < num_seen:
                keep = index == num_seen - 1 or chain.segments[index].stop == self.prompt.system_stop
                runtime.prefixes.publish(chain, index, self.cache, self.start, keep_state=keep)
            return
        kept = states_to_keep(chain.segments, system_stop=self.prompt.system_stop)
        # The newest state stays until the next one is there: work that is broken off goes on from its last cut.
        runtime.prefixes.publish(chain, index, self.cache, self.start, keep_state=True)
        if index == len(chain) - 1:
            runtime.prefixes.thin(chain, kept)
        elif index > self.start.num_segments and index - 1 not in kept:
            runtime.prefixes.drop_state(chain, index - 1)
