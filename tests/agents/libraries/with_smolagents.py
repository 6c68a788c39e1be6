"""smolagents: its model for OpenAI's servers, and both kinds of agent."""

from __future__ import annotations

import base64
import io

from checks import BASE, LONG, MODEL, error_of, png, run
from PIL import Image
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id=MODEL, api_base=f"{BASE}/v1", api_key="none")
asked: list[str] = []


@tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    asked.append(city)
    return "Sunny."


def plain():
    assert "sunny" in model([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]).content


def streamed():
    deltas = list(model.generate_stream([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]))
    assert "sunny" in "".join(delta.content or "" for delta in deltas)


def tool_calling_agent():
    for stream in (False, True):
        asked.clear()
        agent = ToolCallingAgent(tools=[weather], model=model, max_steps=4, stream_outputs=stream)
        assert agent.run("Weather in Rome?") == "some answer"
        assert asked == ["Rome"]
        assert agent.run("And tomorrow?", reset=False)


def code_agent():
    agent = CodeAgent(tools=[weather], model=model, max_steps=3)
    answer = agent.run('SAY<<Thought: I answer.\n<code>\nfinal_answer(weather("Rome"))\n</code>>>')
    assert answer == "Sunny.", answer


def code_agent_structured():
    agent = CodeAgent(tools=[weather], model=model, max_steps=2, use_structured_outputs_internally=True)
    agent.run("Weather in Rome?")
    errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    assert not [error for error in errors if "Error in generating" in str(error)], errors


def image():
    picture = Image.open(io.BytesIO(base64.b64decode(png())))
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3)
    assert agent.run("Weather in Rome?", images=[picture]) == "some answer"


def structured():
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    assert (
        model([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], response_format=schema).content
        == '{"a": 3}'
    )


def overflow():
    asked = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    assert "context" in str(error_of(lambda: model(asked)))


if __name__ == "__main__":
    run(plain, streamed, tool_calling_agent, code_agent, code_agent_structured, image, structured, overflow)
