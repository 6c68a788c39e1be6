"""Parameters that a reply needs the host for, and what is told of its tokens, on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.generation.logits_process import TypicalLogitsWarper

from qwen35mm.contract import Finished, Result, SamplingParams, TextDelta
from qwen35mm.engine import Engine
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from tests.engine.exact import DENSE, Answer, Chat, chat_checkpoint, results, serve, user, words
from tests.engine.schemas import engine_of

DRAWN = SamplingParams(temperature=1.2, top_k=40, seed=5, max_tokens=24, presence_penalty=0.5)


def answer(loaded: LoadedModel, chat: Chat, params: SamplingParams, **options: Any) -> Answer:
    (found,) = serve(engine_of(loaded), chat.request([user(words("parameters"))], params=params, **options))
    return found


def deltas_of(engine: Engine, request: Any) -> tuple[list[TextDelta], Result]:
    engine.add(request)
    deltas: list[TextDelta] = []
    while True:
        for output in engine.step():
            if isinstance(output.event, TextDelta):
                deltas.append(output.event)
            elif isinstance(output.event, Finished):
                return deltas, output.event.result


@pytest.mark.parametrize("params", [DRAWN, replace(DRAWN, temperature=0.0, frequency_penalty=0.7)])
def test_logprobs_are_of_the_models_own_distribution(params: SamplingParams, loaded: LoadedModel, chat: Chat) -> None:
    """Whatever the parameters are, and without changing what is chosen."""
    plain = answer(loaded, chat, params)
    told = answer(loaded, chat, replace(params, logprobs=3))
    assert told.result.token_ids == plain.result.token_ids
    assert plain.result.logprobs is None
    assert told.result.logprobs is not None
    assert len(told.result.logprobs) == len(told.result.token_ids)
    for each, token_id, logits in zip(told.result.logprobs, told.result.token_ids, told.logits, strict=True):
        expected = torch.log_softmax(logits.double(), dim=0)
        values, ids = expected.topk(3)
        assert each.token_id == token_id
        assert each.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
        assert [top.token_id for top in each.top] == ids.tolist()
        assert [top.logprob for top in each.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert bytes(each.bytes) == loaded.tokenizer.token_bytes(token_id)


def test_logprobs_are_those_of_transformers(chat: Chat) -> None:
    loaded = chat.loaded
    result = answer(loaded, chat, replace(DRAWN, logprobs=5, logit_bias={7: 2.0})).result
    oracle = Qwen3_5ForConditionalGeneration.from_pretrained(chat_checkpoint(DENSE), dtype=torch.float32).eval()
    token_ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    with torch.inference_mode():
        logits = oracle(token_ids).logits[0, len(result.prompt_token_ids) - 1 : -1]
    assert result.logprobs is not None
    for each, expected in zip(result.logprobs, torch.log_softmax(logits, dim=-1), strict=True):
        assert each.logprob == pytest.approx(expected[each.token_id].item(), abs=1e-3)
        assert [top.logprob for top in each.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-3)


# What other programs keep of a model's logits [vocab]: True for each token that may be chosen.
KEPT: list[tuple[SamplingParams, Callable[[torch.Tensor], torch.Tensor]]] = [
    # llama.cpp's llama_sampler_top_n_sigma.
    (
        SamplingParams(temperature=2.0, top_n_sigma=1.5),
        lambda logits: logits >= logits.max() - 1.5 * logits.std(correction=0),
    ),
    (
        SamplingParams(temperature=2.0, typical_p=0.3),
        lambda logits: TypicalLogitsWarper(0.3)(torch.LongTensor([[]]), logits[None] / 2.0)[0] > -torch.inf,
    ),
]


@pytest.mark.parametrize(("params", "keep"), KEPT)
def test_each_token_is_one_that_other_programs_keep(
    params: SamplingParams, keep: Callable[[torch.Tensor], torch.Tensor], loaded: LoadedModel, chat: Chat
) -> None:
    drawn = replace(params, seed=5, max_tokens=40, ignore_eos=True)
    found = answer(loaded, chat, drawn)
    kept = torch.stack([keep(logits[: loaded.tokenizer.vocab_size]) for logits in found.logits])
    chosen = torch.tensor(found.result.token_ids)
    assert kept[torch.arange(len(chosen)), chosen].all()
    assert kept.sum(1).float().mean() > 1.5, "more than the likeliest is left"
    free = answer(loaded, chat, replace(SamplingParams(), temperature=params.temperature, seed=5, max_tokens=40))
    assert free.result.token_ids != found.result.token_ids


def test_each_token_is_told_with_a_piece_of_text(loaded: LoadedModel, chat: Chat) -> None:
    """None is lost and none comes twice: those of characters in parts, of the thinking's marks, of a stop string."""
    for seed in range(4):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=40, logprobs=0, thinking_budget=8, stop=("e",))
        request = chat.request([user("hi")], params=params, enable_thinking=True)
        deltas, result = deltas_of(engine_of(loaded), request)
        assert result.logprobs is not None
        ended = result.token_ids[-1] in loaded.eos_ids
        told = [each for delta in deltas for each in delta.logprobs]
        assert told == list(result.logprobs[: len(result.logprobs) - ended])
        assert not any(each.top for each in told)
        thought = [each.token_id for delta in deltas if delta.channel == "reasoning" for each in delta.logprobs]
        closing = loaded.tokenizer.control_ids["</think>"]
        assert thought[-1] == closing or closing not in result.token_ids


