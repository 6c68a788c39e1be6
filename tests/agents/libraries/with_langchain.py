"""LangChain and LangGraph, with OpenAI's chat models (chat completions and responses) and Anthropic's."""

from __future__ import annotations

from checks import BASE, LONG, MODEL, png, run
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

asked: list[str] = []


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return "Sunny."


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the first name")
    age: int


def _openai(**more):
    return ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key="none", max_retries=0, **more)


def _claude(**more):
    return ChatAnthropic(model=MODEL, base_url=BASE, api_key="none", max_retries=0, **more)


def _models():
    return {"chat": _openai(), "responses": _openai(use_responses_api=True), "anthropic": _claude()}


def _thinking():
    return {
        "chat": _openai(reasoning_effort="low"),
        "responses": _openai(use_responses_api=True, reasoning={"effort": "low", "summary": "auto"}),
        "anthropic": _claude(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=4096),
    }


def plain():
    for name, model in _models().items():
        answer = model.invoke("Hello")
        assert "sunny" in answer.text, (name, answer)
        assert answer.usage_metadata["input_tokens"] > 0


def streamed():
    for name, model in _models().items():
        chunks = list(model.stream("Hello"))
        assert "sunny" in "".join(chunk.text for chunk in chunks), (name, chunks)


def _agent_twice(model):
    asked.clear()
    agent = create_agent(model, [weather], system_prompt="You know the weather.")
    state = agent.invoke({"messages": [{"role": "user", "content": "Weather in Rome?"}]})
    assert "sunny" in state["messages"][-1].text, state
    assert asked == ["Rome"], asked
    state = agent.invoke({"messages": [*state["messages"], {"role": "user", "content": "And tomorrow?"}]})
    assert "sunny" in state["messages"][-1].text, state
    asked.clear()
    events = list(agent.stream({"messages": [{"role": "user", "content": "Weather in Rome?"}]}, stream_mode="messages"))
    assert asked == ["Rome"], asked
    assert "sunny" in "".join(chunk.text for chunk, _ in events)


def agent():
    for model in _models().values():
        _agent_twice(model)


def agent_thinking_chat():
    _agent_twice(_thinking()["chat"])


def agent_thinking_responses():
    _agent_twice(_thinking()["responses"])


def agent_thinking_anthropic():
    _agent_twice(_thinking()["anthropic"])


def agent_structured_by_tool():
    for name, model in _models().items():
        agent = create_agent(model, [weather], response_format=ToolStrategy(Person))
        found = agent.invoke({"messages": [{"role": "user", "content": "Who?"}]})["structured_response"]
        assert found.age == 3, (name, found)


def agent_structured_by_provider():
    for name, model in _models().items():
        agent = create_agent(model, [weather], response_format=ProviderStrategy(Person))
        found = agent.invoke({"messages": [{"role": "user", "content": "Who?"}]})["structured_response"]
        assert found.age == 3, (name, found)


def structured_json_schema():
    for name, model in _models().items():
        found = model.with_structured_output(Person, method="json_schema").invoke("Who?")
        assert found.age == 3, (name, found)


def structured_json_schema_with_strict_tools():
    for name, model in list(_models().items())[:2]:
        more = {"tools": [weather], "strict": True, "include_raw": True}
        found = model.with_structured_output(Person, method="json_schema", **more).invoke("Who?")
        assert found["raw"], (name, found)


def structured_function_calling():
    for name, model in _models().items():
        found = model.with_structured_output(Person, method="function_calling").invoke("Who?")
        assert found.age == 3, (name, found)


def structured_json_mode():
    for model in list(_models().values())[:2]:
        assert model.with_structured_output(None, method="json_mode").invoke("Say a JSON object") == {
            "name": "Ann",
            "age": 3,
        }


def strict_tools_and_choice():
    for model in list(_models().values())[:2]:
        bound = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
        assert bound.invoke("Weather in Rome?").tool_calls[0]["args"] == {"city": "Rome"}
    bound = _claude().bind_tools([weather], tool_choice="any")
    assert bound.invoke("Weather in Rome?").tool_calls[0]["args"] == {"city": "Rome"}


def image():
    block = {"type": "image", "base64": png(), "mime_type": "image/png"}
    for name, model in _models().items():
        answer = model.invoke([{"role": "user", "content": [{"type": "text", "text": "See"}, block]}])
        assert "1 media" in answer.text, (name, answer)


def broken_arguments():
    """A call that LangChain could not read goes back with the history."""
    from langchain_core.messages import AIMessage, HumanMessage, InvalidToolCall, ToolMessage

    broken = InvalidToolCall(name="weather", args='{"city": "Ro', id="c1", error="no JSON", type="invalid_tool_call")
    messages = [
        HumanMessage("Weather?"),
        AIMessage("", invalid_tool_calls=[broken]),
        ToolMessage("Broken", tool_call_id="c1"),
    ]
    assert "sunny" in _openai().invoke([*messages, HumanMessage("Again")]).text


def overflow():
    for name, model in _models().items():
        try:
            model.invoke(LONG)
        except ContextOverflowError:
            continue
        raise AssertionError(f"no error of {name}")


if __name__ == "__main__":
    run(
        plain,
        streamed,
        agent,
        agent_thinking_chat,
        agent_thinking_responses,
        agent_thinking_anthropic,
        agent_structured_by_tool,
        agent_structured_by_provider,
        structured_json_schema,
        structured_json_schema_with_strict_tools,
        structured_function_calling,
        structured_json_mode,
        strict_tools_and_choice,
        image,
        broken_arguments,
        overflow,
    )
