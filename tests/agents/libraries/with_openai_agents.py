"""OpenAI's Agents SDK, on chat completions and on responses."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE, LONG, MODEL, png, run
from openai import AsyncOpenAI, BadRequestError
from openai.types.shared import Reasoning
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
MODELS = {"chat": OpenAIChatCompletionsModel(MODEL, client), "responses": OpenAIResponsesModel(MODEL, client)}
THINKING = ModelSettings(reasoning=Reasoning(effort="low", summary="auto"), verbosity="low", store=False)
# A client belongs to one event loop.
loop = asyncio.new_event_loop()
asked: list[str] = []


def ran(*arguments, **more):
    return loop.run_until_complete(Runner.run(*arguments, **more))


@function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return "Sunny."


class Person(BaseModel):
    name: str
    age: int


def plain():
    for name, model in MODELS.items():
        answer = ran(Agent("a", instructions="Be brief.", model=model), "Hello")
        assert "sunny" in answer.final_output, name


def _twice(name, **more):
    asked.clear()
    agent = Agent("a", tools=[weather], model=MODELS[name], **more)
    first = ran(agent, "Weather in Rome?")
    assert "sunny" in first.final_output
    assert asked == ["Rome"]
    second = ran(agent, [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}])
    assert "sunny" in second.final_output

    async def streamed():
        answer = Runner.run_streamed(agent, "Weather in Rome?")
        kinds = [event.type async for event in answer.stream_events()]
        return answer, kinds

    asked.clear()
    answer, kinds = loop.run_until_complete(streamed())
    assert "sunny" in answer.final_output
    assert "run_item_stream_event" in kinds
    assert asked == ["Rome"]


def tools():
    for name in MODELS:
        _twice(name)


def thinking_and_tools_chat():
    _twice("chat", model_settings=THINKING)


def thinking_and_tools_responses():
    _twice("responses", model_settings=THINKING)


def structured():
    for name, model in MODELS.items():
        answer = ran(Agent("a", output_type=Person, model=model), "Who?")
        assert answer.final_output.age == 3, name


def handoff():
    for name, model in MODELS.items():
        other = Agent("other", model=model, instructions="Answer.")
        answer = ran(Agent("a", handoffs=[other], model=model), "Hello")
        assert answer.last_agent.name == "other", name
        assert "sunny" in answer.final_output


def previous_response():
    agent = Agent("a", tools=[weather], model=MODELS["responses"])
    first = ran(agent, "Weather in Rome?")
    second = ran(agent, "And tomorrow?", previous_response_id=first.last_response_id)
    assert "sunny" in second.final_output


def image():
    parts = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{png()}", "detail": "auto"},
    ]
    for name, model in MODELS.items():
        answer = ran(Agent("a", model=model), [{"role": "user", "content": parts}])
        assert "1 media" in answer.final_output, name


def overflow():
    for model in MODELS.values():
        try:
            ran(Agent("a", model=model), LONG)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            continue
        raise AssertionError("no error")


if __name__ == "__main__":
    run(
        plain,
        tools,
        thinking_and_tools_chat,
        thinking_and_tools_responses,
        structured,
        handoff,
        previous_response,
        image,
        overflow,
    )
