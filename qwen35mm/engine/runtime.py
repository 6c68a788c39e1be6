"""What an engine's requests share: the model, the pools, the caches and the file reader."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from qwen35mm.cache import (
    CachePools,
    CacheSettings,
    DiskStore,
    DiskTier,
    PrefixCache,
    VisionCache,
)
from qwen35mm.cache.fingerprint import arithmetic, fingerprint
from qwen35mm.cache.gates import KVGates, find_gates
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.cache.placement import mib
from qwen35mm.cache.planner import STARTED_BYTES
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.engine.memory import plan_engine
from qwen35mm.engine.pieces import Pieces
from qwen35mm.engine.request import damage
from qwen35mm.engine.settings import EngineSettings
from qwen35mm.engine.tower import Tower
from qwen35mm.engine.vision import UNIT_TEMPORAL_PATCHES
from qwen35mm.errors import EngineError
from qwen35mm.folders import user_folder
from qwen35mm.model import LoadedModel
from qwen35mm.model.adapters import Groups
from qwen35mm.model.devices import keep_sums_exact
from qwen35mm.model.weights import loaded_bytes
from qwen35mm_kernels.kv_formats import KVFormats
from qwen35mm_preprocess import MediaBudget
from qwen35mm_preprocess.say import Said, english, say

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs each call at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Runtime:
    """Plans an engine's memory and makes its pools.

    Attributes:
        root: the fingerprint from which all addresses are derived.
        reuse: whether the cache keeps anything after a request.
        cache_settings: among others, the types of cached keys, values and states.
        kv_keep: how many keys and values a finished segment keeps.
        gates: help to choose which ones; None where all are kept, or the keys alone decide.
        pieces: run prompts.
        tower: the vision tower, as units are encoded.
        slots: concurrent requests; the pools have one more slot, for history commits, and some for drafts.

    Raises:
        ConfigError: the context is longer than the model's positions, memory can't hold one sequence, or the cache's
            folder isn't usable.
        CheckpointError: the gates aren't usable.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings,
        cache: CacheSettings,
        *,
        reader: Executor,
        writer: Executor,
        budget: MediaBudget,
    ) -> None:
        config, model = loaded.config, loaded.model
        keep_sums_exact(model.layer_devices)
        self.loaded, self.model, self.tower = loaded, model, Tower(model)
        self.context_length = settings.context_length_of(config.text)
        self.chunk_tokens = settings.chunk_tokens_on(model.device)
        self.slots = settings.slots
        self.reuse, self.cache_settings, self.kv_keep = cache.reuse, cache, cache.keep
        self.reader = reader
        # Before memory is taken, so that an unusable file fails at once.
        self.gates = _gates(loaded, cache)
        self.plan = plan = plan_engine(
            config,
            dtype=model.dtype,
            device=model.layer_devices,
            settings=settings,
            cache=cache,
            budget=budget,
            weights_bytes=loaded_bytes(model),
            runtime_bytes=STARTED_BYTES,
        )
        logger.info("%s", plan.describe())
        self.pools = CachePools(
            config,
            num_slots=settings.slots + 1,
            num_spare=plan.num_drafts,
            num_tokens=plan.num_kv_tokens,
            dtype=model.dtype,
            device=model.layer_devices,
            kv_formats=cache.kv_formats(model.dtype),
            kept_states=cache.kept_dtype,
            kv_directory=cache.kv_directory,
        )
        if cache.kv_directory is not None:
            logger.warning(
                "Keys and values of %s tokens lie in a file of %s in %s: slower where the memory that is left "
                "doesn't hold them.",
                f"{plan.num_kv_tokens:,}",
                mib(plan.kv_bytes),
                cache.kv_directory,
            )
        self.pieces = Pieces(model, self.pools, plan.context_rows, self.chunk_tokens)
        self.disk: DiskTier | None = None
        self.root = secrets.token_bytes(32)
        if cache.directory is not None and cache.reuse:
            # Before the weights are hashed, so that an unusable folder fails at once.
            store = DiskStore(cache.directory, max_bytes=cache.disk_bytes)
            self.root = _root(loaded, self.chunk_tokens, self.pools.kv.formats, cache, self.gates)
            self.disk = DiskTier(store, self.root, self.pools, reader=reader, writer=writer)
        self.prefixes = PrefixCache(
            self.pools,
            state_bytes=plan.state_bytes - plan.draft_bytes,
            device_state_bytes=plan.device_state_bytes,
            host_kv_bytes=plan.host_kv_bytes,
            disk=self.disk,
        )
        self.vision = VisionCache(max_bytes=plan.vision_bytes, disk=self.disk)

    @property
    def needs_offload(self) -> bool:
        """Whether new cache entries exist on the device only."""
        return self.vision.needs_offload or self.prefixes.states.needs_offload

    def root_of(self, adapter: str | None) -> bytes:
        """The root for requests with an adapter."""
        if adapter is None:
            return self.root
        return hashlib.sha256(self.root + bytes.fromhex(self.loaded.named_adapters[adapter].digest)).digest()

    def groups_of(self, adapter: str | None) -> Groups:
        """The rows of a pass that is one request's."""
        return self.model.routes.groups_of([self.loaded.adapter_number(adapter)])

    def relieve(self) -> bool:
        """After a GPU ran out of memory: moves its cached states to the host; False if there are none."""
        states = self.prefixes.states
        if not states.num_on_device:
            return False
        logger.warning("the GPU is out of memory: %d kept states leave it for host memory", states.num_on_device)
        states.leave_device()
        return True

    def check_numbers(self, logits: torch.Tensor) -> None:
        """Checks logits: NaN or infinity would silently choose some token.

        Raises:
            EngineError: they hold NaN, or infinity.
        """
        # Ten times as fast as a check of each value.
        if not float(logits.sum()) < math.inf:
            logger.error("the model's logits are not finite; its checkpoint: %s", english(self._damage))
            raise EngineError(say("The model computed values that are not finite. {damage}", damage=self._damage))

    @functools.cached_property
    def _damage(self) -> Said:
        return damage(self.loaded.path, self.loaded.config.quantization)

    def memory_use(self) -> dict[str, int]:
        """Bytes in use, and their budgets: `kv`, `states`, `vision`, each with `_bytes` and `_budget_bytes`.

        Only reads counters: any thread may call it.
        """
        kv = self.pools.kv
        return {
            "kv_bytes": (kv.allocator.num_blocks - kv.allocator.num_free) * kv.block_bytes,
            "kv_budget_bytes": self.plan.kv_bytes,
            "states_bytes": self.prefixes.states.num_bytes,
            "states_budget_bytes": self.plan.state_bytes - self.plan.draft_bytes,
            "vision_bytes": self.vision.num_bytes,
            "vision_budget_bytes": self.plan.vision_bytes,
        }


