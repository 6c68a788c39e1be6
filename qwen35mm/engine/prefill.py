"""The work on one prompt before its first token: find what is cached, read the rest's media, encode, prefill.

Each `step` is a bounded piece of that work. What it computes goes into the cache segment by segment, so that work
that is broken off is not lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from qwen35mm.cache import Chain, Loaded, SequenceCache, Start
from qwen35mm.cache.policy import states_to_keep
from qwen35mm.cache.report import MissReason, Tier
from qwen35mm.engine.events import Progress
from qwen35mm.engine.request import CachedPrompt
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.vision import VisionUnit, VisionWork, needed_units
from qwen35mm.model.upload import upload
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import PreparedMedia


class Prefill:
    """Brings one prompt into a sequence's cache.

    Args:
        runtime: model, pools and caches.
        source: the prompt and its media.
        with_tail: whether what follows the last cut is computed too; a history commit leaves it.

    Attributes:
        last_hidden: [1, hidden] of the prompt's last token, once `done`; None without the tail.
        miss: why no more of the prompt was found in the cache.
    """

    def __init__(self, runtime: Runtime, source: CachedPrompt, *, with_tail: bool = True) -> None:
        self.source = source
        self.last_hidden: torch.Tensor | None = None
        self.miss: MissReason | None = None
        self._runtime = runtime
        self._chain = Chain.of(source.prompt, runtime.root, salt=source.salt, salt_from=source.salt_from)
        self._with_tail = with_tail
        self._start: Start | None = None
        self._loading: Future[Any] | None = None
        self._loaded: Loaded | None = None
        self._num_seen = 0
        self._units: list[VisionUnit] | None = None
        self._kept_features: dict[bytes, torch.Tensor] = {}
        self._media: dict[int, PreparedMedia] = {}
        self._to_read: list[int] = []
        self._vision: VisionWork | None = None
        self._token_ids: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._pieces: list[tuple[int, int, int | None]] | None = None

    @property
    def prompt(self) -> Prompt:
        return self.source.prompt

    @property
    def done(self) -> bool:
        return self._pieces is not None and not self._pieces

    @property
    def blocked(self) -> bool:
        """Whether a step would only find that a file isn't read yet."""
        return self._loading is not None and not self._loading.done()

    @property
    def cache(self) -> SequenceCache:
        """The sequence; it is this object's until `close`."""
        assert self._start is not None, "the prefill hasn't begun"
        return self._start.sequence

    @property
    def sequences(self) -> list[SequenceCache]:
        return [] if self._start is None else [self._start.sequence]

    @property
    def start(self) -> Start | None:
        """Where in the cache it began; None before."""
        return self._start

    @property
    def num_cached_tokens(self) -> int:
        return self._chain.stop(self._start.num_segments) if self._start else 0

    @property
    def tokens_from(self) -> Mapping[Tier, int]:
        return self._start.tokens_from if self._start else {}

    @property
    def num_units(self) -> tuple[int, int]:
        """Vision units that were encoded, and those whose embeddings were kept."""
        return (self._vision.num_encoded, self._vision.num_cached) if self._vision else (0, 0)

    def step(self) -> list[Progress]:
        """Does the next bit of work; [] where it waits for a file.

        Raises:
            OutOfBlocksError: no room now; the same step may be tried again.
            MediaError: a medium that is needed can't be read any more.
        """
        if not self.blocked and self._start is None:
            self._find()
        told: list[Progress] = []
        while not self.blocked and self._start is not None and self._vision is None:
            told += self._read()
        if self.blocked or self._vision is None:
            return told
        if not self._vision.finished:
            self._vision.step()
            return [*told, Progress("encode", self._vision.done, self._vision.total)]
        return [*told, self._run_piece()] if self._pieces else told

    def unpin(self) -> bool:
        """Lets the cached segments that the sequence stands on be evicted; False where it stands on none."""
        if self._start is None or not self._start.pinned:
            return False
        self._runtime.prefixes.unpin(self._start)
        return True

    def close(self) -> None:
        """Gives back everything; a second call does nothing."""
        if self._start is not None:
            self._start.sequence.free()
        self.unpin()

    def _find(self) -> None:
        """Looks up the longest cached beginning, in memory first, and begins a sequence there."""
        runtime, chain = self._runtime, self._chain
        if runtime.reuse and self._loading is None and runtime.disk is not None:
            found = runtime.prefixes.match(chain)
            if found < len(chain):
                has_kv, has_state = runtime.prefixes.held(chain)
                self._loading = runtime.disk.load(chain, has_kv, has_state, found)
                if self.blocked:
                    return
        if self._loading is not None and self._loaded is None:
            self._loaded = self._loading.result()
        if not runtime.reuse:
            self._start = Start(runtime.pools.new_sequence(), 0)
        else:
            self._start = runtime.prefixes.begin(chain, self._loaded)
            self._explain_miss()
            if self.source.retain == "shared":
                self._num_seen = runtime.prefixes.sight(chain)
        self._loading = self._loaded = None
        self._find_units()

    def _explain_miss(self) -> None:
        assert self._start is not None
        self.miss = self._runtime.prefixes.miss_reason(self._chain, self._start.num_segments)
        if self.miss == "new content" and self._start.num_segments == 0 and self._loaded and self._loaded.miss:
            self.miss = self._loaded.miss

    def _find_units(self) -> None:
        """Which vision units the rest of the prompt needs, and what is kept of them."""
        runtime = self._runtime
        plans = [medium.plan for medium in self.source.media]
        stop = len(self.prompt.token_ids) if self._with_tail else self.prompt.tail_start
        self._units = needed_units(
            self.prompt, plans, self.num_cached_tokens, stop, root=runtime.root, salt=self.source.salt
        )
        if not runtime.reuse:
            self._plan_reading()
            return
        for unit in self._units:
            features = runtime.vision.features(unit.address)
            if features is not None:
                self._kept_features[unit.address] = features
        missing = [unit.address for unit in self._units if unit.address not in self._kept_features]
        if missing and runtime.disk is not None:
            self._loading = runtime.disk.load_vision(missing)
        else:
            self._plan_reading()

    def _read(self) -> list[Progress]:
        """Waits for embeddings and pixels, one after the other, and then begins the tower's work."""
        assert self._units is not None
        if self._loading is not None:
            loading, self._loading = self._loading, None
            result = loading.result()
            if isinstance(result, PreparedMedia):
                self._media[self._to_read.pop(0)] = result
            else:
                self._keep_loaded(result)
                self._plan_reading()
        if self._to_read:
            medium = self.source.media[self._to_read[0]]
            if isinstance(medium, PreparedMedia):
                self._media[self._to_read.pop(0)] = medium
                return []
            self._loading = self._runtime.background.read(medium.load)
            return [Progress("read", len(self._media), len(self._media) + len(self._to_read))]
        runtime = self._runtime
        kept, to_keep = self._kept_features, self._worth_keeping(self._units)
        self._vision = VisionWork(runtime.model.visual, runtime.vision, self._units, kept, self._media, to_keep)
        self._media = {}
        self._token_ids = upload(self.prompt.token_ids, runtime.model.device)
        self._positions = upload(self.prompt.positions, runtime.model.device)
        self._pieces = list(self._cut())
        return []

    def _keep_loaded(self, features: Mapping[bytes, torch.Tensor]) -> None:
        config = self._runtime.model.config
        assert self._units is not None
        for unit in self._units:
            loaded = features.get(unit.address)
            shape = (unit.grid_thw.num_tokens(config.vision.spatial_merge_size), config.text.hidden_size)
            if loaded is not None and loaded.shape == shape and loaded.dtype == self._runtime.model.dtype:
                self._kept_features[unit.address] = loaded
                self._runtime.vision.keep(unit.address, loaded, is_new=False)

    def _worth_keeping(self, units: Sequence[VisionUnit]) -> frozenset[bytes]:
        """The addresses of the units whose features are kept, as the request's purpose asks for."""
        if not self._runtime.reuse or self.source.retain == "nothing":
            return frozenset()
        addresses = frozenset(unit.address for unit in units)
        return addresses if self.source.retain == "conversation" else self._runtime.vision.sight(addresses)

    def _plan_reading(self) -> None:
        assert self._units is not None
        missing = [unit.media_index for unit in self._units if unit.address not in self._kept_features]
        self._to_read = list(dict.fromkeys(missing))

    def _cut(self) -> Iterator[tuple[int, int, int | None]]:
        """What is left to run: (start, stop, the segment that ends there, if one does)."""
        assert self._start is not None
        bounds: list[tuple[int, int, int | None]] = [
            (segment.start, segment.stop, index)
            for index, segment in enumerate(self._chain.segments)
            if index >= self._start.num_segments
        ]
        if self._with_tail and self.prompt.tail_start < len(self.prompt.token_ids):
            bounds.append((self.prompt.tail_start, len(self.prompt.token_ids), None))
        size = self._runtime.piece_tokens
        for start, stop, index in bounds:
            for at in range(start, stop, size):
                yield at, min(at + size, stop), index if at + size >= stop else None

    def _run_piece(self) -> Progress:
        assert self._pieces is not None
        assert self._vision is not None
        assert self._token_ids is not None
        assert self._positions is not None
        model, prompt = self._runtime.model, self.prompt
        start, stop, segment_index = self._pieces[0]
        self.cache.prepare(stop - start)
        embeds = model.embed_tokens(self._token_ids[start:stop])
        self._vision.place(prompt, embeds, start)
        hidden = model.prefill(embeds, self._positions[:, start:stop], self.cache)
        self._pieces.pop(0)
        if segment_index is not None:
            self._publish(segment_index)
        if stop == len(prompt.token_ids):
            self.last_hidden = hidden[-1:]
            self.cache.rope_delta = prompt.rope_delta
        return Progress("prefill", stop, len(prompt.token_ids))

    def _publish(self, index: int) -> None:
        """Enters a segment that was just computed, as the request's purpose asks for."""
        runtime, chain, retain = self._runtime, self._chain, self.source.retain
        assert self._start is not None
        if not runtime.reuse or retain == "nothing":
            return
        if retain == "shared":
            if index < self._num_seen:
                keep = index == self._num_seen - 1 or chain.segments[index].stop == self.prompt.system_stop
                runtime.prefixes.publish(chain, index, self.cache, self._start, keep_state=keep)
            return
        kept = states_to_keep(chain.segments, system_stop=self.prompt.system_stop)
        # The newest state stays until the next one is there: work that is broken off goes on from its last cut.
        runtime.prefixes.publish(chain, index, self.cache, self._start, keep_state=True)
        if index == len(chain) - 1:
            runtime.prefixes.thin(chain, kept)
        elif index > self._start.num_segments and index - 1 not in kept:
            runtime.prefixes.drop_state(chain, index - 1)
