"""Texts and token ids without a template: gone on with, scored and embedded, with transformers as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.zero_gpu import ZeroGpuBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Finished, GenerationRequest, Image, Message, PromptRead, SamplingParams, Text
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import BatchError, ConfigError, ContextTooLongError, MediaError, PromptError, RequestError
from qwen35mm.evaluation.passages import diverge, hidden_states, text_passages
from qwen35mm.model import LoadedModel
from tests.backends.events import collect, result_of
from tests.backends.test_local import oracle_inputs
from tests.backends.zero_gpu.test_backend import PickledCalls
from tests.engine.exact import picture
from tests.oracle import load_demo_oracle
from tests.test_tokenizer import Counting

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TEXT = "A red circle at the top left, a blue star in the center and a green cross on the right."
QUESTION = [Message("user", (Image(picture(3)), Text("What is in this picture?")))]


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(demo, settings=EngineSettings(context_length=1024), min_segment=16)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_demo_oracle()


@torch.inference_mode()
def oracle_states(oracle: Any, ids: Any, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """transformers' hidden states [T, hidden] after the final norm."""
    tokens = torch.tensor(np.array(ids))[None]
    types = (tokens == oracle.config.image_token_id).int()
    how = {"mm_token_type_ids": types, **inputs} if inputs else {}
    return oracle.model(input_ids=tokens, **how).last_hidden_state[0]


def oracle_logprobs(oracle: Any, ids: Any, start: int, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.inference_mode():
        logits = oracle.lm_head(oracle_states(oracle, ids, inputs))
    following = torch.tensor(np.array(ids))[start:, None]
    return logits[start - 1 : -1].log_softmax(-1).gather(1, following)[:, 0]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.as_tensor(expected), atol=5e-4, rtol=1e-4)


def ids_of(backend: LocalBackend, text: str) -> list[int]:
    return backend.loaded.tokenizer.encode_plain(text)


async def test_a_conversations_ids_are_answered_as_it_is(backend: LocalBackend) -> None:
    rendered = result_of(await collect(backend.stream(GenerationRequest([Message("user", (Text("hello"),))], GREEDY))))
    ids = rendered.prompt_token_ids
    text = backend.loaded.tokenizer.decode(ids, skip_special=False)
    for prompt in (list(ids), np.array(ids), text):
        found = await backend.acomplete(prompt, GREEDY, control_tokens=True)
        assert (found.token_ids, found.prompt_token_ids) == (rendered.token_ids, ids)
    assert (await backend.acomplete(text, GREEDY)).prompt_token_ids == tuple(ids_of(backend, text)) != ids


async def test_a_texts_tokens_are_told_before_what_follows_it(backend: LocalBackend) -> None:
    events = await collect(backend.stream_prompt(TEXT, GREEDY, prompt_logprobs=2))
    read, *_, last = [event for event in events if isinstance(event, PromptRead | Finished)]
    assert isinstance(read, PromptRead)
    assert isinstance(last, Finished)
    assert read.logprobs == (await backend.ascore(TEXT, num_top=2)).tokens
    assert last.result.token_ids == (await backend.acomplete(TEXT, GREEDY)).token_ids


async def test_a_texts_score_is_transformers(backend: LocalBackend, oracle: Any, demo: LoadedModel) -> None:
    found = await backend.ascore(TEXT)
    ids = ids_of(backend, TEXT)
    expected = oracle_logprobs(oracle, ids, 1)
    close([each.logprob for each in found.tokens], expected)
    assert found.logprob == pytest.approx(float(expected.sum()), rel=1e-4)
    assert found.perplexity == pytest.approx(float(torch.exp(-expected.mean())), rel=1e-4)
    assert (await backend.ascore(ids)).tokens == (await backend.ascore(np.array(ids))).tokens == found.tokens
    passages = text_passages(demo, TEXT, max_tokens=1000)
    both = (demo.model.head, list(hidden_states(demo, passages)))
    assert found.perplexity == pytest.approx(diverge(passages, both, both).perplexity, rel=1e-4)


@pytest.mark.parametrize(("given", "text"), [("A red circle", " at the top"), ("A red cir", "cle"), ("Red", "")])
async def test_what_follows_a_text_is_scored_after_it(
    given: str, text: str, backend: LocalBackend, oracle: Any
) -> None:
    if not text:
        with pytest.raises(PromptError, match="nothing to score"):
            await backend.ascore(text, given)
        return
    found = await backend.ascore(text, given)
    ids = ids_of(backend, given + text)
    start = len(ids) - len(found.tokens)
    close([each.logprob for each in found.tokens], oracle_logprobs(oracle, ids, start))
    # A token that both have a part of is scored.
    assert "".join(each.text for each in found.tokens).endswith(text)
    assert ids[:start] == ids_of(backend, given)[:start]
    by_ids = await backend.ascore(ids[start:], ids[:start])
    assert (by_ids.tokens, by_ids.num_prompt_tokens) == (found.tokens, len(ids))


