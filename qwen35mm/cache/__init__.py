"""The hybrid cache: KV blocks for the full-attention layers, conv and recurrent states for the others."""

from qwen35mm.cache.kv_pool import KVBlockPool, OutOfBlocksError
from qwen35mm.cache.pools import CachePools
from qwen35mm.cache.sequence import SequenceCache
from qwen35mm.cache.state_pool import OutOfSlotsError, StatePool

__all__ = ["CachePools", "KVBlockPool", "OutOfBlocksError", "OutOfSlotsError", "SequenceCache", "StatePool"]
