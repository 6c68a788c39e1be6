"""What a long prompt costs beside the model grows with its length, and no faster: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.cache import CachePools, PrefixCache
from qwen35mm.cache.kv_keep import KVKeep
from qwen35mm.config import ModelConfig
from qwen35mm.engine import CachedPrompt
from qwen35mm.engine.pieces import Pieces
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.runtime import InlineExecutor
from qwen35mm.model.adapters import Routes
from qwen35mm.prompt import Prompt, cut_segments

TURN_TOKENS, PIECE_TOKENS = 130, 512
COUNTED = ("/qwen35mm/cache/", "/qwen35mm/engine/", "/qwen35mm/prompt/")


class Identity:
    """In place of a model: gives back what it gets."""

    device, routes = torch.device("cpu"), Routes()
    devices, mtp, num_parts = (device,), None, 1

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def by_layers(self, batch: Any) -> Iterator[torch.Tensor]:
        yield batch.embeds


class Conversation:
    """A conversation of turns of `TURN_TOKENS`, and its caches: one layer of each kind, a few bytes a token."""

    def __init__(self, num_tokens: int) -> None:
        self._most = num_tokens + 8 * TURN_TOKENS
        config = ModelConfig.from_dict(make_config("0.8B", "bfloat16"))
        kinds = ("linear_attention", "full_attention")
        sizes = {"num_key_value_heads": 1, "head_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
        config = replace(config, text=replace(config.text, layer_types=kinds, **sizes))
        self._pools = CachePools(config, num_slots=2, num_tokens=self._most, dtype=torch.bfloat16)
        self._prefixes = PrefixCache(self._pools, state_bytes=1 << 24)

    def prompt(self, num_tokens: int) -> Prompt:
        """Its first `num_tokens`."""
        ids = np.random.default_rng(0).integers(0, 900, self._most)[:num_tokens]
        segments, tail_start = cut_segments(num_tokens, range(0, num_tokens, TURN_TOKENS), ())
        positions = np.broadcast_to(np.arange(num_tokens), (3, num_tokens)).copy()
        return Prompt(ids, (), positions, 0, segments, tail_start)

    def prefill(self, prompt: Prompt) -> Prefill:
        """Brings a prompt into the caches."""
        model: Any = Identity()
        parts: dict[str, Any] = {
            **{"root_of": lambda adapter: b"0" * 32, "groups_of": lambda adapter: ()},
            **{"reuse": True, "pools": self._pools, "prefixes": self._prefixes, "disk": None},
            **{"model": model, "chunk_tokens": PIECE_TOKENS, "vision": None, "reader": InlineExecutor()},
            **{"kv_keep": KVKeep(), "gates": None},
            "pieces": Pieces(model, self._pools, self._most, PIECE_TOKENS),
        }
        runtime: Any = SimpleNamespace(**parts)
        work = Prefill(runtime, CachedPrompt(prompt))
        while not work.done:
            work.step()
        return work

    def evict(self) -> None:
        """Evicts everything, a piece's blocks at a time, as another long prompt would."""
        allocator = self._pools.kv.allocator
        while allocator.num_free < allocator.num_blocks:
            before = allocator.num_free
            self._prefixes.reclaim(PIECE_TOKENS // 64)
            assert allocator.num_free > before, "everything can be evicted"


def num_lines(work: Callable[[], object]) -> int:
    """Lines of the cache, the engine and the prompt's layout that run, a loop's as often as it turns."""
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if any(part in frame.f_code.co_filename for part in COUNTED) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@torch.inference_mode()
def lives(num_segments: int) -> dict[str, int]:
    """Lines of a conversation's prefill, of its next turn, and of making room for others."""
    conversation = Conversation(num_segments * TURN_TOKENS)
    prompt = conversation.prompt(num_segments * TURN_TOKENS)
    longer = conversation.prompt((num_segments + 4) * TURN_TOKENS)
    assert len(longer.segments) > num_segments
    return {
        "prefill": num_lines(lambda: conversation.prefill(prompt).close()),
        "next turn": num_lines(lambda: conversation.prefill(longer).close()),
        "eviction": num_lines(conversation.evict),
    }


def test_1024_segments_cost_four_times_as_much_as_256(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.engine.settings.CPU_DEEP_TOKENS", 10**9)  # pieces of one length
    short, long = lives(256), lives(1024)
    assert {name: long[name] for name in short if long[name] > 4.5 * short[name]} == {}, f"{short}; {long}"