async def test_an_answer_is_scored_after_its_question(backend: LocalBackend, oracle: Any) -> None:
    answer = "A red circle on the left."
    found = await backend.ascore(answer, QUESTION, num_top=1)
    asked = await collect(backend.stream(GenerationRequest(QUESTION, GREEDY, enable_thinking=False)))
    before = list(result_of(asked).prompt_token_ids)
    ids = [*before, *ids_of(backend, answer)]
    assert [each.token_id for each in found.tokens] == ids[len(before) :]
    assert found.num_prompt_tokens == len(ids)
    close(
        [each.logprob for each in found.tokens],
        oracle_logprobs(oracle, ids, len(before), oracle_inputs(backend, QUESTION)),
    )
    assert all(each.top[0].logprob >= each.logprob for each in found.tokens)


async def test_endings_share_what_stands_before_them(demo: LoadedModel) -> None:
    backend, alone = LocalBackend(demo, min_segment=16), LocalBackend(demo, cache=CacheSettings(reuse=False))
    try:
        found = [await backend.ascore(end, TEXT * 3) for end in (" Yes.", " No.", " Perhaps.")]
        cold = [await alone.ascore(end, TEXT * 3) for end in (" Yes.", " No.", " Perhaps.")]
        cached = [each.cache.num_cached_tokens for each in found]
        assert cached == [0, 0, len(ids_of(backend, TEXT * 3)) - 1]
        for warm, each in zip(found, cold, strict=True):
            close([token.logprob for token in warm.tokens], [token.logprob for token in each.tokens])
        own = await backend.ascore(" Yes.", TEXT * 3, tenant="another")
        assert own.cache.num_cached_tokens == 0, "nobody learns what others asked"
    finally:
        backend.close()
        alone.close()


async def test_an_embedding_is_transformers_hidden_state(backend: LocalBackend, oracle: Any) -> None:
    texts = [TEXT, "A blue star.", "?"]
    states = [oracle_states(oracle, ids_of(backend, text)) for text in texts]
    found = await backend.aembed(texts)
    assert (found.shape, found.dtype) == ((3, backend.loaded.config.text.hidden_size), np.float32)
    close(found, torch.stack([each[-1] for each in states]))
    close(await backend.aembed(texts, pooling="mean"), torch.stack([each.mean(0) for each in states]))
    one = await backend.aembed(TEXT)
    assert one.shape == found[0].shape
    for same in (ids_of(backend, TEXT), np.array(ids_of(backend, TEXT))):
        assert np.array_equal(await backend.aembed(same), one)
    assert np.array_equal(await backend.aembed([ids_of(backend, TEXT)]), one[None])


async def test_a_conversation_is_embedded_with_its_media(backend: LocalBackend, oracle: Any) -> None:
    ids = result_of(
        await collect(backend.stream(GenerationRequest(QUESTION, GREEDY, enable_thinking=False)))
    ).prompt_token_ids
    states = oracle_states(oracle, ids, oracle_inputs(backend, QUESTION))
    found = await backend.aembed(QUESTION)
    close(found, states[-1])
    close((await backend.aembed([QUESTION, QUESTION[0:1]], pooling="mean"))[1], states.mean(0))
    assert np.array_equal(await backend.aembed(QUESTION[0]), found)
    other = [Message("user", (Image(picture(4)), Text("What is in this picture?")))]
    assert not np.allclose(await backend.aembed(other), found, atol=1e-2)


def test_scripts_need_no_loop(backend: LocalBackend) -> None:
    params = {"temperature": 0, "ignore_eos": True}
    one = backend.complete("A red", params, max_tokens=4)
    many = backend.complete(["A red", [1, 2, 3], np.array([1, 2, 3])], params, max_tokens=4)
    assert [len(result.token_ids) for result in many] == [4, 4, 4]
    assert many[0].token_ids == one.token_ids
    assert many[1].token_ids == many[2].token_ids
    assert [len(results) for results in backend.complete(iter(["A red"]), n=2, max_tokens=2)] == [2]
    score = backend.score(" circle", "A red")
    assert score.tokens[0].logprob == score.logprob < 0
    assert backend.embed("A red circle").shape == backend.embed(texts for texts in ("A", "B"))[0].shape


def test_an_answer_follows_a_schema(backend: LocalBackend) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3]}}, "required": ["n"], "additionalProperties": False}
    assert backend.complete("JSON:", schema=schema, temperature=0).parsed == {"n": 3}


