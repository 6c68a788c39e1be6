"""Prompts in hand hold no more than the memory plan says, and nearly as much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine.prefill import Prefill
from qwen35mm.model import LoadedModel, load
from qwen35mm.model.activations import paused_prefill_bytes, prefill_bytes
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_preprocess import MediaBudget
from tests.allocated import peak_bytes
from tests.engine.exact import Chat, assistant, cache_settings, user, words

pytestmark = pytest.mark.skipif(find_library() is None, reason="torch's own operations take more: see docs/models.md")

CHUNK = 512
SETTINGS = EngineSettings(context_length=2048, chunk_tokens=CHUNK, slots=3)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    """In float32, for which attention packs nothing."""
    return load(demo_model_path(), device="cpu", dtype="float32")


def make_engine(demo: LoadedModel, budget: MediaBudget) -> Engine:
    cache = cache_settings(demo, num_tokens=4 * 2048, state_bytes=0, vision_bytes=0)
    return Engine(demo, SETTINGS, cache, budget=budget, clock=lambda: 0.0)


def step_until(engine: Engine, is_so: Callable[[], bool]) -> None:
    for _ in range(5000):
        if is_so():
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("it never came so far")


def in_mid_chunk(prefill: Prefill) -> bool:
    """Whether its first whole chunk is paused."""
    return prefill.start is not None and prefill.spent > 0 and prefill.cache.length == 0


def test_prompts_and_a_commit_paused_within_chunks_are_planned(demo: LoadedModel) -> None:
    chat = Chat(demo, min_segment=2 * CHUNK)
    engine = make_engine(demo, MediaBudget(max_image_tokens=8, max_video_tokens=8))
    history = chat.history([user(words("history", count=1300)), assistant("done")])
    prompts = [chat.request([user(words(name, count=count))]) for name, count in (("a", 1100), ("b", 900), ("c", 700))]
    assert all(len(each.prompt.token_ids) > CHUNK for each in prompts)

    def work() -> None:
        engine.commit(history)
        step_until(engine, lambda: any(map(in_mid_chunk, engine._commits.begun)))
        for number, prompt in enumerate(prompts, start=1):
            engine.add(prompt)
            step_until(engine, lambda n=number: sum(in_mid_chunk(each.prefill) for each in engine._prefilling) == n)
        assert any(map(in_mid_chunk, engine._commits.begun))
        step_until(engine, lambda: not engine.has_work)

    found, planned = peak_bytes(work), engine.runtime.plan.work_bytes
    one = prefill_bytes(demo.config, torch.float32, CHUNK)
    assert found > one + 2 * paused_prefill_bytes(demo.config, torch.float32, CHUNK), "more than two paused"
    assert 0.85 * planned < found <= planned, (found, planned, one)
