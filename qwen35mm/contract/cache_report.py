"""What the cache did for one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["device", "host", "disk"]
MissReason = Literal["new content", "evicted", "different media", "other model"]


@dataclass(frozen=True)
class CacheReport:
    """How much of a prompt came from the cache, and what the rest cost.

    Attributes:
        num_cached_tokens: prompt tokens that weren't computed; `cached_from` counts them by tier.
        num_prefilled_tokens: prompt tokens that were computed.
        num_evicted_tokens: prompt tokens whose keys and values are not kept any more (`CacheSettings.kv_keep`).
        miss: why no more was found; None if only the prompt's tail, which is never addressed, was computed.
        num_encoded_units, num_cached_units: vision units (an image, or some temporal patches of a video) that the
            vision tower encoded, and those whose embeddings were cached; units inside cached tokens count in neither.
        prefill_s: seconds from this request's start to its first token: reading, vision, prefill, and the decode steps
            of others in between, but not the time in the queue.
        decode_s: seconds from the first token to the last.
        cache_bytes: KV blocks and states that the sequence held at its end, shared ones included.
    """

    num_cached_tokens: int = 0
    cached_from: Mapping[Tier, int] = field(default_factory=dict)
    num_prefilled_tokens: int = 0
    num_evicted_tokens: int = 0
    miss: MissReason | None = None
    num_encoded_units: int = 0
    num_cached_units: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