async def test_many_at_once_are_all_served(demo: LoadedModel) -> None:
    """More than wait in the engine's line."""
    backend = LocalBackend(demo, settings=EngineSettings(slots=1, max_waiting=2))
    try:
        found = await asyncio.gather(*(backend.ascore(f"{TEXT} {number}") for number in range(12)))
        assert [each.tokens[-1].text for each in found] == [str(number)[-1] for number in range(12)]
    finally:
        backend.close()


async def test_scores_and_embeddings_of_a_borrowed_gpu(
    demo: LoadedModel, backend: LocalBackend, tmp_path: Path
) -> None:
    borrowed = ZeroGpuBackend(demo, PickledCalls(), cache=CacheSettings(directory=tmp_path), min_segment=16)
    found = []
    for events in (borrowed.stream_score("A red circle.", QUESTION), borrowed.stream_embedding(QUESTION)):
        found.append((await collect(events))[-1])
        # Both would be in one process here.
        assert await asyncio.to_thread(borrowed.wait_idle, 60)
    scored, embedded = found
    assert isinstance(scored, PromptRead)
    assert isinstance(embedded, PromptRead)
    assert scored.logprobs == (await backend.ascore("A red circle.", QUESTION)).tokens
    assert embedded.states is not None
    assert np.array_equal(embedded.states[0].numpy(), await backend.aembed(QUESTION))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda b: b.acomplete(""), PromptError, "has no tokens"),
        (lambda b: b.acomplete([Message("user", "hi")]), PromptError, "must be a string, or token ids; got list"),
        (lambda b: b.acomplete([1, 2.5]), PromptError, "Token 2 of the prompt must be a whole number"),
        (lambda b: b.acomplete(None), PromptError, "must be a string, or token ids; got NoneType"),
        (lambda b: b.acomplete(["hi", None]), BatchError, "the first is number 2: .* got NoneType"),
        (lambda b: b.acomplete("hi", thinking=True), ConfigError, "thinking is for conversations"),
        (lambda b: b.acomplete("hi", control_tokens=1), ConfigError, "control_tokens must be True or False"),
        (lambda b: b.acomplete("a\ud83d"), PromptError, "half of a surrogate pair"),
        (lambda b: b.acomplete([1] * 1024), ContextTooLongError, "has 1,024 tokens; the context holds 1,024, reply"),
        (lambda b: collect(b.stream_prompt("hi", prompt_logprobs=-1)), RequestError, "prompt_logprobs must .*got -1"),
        (lambda b: b.ascore("?"), PromptError, "nothing to score"),
        (lambda b: b.ascore([1, 2], QUESTION), PromptError, "answer must be a string; got list"),
        (lambda b: b.ascore("", QUESTION), PromptError, "text of a reply"),
        (lambda b: b.ascore("a b", 5), PromptError, "got one with int in it"),
        (lambda b: b.ascore("a b", num_top=1.5), RequestError, "num_top must be .*got 1.5"),
        (lambda b: b.ascore("a b", top=1), ConfigError, "Unknown option 'top': did you mean"),
        (lambda b: b.ascore("a b", thinking="yes"), ConfigError, "thinking must be True or False"),
        (lambda b: b.ascore("a b", retain="all"), RequestError, "retain must be one of"),
        (lambda b: b.aembed([]), PromptError, "has no tokens"),
        (lambda b: b.aembed(iter(())), PromptError, "nothing to embed"),
        (lambda b: b.aembed("a", pooling="max"), RequestError, "pooling must be 'last' or 'mean'; got 'max'"),
        (lambda b: b.aembed([Message("user", (Image(b"none"),))]), MediaError, "picture|image"),
    ],
)
async def test_what_was_meant_for_something_else_is_refused_in_words(
    call: Any, error: type[Exception], words: str, backend: LocalBackend
) -> None:
    with pytest.raises(error, match=words):
        await call(backend)


async def test_a_text_may_fill_the_context_and_one_that_is_far_longer_is_not_read(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len((await backend.ascore([1] * backend.context_length)).tokens) == backend.context_length - 1
    with pytest.raises(ContextTooLongError, match=r"has 1,025 tokens; the context holds 1,024\."):
        await backend.aembed([1] * 1025)
    counting = Counting(backend.loaded.tokenizer._plain)
    monkeypatch.setattr(backend.loaded.tokenizer, "_plain", counting)
    monkeypatch.setattr(backend.loaded.tokenizer, "_longest", 1000)
    long = "word " * 200_000
    for call in (backend.ascore(long), backend.ascore("a", long), backend.aembed(long), backend.acomplete(long)):
        counting.num_chars = 0
        with pytest.raises(ContextTooLongError, match="tokens or more; the context holds 1,024"):
            await call
        assert counting.num_chars <= 32 * backend.context_length
    with pytest.raises(ContextTooLongError, match=r"The conversation has .* tokens or more"):
        await backend.aembed(Message("user", (Text(long),)))
