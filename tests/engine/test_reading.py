"""What is read of a prompt's own tokens, with transformers as the oracle."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from qwen35mm.contract import Finished, Image, PromptRead, TextDelta
from qwen35mm.engine import Engine, EngineSettings, Reading, Request
from qwen35mm.engine import reading as engine_reading
from qwen35mm.errors import ContextTooLongError, EngineError
from qwen35mm.model import LoadedModel, Qwen35Model
from qwen35mm.prompt import PromptBuilder
from tests.engine.exact import (
    CONTEXT,
    DENSE,
    GREEDY,
    MIN_SEGMENT,
    SETTINGS,
    Chat,
    cache_settings,
    chat_checkpoint,
    chat_model,
    dialog,
    picture,
    results,
    run,
    serve,
    user,
    words,
)
from tests.engine.exact import MODELS as BOTH

# Logits of a few rows at a time, so that a piece has several such parts.
FEW = 24 * 1024


@functools.cache
def oracle() -> Any:
    return Qwen3_5ForConditionalGeneration.from_pretrained(chat_checkpoint(DENSE), dtype=torch.float32).eval()


def engine_of(loaded: LoadedModel, *, settings: EngineSettings = SETTINGS, **options: Any) -> Engine:
    return Engine(loaded, settings, cache_settings(loaded, **options))


def plain_prompt(loaded: LoadedModel, *key: object, count: int, **options: Any) -> Any:
    builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=MIN_SEGMENT)
    ids = builder.text_ids(words(*key, count=3 * count))[:count]
    return builder.plain(ids, **options)


def read(engine: Engine, request: Request) -> PromptRead:
    """What the engine reads of a prompt, and nothing else of it."""
    (last,) = [output.event for output in run(engine, request) if not hasattr(output.event, "phase")]
    assert isinstance(last, PromptRead)
    return last


def reading(what: Any, prompt: Any, *media: Any, retain: Any = "conversation", **options: Any) -> Request:
    return Request(prompt, media, retain, reading=Reading(what, **options), replies=False, params=GREEDY)


def numbers(found: PromptRead) -> list[float]:
    return [each.logprob for each in found.logprobs]


@torch.inference_mode()
def test_log_probabilities_are_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reading, "LOGITS_AT_ONCE", FEW)
    loaded = chat_model(DENSE)
    prompt = plain_prompt(loaded, "scored", count=300)
    expected = oracle()(input_ids=torch.tensor(prompt.token_ids)[None]).logits[0].log_softmax(-1)
    ids = torch.tensor(prompt.token_ids)
    own = expected[:-1].gather(1, ids[1:, None])[:, 0]
    for start in (1, 64, 65, 200, 299):
        found = read(engine_of(loaded), reading("logprobs", prompt, start=start, num_top=3)).logprobs
        assert [each.token_id for each in found] == prompt.token_ids[start:].tolist()
        torch.testing.assert_close(torch.tensor([each.logprob for each in found]), own[start - 1 :], atol=2e-4, rtol=0)
        top = expected[start - 1 : -1].topk(3)
        assert [[each.token_id for each in token.top] for token in found] == top.indices.tolist()
        values = torch.tensor([[each.logprob for each in token.top] for token in found])
        torch.testing.assert_close(values, top.values, atol=2e-4, rtol=0)
        spelt = b"".join(bytes(each.bytes) for each in found)
        assert spelt.decode() == loaded.tokenizer.decode(prompt.token_ids[start:])


@torch.inference_mode()
def test_hidden_states_are_transformers() -> None:
    loaded = chat_model(DENSE)
    prompt = plain_prompt(loaded, "states", count=200)
    expected = oracle().model(input_ids=torch.tensor(prompt.token_ids)[None]).last_hidden_state[0]
    for what, wanted in (("last", expected[-1:]), ("mean", expected.mean(0)[None]), ("states", expected[69:-1])):
        found = read(engine_of(loaded), reading(what, prompt, start=70)).states
        assert found is not None
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("model", "what"), [(BOTH[0], "logprobs"), (BOTH[1], "last"), (BOTH[0], "mean")])
def test_what_is_cached_is_used_and_changes_no_bit(model: Any, what: str) -> None:
    loaded = chat_model(*model)
    chat, engine = Chat(loaded), engine_of(loaded)
    messages = dialog([user(Image(picture(1)), words("one", count=40)), user(words("two", count=60)), user("three")])
    asked = chat.request(messages)
    serve(engine, asked)
    # From the last message on, and from the middle of a segment.
    for start in (asked.prompt.tail_start + 2, asked.prompt.segments[1].start + 5):
        request = replace(asked, id=f"{start}", reading=Reading(what, start, 2), replies=False)  # pyright: ignore[reportArgumentType]
        warm, cold = read(engine, request), read(engine_of(loaded), request)
        assert warm.logprobs == cold.logprobs
        assert warm.states is None or torch.equal(warm.states, cold.states)  # pyright: ignore[reportArgumentType]
        first = {"logprobs": start - 1, "mean": 0}.get(what, len(asked.prompt.token_ids) - 1)
        reused = max((each.stop for each in asked.prompt.segments if each.stop <= first), default=0)
        assert (warm.cache.num_cached_tokens, cold.cache.num_cached_tokens) == (reused, 0)


def test_a_beginning_in_common_is_kept_where_it_ends() -> None:
    """Which no turn or run of tokens would do."""
    loaded, engine = chat_model(DENSE), engine_of(chat_model(DENSE))
    given = plain_prompt(loaded, "given", count=150).token_ids
    prompts = []
    for seed in range(4):
        ids = np.concatenate([given, plain_prompt(loaded, seed, count=20).token_ids])
        builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=MIN_SEGMENT)
        prompts.append(builder.plain(ids, ends=[149]))
    found = [read(engine, reading("logprobs", prompt, start=150, retain="shared")) for prompt in prompts]
    # The first one isn't known to have anything in common.
    assert [each.cache.num_cached_tokens for each in found] == [0, 0, 149, 149]
    for prompt, warm in zip(prompts, found, strict=True):
        assert warm.logprobs == read(engine_of(loaded), reading("logprobs", prompt, start=150)).logprobs


def test_others_go_on_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of it everybody gets a token, and the same ones as ever."""
    monkeypatch.setattr(engine_reading, "LOGITS_AT_ONCE", FEW)
    loaded = chat_model(DENSE)
    chat, engine = Chat(loaded), engine_of(loaded, settings=replace(SETTINGS, speculate="off"))
    asked = chat.request([user("Tell me.")], params=GREEDY.with_overrides(max_tokens=100))
    alone = results(engine_of(loaded), asked)[asked.id]
    engine.add(asked)
    while not any(isinstance(output.event, TextDelta) for output in engine.step()):
        pass
    scored = reading("logprobs", plain_prompt(loaded, "long", count=500))
    engine.add(scored)
    between, done = [0], False
    while not done:
        for output in engine.step():
            done |= isinstance(output.event, PromptRead)
            if output.request_id == scored.id:
                between.append(0)
            else:
                between[-1] += 1
        engine.check_integrity()
    assert len(between) > 25, "a step is a bounded part"
    assert max(between) <= 2
    assert sum(between) >= 15
    assert results(engine)[asked.id].token_ids == alone.token_ids


