"""LiteLLM's SDK: as an OpenAI server, as hosted vLLM, and as Anthropic's."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import BASE, LONG, MODEL, PERSON, TOOL, png, run

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": "none"}
VLLM = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{BASE}/v1", "api_key": "none"}
CLAUDE = {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": "none"}
litellm.num_retries = 0


def asked(text="Weather in Rome?"):
    return [{"role": "user", "content": text}]


def plain():
    for where in (OPENAI, VLLM, CLAUDE):
        answer = litellm.completion(messages=asked("Hello"), **where)
        assert "sunny" in answer.choices[0].message.content, answer
        assert answer.usage.prompt_tokens > 0


def streamed():
    for where in (OPENAI, VLLM, CLAUDE):
        chunks = list(
            litellm.completion(messages=asked("Hello"), stream=True, stream_options={"include_usage": True}, **where)
        )
        assert "sunny" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks
        assert litellm.stream_chunk_builder(chunks).choices[0].finish_reason == "stop"


def _tools_twice(where, stream, **more):
    messages = asked()
    for turn in range(3):
        answer = litellm.completion(messages=messages, tools=[TOOL], stream=stream, **more, **where)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if turn == 0:
            assert answer.choices[0].finish_reason == "tool_calls", answer
            call = message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"city": "Rome"}, call
            if more:
                assert message.reasoning_content, message
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Sunny."})
        else:
            assert "sunny" in message.content, answer
            messages += asked("And tomorrow?")


def tools():
    for where in (OPENAI, VLLM, CLAUDE):
        _tools_twice(where, False)
        _tools_twice(where, True)


def thinking_and_tools_openai():
    for stream in (False, True):
        _tools_twice(OPENAI, stream, reasoning_effort="low", allowed_openai_params=["reasoning_effort"])


def thinking_and_tools_vllm():
    for stream in (False, True):
        _tools_twice(VLLM, stream, reasoning_effort="low")


def thinking_and_tools_anthropic():
    for stream in (False, True):
        _tools_twice(
            CLAUDE, stream, thinking={"type": "enabled", "budget_tokens": 1024}, allowed_openai_params=["thinking"]
        )


def image():
    for where in (OPENAI, VLLM, CLAUDE):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}", "format": "image/png"}}
        content = [{"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}}, part]
        answer = litellm.completion(messages=[{"role": "user", "content": content}], **where)
        assert "1 media" in answer.choices[0].message.content, answer


def structured():
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for where in (OPENAI, VLLM, CLAUDE):
        answer = litellm.completion(messages=asked("Who?"), response_format=schema, **where)
        assert json.loads(answer.choices[0].message.content)["age"] == 3, answer


def overflow():
    for where in (OPENAI, VLLM, CLAUDE):
        try:
            litellm.completion(messages=asked(LONG), **where)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"no ContextWindowExceededError as {where['model']}")


def responses():
    answer = litellm.responses(input="Hello", **OPENAI)
    assert "sunny" in answer.output[-1].content[0].text, answer
    events = list(litellm.responses(input="Hello", stream=True, **OPENAI))
    assert events[-1].type == "response.completed", events[-1]


if __name__ == "__main__":
    run(
        plain,
        streamed,
        tools,
        thinking_and_tools_openai,
        thinking_and_tools_vllm,
        thinking_and_tools_anthropic,
        image,
        structured,
        overflow,
        responses,
    )