def _gates(loaded: LoadedModel, cache: CacheSettings) -> KVGates | None:
    """The gates of the model's attention layers, beside them. Raises CheckpointError."""
    if not cache.keep.evicts:
        return None
    found = find_gates(loaded.path, cache.kv_gates, loaded.config.text, _memo(cache))
    return None if found is None else found.on(loaded.model.layer_devices)


def _memo(cache: CacheSettings) -> Path | None:
    """Where digests of weights are remembered: as quantised ones, also for who keeps nothing else on disk."""
    folder = cache.directory or (user_folder("cache") if cache.keep_weights else None)
    return None if folder is None else folder / "weights"


def _root(
    loaded: LoadedModel, chunk_tokens: int, kv_formats: KVFormats, cache: CacheSettings, gates: KVGates | None
) -> bytes:
    """The fingerprint of all that decides a cached segment's bits, except its tokens."""
    model = loaded.model
    return fingerprint(
        {
            "weights": weights_digest(loaded.path, _memo(cache)),
            "adapters": [each.digest for each in loaded.adapters],
            "weights_format": loaded.weights,
            "arithmetic": arithmetic(model.layer_devices, model.dtype),
            "block_size": DEFAULT_BLOCK_SIZE,
            "chunk_tokens": chunk_tokens,
            "kv": [format.name for format in kv_formats],
            "kv_keep": str(cache.keep),
            "kv_gates": None if gates is None else gates.digest,
            "kept_states": cache.kept_states,
            "mtp": loaded.config.text.runs_mtp,
            "rope": asdict(loaded.config.text.rope),
            "vision_unit": UNIT_TEMPORAL_PATCHES,
            "image_processing": loaded.image_processing.fingerprint(),
            "video_processing": loaded.video_processing.fingerprint(),
        }
    )