def test_few_logits_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, product = [], Qwen35Model.logits

    def counted(self: Qwen35Model, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return product(self, hidden)

    monkeypatch.setattr(Qwen35Model, "logits", counted)
    monkeypatch.setattr(engine_reading, "LOGITS_AT_ONCE", FEW)
    loaded = chat_model(DENSE)
    read(engine_of(loaded), reading("logprobs", plain_prompt(loaded, "few", count=400), start=10))
    assert sum(rows) == 390
    assert max(rows) == FEW // loaded.config.text.vocab_size
    rows.clear()
    read(engine_of(loaded), reading("mean", plain_prompt(loaded, "few", count=400)))
    assert rows == []


def test_a_prompt_may_be_read_and_answered() -> None:
    loaded = chat_model(DENSE)
    asked = Chat(loaded).request([user(words("both", count=60))])
    both = replace(asked, reading=Reading("logprobs", 1))
    events = [output.event for output in run(engine_of(loaded), both)]
    kinds = [type(event) for event in events if isinstance(event, PromptRead | Finished)]
    assert kinds == [PromptRead, Finished]
    assert isinstance(events[-1], Finished)
    assert events[-1].result.token_ids == results(engine_of(loaded), asked)[asked.id].token_ids


def test_a_prompt_that_has_to_begin_again_is_read_once() -> None:
    loaded = chat_model(DENSE)
    engine, request = engine_of(loaded), reading("logprobs", plain_prompt(loaded, "again", count=200))
    engine.add(request)
    engine.step()
    engine.step()
    (prefilling,) = engine._prefilling
    engine._requeue(prefilling)
    while engine.has_requests:
        outputs = engine.step()
    (found,) = [output.event for output in outputs if isinstance(output.event, PromptRead)]
    assert found.logprobs == read(engine_of(loaded), request).logprobs
    engine.check_integrity()


def test_a_text_may_fill_the_context() -> None:
    loaded = chat_model(DENSE)
    full = plain_prompt(loaded, "full", count=CONTEXT)
    assert len(full.token_ids) == CONTEXT
    assert len(read(engine_of(loaded), reading("logprobs", full)).logprobs) == CONTEXT - 1
    for request in (
        reading("last", plain_prompt(loaded, "full", count=CONTEXT + 1)),
        replace(reading("last", full), replies=True),
    ):
        with pytest.raises(ContextTooLongError):
            engine_of(loaded).add(request)


def test_values_that_are_no_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = chat_model(DENSE)
    product = Qwen35Model.logits
    monkeypatch.setattr(Qwen35Model, "logits", lambda self, hidden: product(self, hidden) * float("nan"))
    request = reading("logprobs", plain_prompt(loaded, "nan", count=40))
    *_, last = [output.event for output in run(engine_of(loaded), request)]
    assert isinstance(last, EngineError)
    assert "values that are not finite" in str(last)


def test_a_conversations_ids_are_answered_as_the_conversation() -> None:
    """With the same bits, from the same cache."""
    loaded = chat_model(DENSE)
    chat, engine = Chat(loaded), engine_of(loaded)
    builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=MIN_SEGMENT)
    asked = chat.request(
        dialog([user(words("a", count=80)), user(words("b", count=60)), user("c")], system="Be brief.")
    )
    by_ids = replace(asked, id="ids", prompt=builder.plain(asked.prompt.token_ids.tolist()))
    (rendered,), (cold,) = serve(engine_of(loaded), asked), serve(engine, by_ids)
    (warm,) = serve(engine, replace(by_ids, id="warm"))
    (again,) = serve(engine, replace(asked, id="again"))
    for other in (cold, warm, again):
        assert torch.equal(other.logits, rendered.logits)
        assert other.result.token_ids == rendered.result.token_ids
    assert cold.result.cache.num_cached_tokens == 0
    assert warm.result.cache.num_cached_tokens == again.result.cache.num_cached_tokens == asked.prompt.tail_start > 0
