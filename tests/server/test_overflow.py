"""Clients shorten a conversation and go on if they can tell from an error that it is too long."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import HTTP

LONG = "word " * 10_000
TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
# What clients search for in the message of an error, by client; each needs one of its own.
PATTERNS = {
    "LiteLLM": r"(?i)this model's maximum context length is",
    "LiteLLM's Anthropic": r"prompt is too long",
    "Claude Code": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "opencode and pi": r"(?i)maximum context length is \d+ tokens",
    "Cline": r"(?i)prompt is too long.*tokens?\s*>\s*\d+\s*maximum",
    "Cline's agents": r"(?i)tokens?\s*>\s*[\d,]+\s*(maximum|limit)",
    "OpenHands": r"(?i)prompt is too long",
    "openclaw": r"(?i)maximum context length",
}
# What makes some of them think of a limit of requests instead.
NOT_IN_IT = r"(?i)rate.?limit|too many requests|quota|\b429\b|throttl"


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
    assert [client for client, pattern in PATTERNS.items() if not re.search(pattern, error["message"])] == []
    assert not re.search(NOT_IN_IT, error["message"])
    if param is not None:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
