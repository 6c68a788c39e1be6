"""Drafts by the model's own layer: its keys and values after every way to a prompt, and how often it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings, SequenceCache
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.batches import StepInputs
from qwen35mm.engine.mtp_drafter import MTPDrafter, Unseen, Wanted
from qwen35mm.engine.parts import shared_memory
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.runtime import Runtime
from qwen35mm.model import LoadedModel, load
from tests.engine.exact import Chat, assistant, cache_settings, gates_of, picture, user

CONTEXT = 1024
SETTINGS = EngineSettings(context_length=CONTEXT, chunk_tokens=32, slots=4)
QUESTION = user(Image(picture(1)), "What is in this picture?")
FACTS = ("My cat is called Tom. My dog is called Rex. My car is red.", "Hello!", "Is there a red circle?")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo_model_path(), dtype="float32", device="cpu", mtp=True)


@pytest.fixture(scope="module")
def chat(loaded: LoadedModel) -> Chat:
    return Chat(loaded)


def engine(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, SETTINGS, cache_settings(loaded, **options))


def prefilled(runtime: Runtime, request: Request) -> Prefill:
    work = Prefill(runtime, request)
    while not work.done:
        work.step()
    return work


def exported(runtime: Runtime, request: Request) -> tuple[int, dict[str, torch.Tensor]]:
    """The tokens that came from the cache, and keys and values of all layers."""
    work = prefilled(runtime, request)
    try:
        assert work.start is not None
        return sum(work.start.tokens_from.values()), work.cache.export()
    finally:
        work.close()


def questions(chat: Chat) -> tuple[Request, Request]:
    """A chat's first request, and its second one."""
    first = chat.request([QUESTION])
    return first, chat.request([QUESTION, assistant("A red circle."), user("And where is it, please?")])


@pytest.mark.parametrize("kv_keep", ["1", "0.5", "0.5 gated"])
def test_a_cache_hit_has_the_bits_of_a_cold_prompt(
    loaded: LoadedModel, chat: Chat, kv_keep: str, tmp_path: Path
) -> None:
    first, second = questions(chat)
    kv_keep, _, gated = kv_keep.partition(" ")
    kept: dict[str, Any] = {"kv_keep": kv_keep, "kv_gates": gates_of(loaded) if gated else "none"}
    num_cold, cold = exported(engine(loaded, reuse=False, **kept).runtime, second)
    assert num_cold == 0
    assert len(cold["k"]) == len(loaded.config.text.attention_layers) == 3
    assert cold["k"][-1].abs().amax() > 0, "the layer's own"
    assert (cold["k"].shape[1] < len(second.prompt.token_ids)) == (kv_keep != "1")

    warm = engine(loaded, directory=tmp_path, **kept)
    exported(warm.runtime, first)
    num_cached, found = exported(warm.runtime, second)
    assert num_cached > 0
    assert all(torch.equal(found[name], cold[name]) for name in cold)

    warm.flush()
    num_cached, found = exported(engine(loaded, directory=tmp_path, **kept).runtime, second)
    assert num_cached > 0
    assert all(torch.equal(found[name], cold[name]) for name in cold)


def test_a_folder_keeps_models_with_and_without_the_layer_apart(loaded: LoadedModel, tmp_path: Path) -> None:
    without = load(demo_model_path(), dtype="float32", device="cpu")
    roots = [engine(model, directory=tmp_path).runtime.root for model in (loaded, loaded, without)]
    assert roots[0] == roots[1] != roots[2]


def test_a_chunk_s_first_place_continues_the_last_one(loaded: LoadedModel, chat: Chat) -> None:
    """Only a segment begins without a state: in chunks of any size the layer gets the same inputs."""
    _, second = questions(chat)
    found = []
    for chunk_tokens in (32, 512):
        settings = replace(SETTINGS, chunk_tokens=chunk_tokens)
        runtime = Engine(loaded, settings, cache_settings(loaded, reuse=False)).runtime
        found.append(exported(runtime, second)[1])
    for name in ("k", "v"):
        assert torch.allclose(found[0][name], found[1][name], atol=1e-3)


class Replies:
    """Greedy replies of several prompts, one token a step each, with drafts of each place."""

    def __init__(self, loaded: LoadedModel, requests: Sequence[Request]) -> None:
        self.loaded, self.runtime = loaded, engine(loaded, reuse=False).runtime
        sizes = {"num_sequences": len(requests), "context_rows": CONTEXT}
        self.drafter = MTPDrafter(loaded.model, self.runtime.pools, shared_memory(loaded.model), **sizes)
        self.works = [prefilled(self.runtime, request) for request in requests]
        self.token_ids: list[list[int]] = [[] for _ in requests]
        self.unseen = [Unseen() for _ in requests]
        for row, work in enumerate(self.works):
            assert work.last_hidden is not None
            self._choose(row, work.last_hidden)

    def wanted(self, *counts: int) -> list[Wanted]:
        """With room for the drafts."""
        for work, count in zip(self.works, counts, strict=True):
            work.cache.prepare(count + 1)
        return [
            Wanted(work.cache, unseen, count)
            for work, unseen, count in zip(self.works, self.unseen, counts, strict=True)
        ]

    def step(self) -> None:
        inputs = StepInputs.unused(len(self.works), self.runtime.pools.kv.blocks_for(CONTEXT))
        for row, work in enumerate(self.works):
            work.cache.prepare(1)
            inputs.set(row, work.cache, token_id=self.token_ids[row][-1])
        model = self.loaded.model
        embeds = model.embed_tokens(torch.tensor([ids[-1] for ids in self.token_ids]))
        hidden = model(inputs.batch(self.runtime.pools, embeds))
        for row, work in enumerate(self.works):
            work.cache.advance(1)
            self._choose(row, hidden[row : row + 1])

    def _choose(self, row: int, hidden: torch.Tensor) -> None:
        token_id = int(self.loaded.model.logits(hidden).argmax())
        self.token_ids[row].append(token_id)
        self.unseen[row].add([token_id], hidden)

    def close(self) -> None:
        for work in self.works:
            work.close()