def test_biases_are_added_before_all_else(loaded: LoadedModel, chat: Chat) -> None:
    plain = answer(loaded, chat, DRAWN)
    (token_id,) = loaded.tokenizer.encode_plain("z")
    forced = answer(loaded, chat, replace(DRAWN, logit_bias={token_id: 100}, presence_penalty=0.0)).result
    assert set(forced.token_ids) == {token_id}
    banned = dict.fromkeys(set(plain.result.token_ids), -100)
    assert set(answer(loaded, chat, replace(DRAWN, logit_bias=banned)).result.token_ids).isdisjoint(banned)
    told = answer(loaded, chat, replace(DRAWN, logit_bias={token_id: 0.5}, logprobs=0))
    assert told.result.logprobs is not None
    own = torch.log_softmax(told.logits[0].double(), dim=0)[told.result.token_ids[0]].item()
    assert told.result.logprobs[0].logprob == pytest.approx(own, abs=1e-5)


def biased_to_end(loaded: LoadedModel, **options: Any) -> SamplingParams:
    """A reply that would end at once."""
    return SamplingParams(**{"logit_bias": dict.fromkeys(loaded.eos_ids, 60.0), "seed": 1, "max_tokens": 12, **options})


def test_a_reply_ends_after_its_fewest_tokens(loaded: LoadedModel, chat: Chat) -> None:
    assert len(answer(loaded, chat, biased_to_end(loaded)).result.token_ids) == 1
    later = answer(loaded, chat, biased_to_end(loaded, min_tokens=7)).result
    assert (len(later.token_ids), later.finish_reason, later.stopped_by) == (8, "stop", None)
    assert loaded.eos_ids.isdisjoint(later.token_ids[:-1])
    goes_on = answer(loaded, chat, biased_to_end(loaded, ignore_eos=True)).result
    assert (len(goes_on.token_ids), goes_on.finish_reason, goes_on.text) == (12, "length", "")
    assert set(goes_on.token_ids) <= loaded.eos_ids


def test_a_token_ends_the_reply_and_says_so(loaded: LoadedModel, chat: Chat) -> None:
    plain = answer(loaded, chat, DRAWN).result
    stop = next(each for at, each in enumerate(plain.token_ids) if at > 4 and each not in plain.token_ids[:at])
    place = plain.token_ids.index(stop)
    stopped = answer(loaded, chat, replace(DRAWN, stop_token_ids=(stop, 3))).result
    assert (stopped.finish_reason, stopped.stopped_by) == ("stop", stop)
    assert stopped.token_ids == plain.token_ids[: place + 1]
    assert stopped.text == loaded.tokenizer.decode(plain.token_ids[:place]).rstrip("�") or "�" in stopped.text
    later = answer(loaded, chat, replace(DRAWN, stop_token_ids=(stop, 3), min_tokens=place + 1)).result
    assert stop not in later.token_ids[: place + 1]


@pytest.mark.parametrize(
    ("kinds", "ahead"),
    [
        ([DRAWN, replace(DRAWN, min_tokens=6), replace(DRAWN, frequency_penalty=0.5)], True),
        ([DRAWN, replace(DRAWN, min_tokens=6), replace(DRAWN, logit_bias={5: 3.0}, logprobs=2), DRAWN], False),
    ],
)
def test_replies_that_need_the_host_change_nobody_else(
    kinds: list[SamplingParams], ahead: bool, loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside default requests, in one batch, and before and after the tokens for which they need it; also where steps
    are launched before the tokens of the ones before are known, as on a GPU."""
    requests = [chat.request([user(words("company", at))], params=each) for at, each in enumerate(kinds)]
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: ahead)
    together = results(engine_of(loaded), *requests)
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: False)
    for at, each in enumerate(kinds):
        (alone,) = serve(engine_of(loaded), chat.request([user(words("company", at))], params=each))
        assert alone.result.token_ids == together[requests[at].id].token_ids


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=(9_999,)), SamplingParams(logit_bias={9_999: 1})])
def test_ids_of_no_token_are_refused(params: SamplingParams, loaded: LoadedModel, chat: Chat) -> None:
    with pytest.raises(RequestError, match=r"no token 9,999 here; ids are 0 to \d+"):
        engine_of(loaded).add(chat.request([user("hi")], params=params))
