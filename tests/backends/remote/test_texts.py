"""Log-probabilities as servers tell them, and servers that can't tell them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qwen35mm.backends.remote import connection
from qwen35mm.backends.remote.faults import Fault
from qwen35mm.backends.remote.logprobs import read_logprobs
from qwen35mm.contract import SamplingParams
from qwen35mm.errors import RequestError
from tests.backends.remote.asking import Asker, events_of
from tests.backends.remote.server import ModelServer, chunk, event, sends

# llama-server's has an id, and None in place of bytes is allowed.
ENTRY = {"id": 7, "token": "é", "bytes": None, "logprob": -0.5, "top_logprobs": [{"token": "e", "logprob": -0.1}]}


def test_both_of_openais_forms_are_read() -> None:
    (told,) = read_logprobs({"content": [ENTRY]})
    assert (told.text, told.logprob, told.bytes, told.token_id) == ("é", -0.5, (0xC3, 0xA9), 7)
    assert [(each.text, each.logprob) for each in told.top] == [("e", -0.1)]
    assert read_logprobs(None) == read_logprobs({"content": None}) == []
    first, second = read_logprobs(
        {
            "tokens": ["A", "bytes:\\xc3"],
            "token_logprobs": [None, -2.0],
            "top_logprobs": [None, {"x": -3.0, "bytes:\\xc3": -2.0}],
        }
    )
    assert math.isnan(first.logprob)
    assert (second.text, second.bytes, second.logprob) == ("�", (0xC3,), -2.0)
    assert [each.logprob for each in second.top] == [-2.0, -3.0]


@pytest.mark.parametrize(
    "told",
    [
        3,
        "a",
        [1],
        {"content": 3},
        {"content": [3]},
        {"content": [{"token": "a"}]},
        {"content": [{**ENTRY, "logprob": "high"}]},
        {"content": [{**ENTRY, "bytes": [999]}]},
        {"content": [{**ENTRY, "top_logprobs": [[]]}]},
        {"tokens": ["a"]},
        {"tokens": ["a"], "token_logprobs": [-1, -2]},
        {"tokens": [1], "token_logprobs": [-1]},
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [[1]]},
    ],
)
def test_other_forms_are_damage(told: Any) -> None:
    with pytest.raises(Fault):
        read_logprobs(told)


async def test_a_server_that_passes_logprobs_over_tells_none(server: ModelServer, asker: Asker) -> None:
    result = await asker.ask(params=SamplingParams(logprobs=1))
    assert server.bodies[-1]["top_logprobs"] == 1
    assert result.logprobs is None


async def test_those_of_a_piece_without_text_come_with_the_next(server: ModelServer, asker: Asker) -> None:
    parts = [chunk({"content": text}) for text in ("", "red")]
    for part in parts:
        part["choices"][0]["logprobs"] = {"content": [ENTRY]}
    server.acts.append(sends([*map(event, parts), event(chunk(finish_reason="stop")), b"data: [DONE]\n\n"]))
    events: list[Any] = await events_of(asker.backend(whole=False), params=SamplingParams(logprobs=1))
    *_, delta, end = events
    assert [len(delta.logprobs), len(end.result.logprobs)] == [2, 2]


WHOLE = {"tokens": ["A", " red"], "token_logprobs": [None, -1.0], "text_offset": [0, 1]}


def test_a_server_that_does_not_score_is_refused(server: ModelServer, asker: Asker) -> None:
    for answer in (
        {"choices": [{"text": "sky", "logprobs": None}], "usage": {"prompt_tokens": 2}},
        {"choices": [{"text": "sky", "logprobs": {**WHOLE, "tokens": ["A"]}}], "usage": {"prompt_tokens": 2}},
        {"choices": [{"text": "sky", "logprobs": WHOLE}]},
        {"choices": [{"text": "sky", "logprobs": WHOLE}], "usage": {"prompt_tokens": 9}},
        {"choices": [{"text": "sky", "logprobs": WHOLE}], "usage": {"prompt_tokens": -1}},
        {"choices": []},
        {"error": "?"},
        [],
    ):
        server.pages["/v1/completions"] = answer
        with asker.backend() as backend, pytest.raises(RequestError, match="can't do this"):
            backend.score("A red")


def test_a_server_that_does_not_embed_is_refused(server: ModelServer, asker: Asker) -> None:
    for vector in ([], [[1.0]], ["a"], None, [math.nan], 3):
        server.pages["/v1/embeddings"] = {"data": [{"embedding": vector}]}
        with asker.backend() as backend, pytest.raises(RequestError, match="can't do this"):
            backend.embed("A red")


def test_a_score_counts_what_lies_behind_the_first_text(server: ModelServer, asker: Asker) -> None:
    told = {**WHOLE, "tokens": ["A", " red", "x"], "token_logprobs": [None, -1.0, -9.0], "text_offset": [0, 1, 5]}
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    server.pages["/v1/completions"] = lambda _: {"choices": [{"logprobs": told}], "usage": usage}
    with asker.backend() as backend:
        score = backend.score(" red", "A")
    assert (score.logprob, score.num_prompt_tokens, score.cache.num_cached_tokens) == (-1.0, 2, 1)


def test_a_long_text_is_scored(server: ModelServer, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 20_000
    told = {"tokens": ["A"] * num, "token_logprobs": [None, *[-1.0] * (num - 1)], "text_offset": [*range(num)]}
    told["top_logprobs"] = [None, *[{"A": -1.0, "an other token": -1.25}] * (num - 1)]
    answer = {"choices": [{"text": "A", "logprobs": told}], "usage": {"prompt_tokens": num - 1}}
    assert len(json.dumps(answer)) > 2**20
    server.pages["/v1/completions"] = answer
    with asker.backend() as backend:
        assert backend.score("A" * (num - 1)).num_prompt_tokens == num - 1
        monkeypatch.setattr(connection, "_MAX_ANSWER_BYTES", 2**20)
        with pytest.raises(RequestError, match="is longer than 1 MiB"):
            backend.score("A" * (num - 1))
