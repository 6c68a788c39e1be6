"""Replies held to a JSON schema in all that an engine does with replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
import torch

from qwen35mm.contract import Result, SamplingParams
from qwen35mm.engine import Request
from qwen35mm.engine.output import ThinkingTokens
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.model.decoder import Qwen35Model
from tests.engine.exact import DENSE, Chat, assert_same, assistant, chat_model, cold, serve, user, words
from tests.engine.schemas import CAPTION, SHORT, check, engine_of, params

pytestmark = pytest.mark.usefixtures("checked_here")


@contextmanager
def scripted(loaded: LoadedModel, text: str) -> Iterator[None]:
    """The only request's tokens: each next one of a text (control tokens included) is by far the likeliest."""
    parts = loaded.tokenizer.split_controls(text)
    script = [
        id_ for part in parts for id_ in ([part] if isinstance(part, int) else loaded.tokenizer.encode_plain(part))
    ]
    calls = iter(range(10**6))

    def logits(self: Qwen35Model, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        scores = torch.linspace(1, 0, loaded.config.text.vocab_size).repeat(len(hidden), 1)
        at = next(calls)
        if at < len(script):
            scores[:, script[at]] = 100.0
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen35Model, "logits", logits)
        yield


def scripted_reply(text: str, *, enable_thinking: bool = False, **options: Any) -> Result:
    loaded = chat_model(DENSE)
    request = Chat(loaded).request(
        [user("Describe it")], enable_thinking=enable_thinking, params=params(**{"temperature": 0.0, **options})
    )
    with scripted(loaded, text):
        (answer,) = serve(engine_of(loaded, speculate="off"), request)
    return answer.result


def test_a_reply_that_is_cut_off_says_so(loaded: LoadedModel, chat: Chat) -> None:
    request = chat.request([user("hi")], params=params(CAPTION, max_tokens=6))
    (answer,) = serve(engine_of(loaded), request)
    assert answer.result.finish_reason == "length"
    with pytest.raises(ValueError, match=r"."):
        json.loads(answer.result.text)


def test_a_reply_that_satisfies_the_schema_by_itself_is_the_same() -> None:
    text = '{"caption": "a \\"red\\" é", "tags": ["x", "日本"]}<|im_end|>'
    free, held = (scripted_reply(text, schema=schema) for schema in (None, CAPTION))
    assert free.token_ids == held.token_ids
    assert held.finish_reason == "stop"
    assert check(held, CAPTION)


def test_a_model_that_wants_to_talk_is_held_to_the_schema() -> None:
    """No code fence, no control token, no early end, no second value."""
    for text in ("```json\n{}\n```<|im_end|>", "<think>hm</think><|im_end|>", "<|im_end|>", '"a" and "b"<|im_end|>'):
        result = scripted_reply(text, schema=SHORT)
        assert check(result, SHORT), text
        assert not set(result.token_ids[:-1]) & set(chat_model(DENSE).tokenizer.control_ids.values())


@pytest.mark.parametrize("gap", ["\n\n", "\n", ""])
def test_thinking_is_free_and_ends_as_the_template_writes_it(gap: str, loaded: LoadedModel) -> None:
    thinking = ThinkingTokens.from_tokenizer(loaded.tokenizer)
    assert thinking is not None
    text = 'so } it is {\n</think>{}{"caption": "red", "tags": []}<|im_end|>'.replace("{}", gap, 1)
    result = scripted_reply(text, enable_thinking=True, schema=CAPTION)
    assert result.reasoning == "so } it is {"
    assert check(result, CAPTION)
    behind = result.token_ids[result.token_ids.index(thinking.end_id) + 1 :]
    assert behind[: len(thinking.gap_ids)] == thinking.gap_ids
    if gap == "\n\n":
        assert result.token_ids == scripted_reply(text, enable_thinking=True, schema=None).token_ids


def test_a_thought_is_not_the_end_of_the_reply() -> None:
    """Without an answer nothing satisfies the schema, so the model thinks on until its budget is spent."""
    text = "well<|im_end|>"
    assert scripted_reply(text, enable_thinking=True, schema=None).text == ""
    result = scripted_reply(text, enable_thinking=True, schema=CAPTION, thinking_budget=9)
    assert result.reasoning is not None
    assert result.reasoning.startswith("well")
    assert check(result, CAPTION)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_random_thoughts_under_a_budget(budget: int, loaded: LoadedModel, chat: Chat) -> None:
    engine = engine_of(loaded)
    requests = [
        chat.request(
            [user("hi")],
            enable_thinking=True,
            params=params(CAPTION, seed=seed, temperature=3.0, thinking_budget=budget),
        )
        for seed in range(4)
    ]
    assert sum(check(answer.result, CAPTION) for answer in serve(engine, *requests)) >= 2


def test_the_mask_stays_out_of_the_cache(loaded: LoadedModel, chat: Chat) -> None:
    """What a held reply leaves in the cache is what a free one leaves: the next turn has the same bits as without."""
    engine = engine_of(loaded)
    first = chat.request([user(words("first", count=60))], params=params(CAPTION))
    (held,) = serve(engine, first)
    free = chat.request([user(words("first", count=60))])
    (again,) = serve(engine, free)
    assert again.result.cache.num_cached_tokens > 0
    assert_same(again, cold(loaded, free))
    turn = [user(words("first", count=60)), assistant(held.result.text), user("and now?")]
    following = chat.request(turn, params=params(CAPTION))
    (answer,) = serve(engine, following)
    assert_same(answer, cold(loaded, following))


def continued(loaded: LoadedModel, text: str, sampling: SamplingParams) -> Request:
    return Chat(loaded).request([user("hi"), assistant(text)], continue_reply=True, params=sampling)


def test_a_continued_reply_goes_on_where_it_was(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    text = '{"caption": "é \\"日", "tags": ["a b"]}'
    for stop in (1, 13, 14, 22, len(text)):
        (answer,) = serve(engine, continued(loaded, text[:stop], params(CAPTION, seed=stop)))
        assert answer.result.finish_reason == "stop"
        jsonschema.Draft202012Validator(CAPTION).validate(json.loads(text[:stop] + answer.result.text))
    assert answer.result.text == ""


def test_a_reply_that_does_not_fit_is_not_continued(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    for text in ("A red square", '{"caption": 3', '{"tags": [', '{"caption": "a", "tags": []} '):
        with pytest.raises(RequestError, match="to be continued doesn't fit"):
            engine.add(continued(loaded, text, params(CAPTION)))
    assert not engine.has_work


def test_a_schema_that_cannot_be_followed_to_its_end_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, chat: Chat
) -> None:
    engine = engine_of(loaded)
    bad = chat.request([user("hi")], params=params(CAPTION))
    good = chat.request([user("ho")], params=params(CAPTION, max_tokens=20))
    engine.add(bad)
    while not engine._decoder.running:
        engine.step()
    # A forbidden token puts the parser into its error state, as a limit of it would.
    matcher = engine._decoder.running[0]._matcher
    assert matcher is not None
    matcher._state.consume_token(loaded.tokenizer.encode_plain("}")[0])
    engine.add(good)
    outputs = [output for _ in range(60) for output in engine.step()]
    (error,) = [output.event for output in outputs if isinstance(output.event, RequestError)]
    assert "can no longer follow its JSON schema" in str(error)
    assert any(output.request_id == good.id for output in outputs)
    engine.check_integrity()
