"""What a long prompt costs beside the model grows with its length, and no faster: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.bookkeeping import TURN_TOKENS, Conversation

COUNTED = ("/qwen35mm/cache/", "/qwen35mm/engine/", "/qwen35mm/prompt/")


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


def test_2048_segments_cost_four_times_as_much_as_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.engine.settings.CPU_DEEP_TOKENS", 10**9)  # pieces of one length
    short, long = lives(512), lives(2048)
    assert {name: long[name] for name in short if long[name] > 4.5 * short[name]} == {}, f"{short}; {long}"
