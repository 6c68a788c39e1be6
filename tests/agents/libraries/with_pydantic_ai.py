"""pydantic-ai: OpenAI's chat and responses models, and Anthropic's."""

from __future__ import annotations

import asyncio
import base64

from checks import BASE, LONG, MODEL, png, run
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(api_key="none", base_url=BASE)),
}
THINKING = {
    "chat": OpenAIChatModelSettings(openai_reasoning_effort="low"),
    "responses": OpenAIResponsesModelSettings(openai_reasoning_effort="low", openai_reasoning_summary="auto"),
    "anthropic": AnthropicModelSettings(
        anthropic_thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=4096, anthropic_cache=True
    ),
}
asked: list[str] = []


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return "Sunny."


def plain():
    for name, model in MODELS.items():
        assert "sunny" in Agent(model, instructions="Be brief.").run_sync("Hello").output, name


def _twice(name, settings=None):
    asked.clear()
    agent = Agent(MODELS[name], tools=[weather], model_settings=settings, system_prompt="You know the weather.")
    first = agent.run_sync("Weather in Rome?")
    assert "sunny" in first.output
    assert asked == ["Rome"]
    second = agent.run_sync("And tomorrow?", message_history=first.all_messages())
    assert "sunny" in second.output

    async def streamed():
        async with agent.run_stream("Weather in Rome?") as answer:
            return [text async for text in answer.stream_text(delta=True)]

    asked.clear()
    assert "sunny" in "".join(asyncio.run(streamed()))
    assert asked == ["Rome"]


def tools():
    for name in MODELS:
        _twice(name)


def thinking_and_tools_chat():
    _twice("chat", THINKING["chat"])


def thinking_and_tools_responses():
    _twice("responses", THINKING["responses"])


def thinking_and_tools_anthropic():
    _twice("anthropic", THINKING["anthropic"])


def _output(kind, names=tuple(MODELS), question="Who?"):
    for name in names:
        agent = Agent(MODELS[name], output_type=kind(Person), tools=[weather])
        assert agent.run_sync(question).output.age == 3, name


def output_by_tool():
    _output(ToolOutput)


def output_native():
    # Of Anthropic's models, pydantic-ai asks this only where it knows the name.
    _output(NativeOutput, ("chat", "responses"))


def output_prompted():
    _output(PromptedOutput, question='Who? SAY<<{"name": "Ann", "age": 3}>>')


def image():
    picture = BinaryContent(base64.b64decode(png()), media_type="image/png")
    for name, model in MODELS.items():
        assert "1 media" in Agent(model).run_sync(["See", picture]).output, name


def text_document():
    document = BinaryContent(b"The weather is fine.", media_type="text/plain")
    for name, model in MODELS.items():
        assert "sunny" in Agent(model).run_sync(["Read", document]).output, name


def image_from_a_tool():
    def photo() -> BinaryContent:
        """A photo."""
        return BinaryContent(base64.b64decode(png()), media_type="image/png")

    for name, model in MODELS.items():
        assert "1 media" in Agent(model, tools=[photo]).run_sync("See").output, name


def model_changes():
    """A history of one protocol goes on in another."""
    history = []
    for name in ("anthropic", "chat", "responses", "anthropic"):
        agent = Agent(MODELS[name], tools=[weather], model_settings=THINKING[name])
        done = agent.run_sync("Weather in Rome?", message_history=history)
        assert "sunny" in done.output, name
        history = done.all_messages()


def overflow():
    for name, model in MODELS.items():
        try:
            Agent(model).run_sync(LONG)
        except ModelHTTPError as error:
            if type(error).__name__ != "ModelContextWindowExceededError" and "ContextWindow" not in repr(
                type(error).__mro__
            ):
                raise AssertionError(f"{name}: {type(error).__mro__}") from error
            continue
        raise AssertionError(f"no error of {name}")


if __name__ == "__main__":
    run(
        plain,
        tools,
        thinking_and_tools_chat,
        thinking_and_tools_responses,
        thinking_and_tools_anthropic,
        output_by_tool,
        output_native,
        output_prompted,
        image,
        text_document,
        image_from_a_tool,
        model_changes,
        overflow,
    )
