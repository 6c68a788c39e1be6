"""The scripted model answers as the engine would: channels, calls, cache hits."""

from __future__ import annotations

import json

import openai

from qwen35mm.model import LoadedModel
from tests.agents.scripted import Said, calls, is_continued, script_of, serving_script, shape_of

TOOLS: list = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"days": {"type": "integer"}, "place": {"type": "string"}}},
        },
    }
]


def test_a_script_is_answered_in_channels_and_calls_and_its_next_turn_hits_the_cache(demo: LoadedModel):
    script = script_of([calls("weather", days=3, place="Bonn"), Said("It rains.", thinking="So be it.")])
    with serving_script(demo, script) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        messages: list = [{"role": "user", "content": "Bonn? " * 200}]
        ask = {"model": "default", "tools": TOOLS, "reasoning_effort": "medium"}
        first = client.chat.completions.create(messages=messages, **ask)
        call = first.choices[0].message.tool_calls[0]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        deltas = list(client.chat.completions.create(messages=messages, stream=True, **ask))

    assert json.loads(call.function.arguments) == {"days": 3, "place": "Bonn"}
    texts = [chunk.choices[0].delta for chunk in deltas if chunk.choices]
    assert "".join(delta.content or "" for delta in texts) == "It rains."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in texts) == "So be it."
    assert len([delta for delta in texts if delta.content]) > 1
    before, after = server.backend.asked
    assert is_continued(before.prompt, after.prompt)
    assert (before.num_cached_tokens, after.num_cached_tokens > 0) == (0, True)
    assert [exchange.body["messages"][0]["role"] for exchange in server.exchanges] == ["user", "user"]
    assert server.refused == []


def test_a_shape_has_no_texts():
    body = {"model": "m", "tools": [{"name": "Read", "description": "Reads", "input_schema": {"type": "object"}}]}
    tools = [{"name": "Read", "description": "<5 characters>", "input_schema": "<schema>"}]
    assert shape_of(body) == {"model": "m", "tools": tools}