def texts(chat: Chat) -> list[Request]:
    return [chat.request([user(text)]) for text in FACTS]


def test_most_drafts_are_right(loaded: LoadedModel, chat: Chat) -> None:
    right = total = 0
    for request in [*texts(chat), chat.request([QUESTION])]:
        replies, guesses = Replies(loaded, [request]), []
        while replies.token_ids[0][-1] not in loaded.eos_ids and len(guesses) < 40:
            guesses += replies.drafter.draft(replies.wanted(2))
            replies.step()
        said = replies.token_ids[0][1:]
        right += sum(guess[0] == token_id for guess, token_id in zip(guesses, said, strict=True))
        total += len(said)
        replies.close()
    assert total > 20
    assert right > 0.6 * total


def test_replies_in_company_get_their_own_drafts(loaded: LoadedModel, chat: Chat) -> None:
    counts, alone = (3, 1, 2), []
    for request, count in zip(texts(chat), counts, strict=True):
        replies = Replies(loaded, [request])
        alone.append([])
        for _ in range(4):
            alone[-1] += replies.drafter.draft(replies.wanted(count))
            replies.step()
    together = Replies(loaded, texts(chat))
    for step in range(4):
        found = together.drafter.draft(together.wanted(*counts))
        assert [len(drafts) for drafts in found] == list(counts)
        assert found == [drafts[step] for drafts in alone]
        together.step()


def test_tokens_without_drafts_are_caught_up_with(loaded: LoadedModel, chat: Chat) -> None:
    """After any number of steps, and whatever was drafted before, the next drafts are the same."""
    found = []
    for drafts_at in (range(30), (), (5, 6), (0,)):
        replies = Replies(loaded, texts(chat)[:1])
        for step in range(30):
            if step in drafts_at:
                replies.drafter.draft(replies.wanted(4))
            replies.step()
        drafts = replies.drafter.draft(replies.wanted(4))
        found.append((drafts, replies.works[0].cache.export()))
    for drafts, kept in found[1:]:
        assert drafts == found[0][0]
        assert all(torch.allclose(kept[name], found[0][1][name], atol=1e-4) for name in kept)


def test_a_preempted_reply_drafts_the_same(loaded: LoadedModel, chat: Chat) -> None:
    found = []
    for is_preempted in (False, True):
        replies = Replies(loaded, texts(chat)[:1])
        replies.drafter.draft(replies.wanted(2))
        replies.step()
        cache = replies.works[0].cache
        if is_preempted:
            cache = moved(replies.runtime, cache)
        cache.prepare(3)
        found.append(replies.drafter.draft([Wanted(cache, replies.unseen[0], 3)]))
    assert found[0] == found[1]


def moved(runtime: Runtime, cache: SequenceCache) -> SequenceCache:
    """The sequence in other blocks, by way of host memory."""
    kept, delta = cache.export(), cache.rope_delta
    held = runtime.pools.new_sequence()
    held.prepare(100)
    other = runtime.pools.new_sequence()
    other.append(kept)
    other.rope_delta = delta
    assert set(other.block_table).isdisjoint(cache.block_table)
    return other


def test_a_recorded_pass_is_the_computed_one(loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr("qwen35mm.engine.parts.record", lambda compute, memory: compute())
        replies = Replies(loaded, texts(chat)[:2])
        found.append([])
        for _ in range(5):
            found[-1] += replies.drafter.draft(replies.wanted(2, 2))
            replies.step()
    assert found[0] == found[1]


def test_greedy_replies_of_the_engine_are_as_before(loaded: LoadedModel, chat: Chat) -> None:
    """The layer changes nothing but what it drafts."""
    without = load(demo_model_path(), dtype="float32", device="cpu")
    answers = []
    for model in (loaded, without):
        running = Engine(model, SETTINGS, CacheSettings(kv_bytes=8 << 20, state_bytes=64 << 20))
        request = replace(texts(chat)[0], params=SamplingParams(temperature=0.0, max_tokens=20))
        running.add(request)
        tokens: list[int] = []
        while running.has_requests:
            for output in running.step():
                tokens += getattr(getattr(output.event, "result", None), "token_ids", ())
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert answers[0]
