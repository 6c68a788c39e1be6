"""Clients shorten a conversation and go on if they can tell from an error that it is too long."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import HTTP

LONG = "word " * 10_000
TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", TURN, "messages"),
        ("/v1/messages", {"model": "demo", **TURN}, None),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_know(
    address: str, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = HTTP.post(f"{address}{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    told = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum\.", error["message"])
    assert told
    assert int(told[1]) >= 10_000
    assert int(told[2]) == 8192
    assert "This model's maximum context length is 8192 tokens." in error["message"]
    if param is not None:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
