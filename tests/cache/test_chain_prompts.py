"""Addresses of real conversations: what turn N leaves behind is what turn N + 1 begins with."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.assets import demo_model_path
from qwen35mm.cache.chain import segment_addresses
from qwen35mm.config import ModelConfig
from qwen35mm.prompt import ChatTemplate, Image, Message, PromptBuilder, Text, ToolCall, Video
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import GridTHW, MediaPlan

ROOT = hashlib.sha256(b"root").digest()


@pytest.fixture(scope="module")
def builders() -> dict[int, PromptBuilder]:
    """By the least length of a segment."""
    folder = demo_model_path()
    parts = (
        Tokenizer.from_pretrained(folder),
        ChatTemplate.from_pretrained(folder),
        ModelConfig.from_pretrained(folder),
    )
    return {min_segment: PromptBuilder(*parts, min_segment=min_segment) for min_segment in (16, 64)}


def plan(kind: str, name: str, rows: int = 8, columns: int = 12, frames: int = 1) -> MediaPlan:
    grid = GridTHW(frames, rows, columns)
    times = {}
    if kind == "video":
        seconds = tuple(float(n) for n in range(frames))
        times = {"frame_indices": tuple(range(frames)), "frame_times_s": seconds, "timestamps_s": seconds}
    units = tuple(f"{name}-{n}" for n in range(frames))
    size = (rows * 16, columns * 16)
    return MediaPlan(
        kind=kind,  # pyright: ignore[reportArgumentType]
        source_size=size,
        size=size,
        grid_thw=grid,
        num_tokens=grid.num_tokens(),
        num_prompt_tokens=10_000,
        cache_bytes=0,
        processing="",
        digest=name,
        unit_digests=units,
        **times,
    )


texts = st.builds(lambda word, count: f"{word} " * count, st.sampled_from(["red", "a ball", "7"]), st.integers(0, 60))
media = st.builds(
    plan,
    st.sampled_from(["image", "video"]),
    st.sampled_from(["cat", "dog"]),
    st.sampled_from([2, 8]),
    st.sampled_from([4, 12]),
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "question": st.lists(st.one_of(texts, media), min_size=1, max_size=3),
            "reasoning": st.one_of(st.none(), texts),
            "call": st.booleans(),
            "reply": texts,
        }
    ),
    min_size=2,
    max_size=5,
)


def conversation(turns: list[dict]) -> list[tuple[list[Message], list[MediaPlan]]]:
    """Messages and plans up to each of the replies: each ends with an assistant's message."""
    messages: list[Message] = [Message("system", (Text("You are helpful. " * 12),))]
    plans: list[MediaPlan] = []
    states = []
    for turn in turns:
        parts = []
        for item in turn["question"]:
            if isinstance(item, str):
                parts.append(Text(item))
            else:
                plans.append(item)
                parts.append(Image(b"x") if item.kind == "image" else Video(b"x"))
        messages.append(Message("user", tuple(parts)))
        if turn["call"]:
            call = ToolCall("look", {"at": turn["reply"]})
            messages.append(Message("assistant", (), reasoning=turn["reasoning"], tool_calls=(call,)))
            states.append((list(messages), list(plans)))
            messages.append(Message("tool", (Text(turn["reply"]),)))
        messages.append(Message("assistant", (Text(turn["reply"]),), reasoning=turn["reasoning"]))
        states.append((list(messages), list(plans)))
    return states


@given(turns=turns, enable_thinking=st.booleans(), min_segment=st.sampled_from([16, 64]))
def test_a_history_shares_all_its_addresses_with_the_next_turns_prompt(builders, turns, enable_thinking, min_segment):
    states = conversation(turns)
    salt = {"salt": b"tenant", "salt_from": 40}
    prompts = builders[min_segment]
    for (messages, plans), (following, its_plans) in pairwise(states):
        history = prompts.history(messages, plans, enable_thinking=enable_thinking)
        prompt = prompts.prompt(following[:-1], its_plans, enable_thinking=enable_thinking)
        committed = segment_addresses(history, ROOT, **salt)
        assert segment_addresses(prompt, ROOT, **salt)[: len(committed)] == committed
        new_tokens = len(prompt.token_ids) - len(history.token_ids)
        assert prompt.tail_start >= history.tail_start
        assert len(prompt.token_ids) - history.tail_start < new_tokens + min_segment + 8
