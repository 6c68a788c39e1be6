"""Schemas that would take minutes, gigabytes or the process are refused, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from qwen35mm.engine import grammar
from tests.engine.schemas import HOSTILE
from tests.server.conftest import PATIENCE_S

# This one takes seconds of processor time and little memory, wherever it is checked.
SLOW = HOSTILE["keys by pattern"][0]
HELLO = [{"role": "user", "content": "hi"}]
_FORMAT = {"type": "json_schema", "json_schema": {"name": "slow", "schema": SLOW}}
_TOOL = {"name": "slow", "parameters": {"type": "object", "properties": {"a": SLOW}, "required": ["a"]}}
# The path, the body, and what of it is to blame.
BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "chat completions": ("/v1/chat/completions", {"messages": HELLO, "response_format": _FORMAT}, None),
    "chat completions, streamed": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": _FORMAT, "stream": True},
        None,
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
        "tools",
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "slow", "schema": SLOW}}},
        None,
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 9,
            "messages": HELLO,
            "tools": [{"name": "slow", "input_schema": _TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
        None,
    ),
}


async def test_a_hostile_schema_holds_up_no_other_request(address: str) -> None:
    grammar._verdicts.clear()
    path, body, _ = BODIES["chat completions"]
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S * 5) as client:
        # More of them than there are threads that check.
        several = [asyncio.ensure_future(client.post(path, json=body)) for _ in range(3)]
        await asyncio.sleep(0.2)  # they are on their way
        # Its schema takes seconds of processor time, and this a hundredth of one.
        models = await client.get("/v1/models")
        other = await client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1})
        assert not any(each.done() for each in several)
        assert (models.status_code, other.status_code) == (200, 200)
        assert [each.status_code for each in await asyncio.gather(*several)] == [400] * 3


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_schema_is_a_fault_of_its_request(name: str, address: str) -> None:
    """The schema is known by now: what was found about it is told again."""
    path, body, param = BODIES[name]
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S * 5) as client:
        for _ in range(2):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400, refused.text
            error = json.loads(refused.text)["error"]
            assert "checking it takes more than" in error["message"]
            assert error.get("param") == param


async def test_what_cannot_be_followed_is_refused_before_a_reply_begins(address: str) -> None:
    schema, words = HOSTILE["optional properties"]
    held = {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S * 5) as client:
        refused = await client.post("/v1/chat/completions", json={"messages": HELLO, "response_format": held})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
