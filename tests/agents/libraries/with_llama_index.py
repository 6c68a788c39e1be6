"""LlamaIndex: its model for OpenAI-like servers, agents of functions, structured output, pictures."""

from __future__ import annotations

import asyncio

from checks import BASE, LONG, MODEL, png, run
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.llms import ChatMessage as Message
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

asked: list[str] = []
WHERE = {"model": MODEL, "api_base": f"{BASE}/v1", "api_key": "none", "max_retries": 0, "context_window": 32_768}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """Weather of a city."""
    asked.append(city)
    return "Sunny."


def _model(**more):
    return OpenAILike(is_chat_model=True, is_function_calling_model=True, **WHERE, **more)


def plain():
    assert "sunny" in _model().chat([Message(role="user", content="Hello")]).message.content


def streamed():
    chunks = list(_model().stream_chat([Message(role="user", content="Hello")]))
    assert "sunny" in chunks[-1].message.content


def complete():
    assert "sunny" in _model().complete("Hello").text


def _twice(kind, model):
    async def turns():
        agent = kind(tools=[weather], llm=model, system_prompt="You know the weather.")
        context = Context(agent)
        return [str(await agent.run(text, ctx=context)) for text in ("Weather in Rome?", "And tomorrow?")]

    asked.clear()
    assert all("sunny" in answer for answer in asyncio.run(turns()))
    assert "Rome" in asked


def agent():
    _twice(FunctionAgent, _model())


def agent_thinking():
    _twice(FunctionAgent, _model(reasoning_effort="low"))


def agent_thinking_by_template():
    _twice(FunctionAgent, _model(additional_kwargs={"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}))


def react_agent():
    async def turn():
        agent = ReActAgent(tools=[weather], llm=_model())
        return str(await agent.run("SAY<<Thought: I can answer without using any more tools.\nAnswer: Sunny.>>"))

    assert "Sunny" in asyncio.run(turn())


def structured():
    assert _model().as_structured_llm(Person).complete("Who?").raw.age == 3


def structured_by_schema():
    assert _model(should_use_structured_outputs=True).as_structured_llm(Person).complete("Who?").raw.age == 3


def image():
    blocks = [TextBlock(text="See"), ImageBlock(image=png().encode(), image_mimetype="image/png")]
    assert "1 media" in _model().chat([ChatMessage(role="user", blocks=blocks)]).message.content


def overflow():
    try:
        _model().complete(LONG)
    except Exception as error:
        if getattr(error, "code", None) != "context_length_exceeded":
            raise
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    run(
        plain,
        streamed,
        complete,
        agent,
        agent_thinking,
        agent_thinking_by_template,
        react_agent,
        structured,
        structured_by_schema,
        image,
        overflow,
    )
