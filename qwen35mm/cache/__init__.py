"""The hybrid cache: KV blocks and recurrent states of running sequences, and cached ones of finished sequences."""

from qwen35mm.cache.chain import Chain
from qwen35mm.cache.disk import DiskStore
from qwen35mm.cache.disk_tier import DiskTier, Loaded
from qwen35mm.cache.eviction import EvictedRows
from qwen35mm.cache.kv_pool import KVBlockPool, OutOfBlocksError
from qwen35mm.cache.planner import CacheSettings, MemoryPlan, plan_memory
from qwen35mm.cache.prefix_cache import PrefixCache, Start
from qwen35mm.cache.sequence import CachePools, SequenceCache
from qwen35mm.cache.state_pool import OutOfSlotsError, StatePool
from qwen35mm.cache.tensor_store import VisionCache

__all__ = [
    "CachePools",
    "CacheSettings",
    "Chain",
    "DiskStore",
    "DiskTier",
    "EvictedRows",
    "KVBlockPool",
    "Loaded",
    "MemoryPlan",
    "OutOfBlocksError",
    "OutOfSlotsError",
    "PrefixCache",
    "SequenceCache",
    "Start",
    "StatePool",
    "VisionCache",
    "plan_memory",
]
