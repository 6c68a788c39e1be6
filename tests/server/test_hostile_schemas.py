"""Schemas that would take minutes, gigabytes or the process are refused, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from qwen35mm.engine import grammar
from tests.engine.schemas import HOSTILE
from tests.server.conftest import PATIENCE_S

# This one takes seconds of processor time and little memory; for what follows from the other, there is no room.
SLOW, (MANY, WORDS) = HOSTILE["keys by pattern"][0], HOSTILE["optional properties"]
HELLO = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
FORMAT = {"type": "json_schema", "name": "held", "schema": SLOW}


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "held", "schema": schema}}


def client_of(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, verify=False, timeout=PATIENCE_S * 5)


async def test_a_hostile_schema_holds_up_no_other_request(address: str) -> None:
    grammar._verdicts.clear()
    body = {"messages": HELLO, "response_format": held(SLOW)}
    async with client_of(address) as client:
        # More of them than there are threads that check.
        several = [asyncio.ensure_future(client.post(CHAT, json=body)) for _ in range(3)]
        await asyncio.sleep(0.2)  # they are on their way
        # Its schema takes three seconds of processor time, and this a hundredth of one.
        models = await client.get("/v1/models")
        other = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
        assert not any(each.done() for each in several)
        assert (models.status_code, other.status_code) == (200, 200)
        # The schema is known by then: what was found about it is told again.
        refused = [*await asyncio.gather(*several), await client.post(CHAT, json={**body, "stream": True})]
        refused.append(await client.post("/v1/responses", json={"input": "hi", "text": {"format": FORMAT}}))
    for each in refused:
        assert (each.status_code, each.json()["error"]["param"]) == (400, None), each.text
        assert "checking it takes more than" in each.json()["error"]["message"]


_TOOL = {"name": "held", "parameters": {"type": "object", "properties": {"a": MANY}, "required": ["a"]}}
_CALLED = {"messages": HELLO, "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"}
_ANTHROPIC = {"tools": [{"name": "held", "input_schema": _TOOL["parameters"]}], "tool_choice": {"type": "any"}}


async def test_a_hostile_schema_is_refused_before_a_reply_begins(address: str) -> None:
    messages = {**_ANTHROPIC, "model": "demo", "max_tokens": 9, "messages": HELLO}
    async with client_of(address) as client:
        for path, body, param in (
            (CHAT, {"messages": HELLO, "response_format": held(MANY)}, None),
            (CHAT, _CALLED, "tools"),
            ("/v1/messages", messages, None),
        ):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"].get("param")) == (400, param), refused.text
            assert WORDS in refused.json()["error"]["message"]
