"""A chat from a script: what it keeps, when it is asked, read, left and disturbed."""

from __future__ import annotations

import _thread
import asyncio
import gc
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pydantic
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import GenerationRequest, Image, Message, SamplingParams, ToolCall
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError, EngineError, PromptError, RequestError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaError
from tests.backends.events import PATIENCE_S, collect, result_of
from tests.backends.scripting.fake import FakeModel
from tests.engine.exact import picture

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def model(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, settings=EngineSettings(slots=2), min_segment=16) as backend:
        yield backend


def endless(_: object) -> list[str | Exception | None]:
    return ["One. ", "Two. ", None]


def texts(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


async def test_each_turn_is_that_of_a_stream_and_begins_where_the_last_one_ended(model: LocalBackend) -> None:
    """Blocking, where a loop runs, as in a notebook."""
    chat = model.chat("You are brief.", params=GREEDY)
    first = chat.ask("What is this?", images=picture(3))
    assert chat.messages[1].media[0].plan is not None
    assert model.wait_idle(PATIENCE_S)
    second = chat.ask("And its colour?")
    # All but the question and what is open behind it.
    assert second.cache.num_cached_tokens >= first.num_prompt_tokens
    assert second.cache.num_encoded_units == 0
    told = result_of(await collect(model.stream(GenerationRequest(chat.messages[:4], GREEDY))))
    assert (told.token_ids, told.prompt_token_ids) == (second.token_ids, second.prompt_token_ids)
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [role for role, _ in texts(chat.messages)] == roles
    assert (chat.messages[2].text, chat.messages[4].text) == (first.text, str(second)) != ("", "")


async def test_awaited_and_blocking_answers_are_the_same(model: LocalBackend) -> None:
    blocking, awaited = model.chat(params=GREEDY), model.chat(params=GREEDY)
    for question in ("Hello.", "What is a circle?"):
        assert (await awaited.aask(question)).token_ids == blocking.ask(question).token_ids
    read = [text async for text in awaited.stream("Bye.")]
    assert "".join(read) == "".join(blocking.stream("Bye.")) == awaited.messages[-1].text
    assert texts(awaited.messages) == texts(blocking.messages)


def test_a_stream_gives_the_text_and_then_the_result(model: LocalBackend) -> None:
    chat = model.chat(params=GREEDY)
    answer = chat.stream("Hello.", thinking=True, thinking_budget=4)
    with pytest.raises(RequestError, match="isn't complete: read its stream"):
        _ = answer.result
    assert "".join(answer) == answer.result.text == chat.messages[-1].text
    assert answer.result.reasoning
    assert chat.messages[-1].reasoning == answer.result.reasoning
    assert next(answer, None) is None


def test_what_params_name_holds_for_the_chat_and_an_empty_schema_is_one() -> None:
    model = FakeModel(lambda _: ["{}"])
    chat = model.chat(params={"tools": [TOOL], "thinking": True})
    chat.ask("Hello.")
    assert (model.asked[0]["tools"], model.asked[0]["enable_thinking"]) == ((TOOL,), True)
    strict = model.chat(params={"schema": {"type": "object", "required": ["a"]}})
    strict.ask("Hello.", schema={})
    assert (model.asked[1]["schema"], model.asked[1]["params"].json_schema) == ({}, "{}")


def test_an_error_leaves_a_chat_as_it_was(model: LocalBackend, tmp_path: Path) -> None:
    chat = model.chat(params=GREEDY)
    chat.ask("Hello.")
    before = list(chat.messages)
    for ask in (chat.ask, lambda *a, **o: list(chat.stream(*a, **o))):
        with pytest.raises(MediaError):
            ask("What is this?", images=tmp_path / "missing.jpg")
        with pytest.raises(RequestError, match="timeout_s"):
            ask("What is this?", timeout_s=float("nan"))
    assert chat.messages == before
    assert chat.ask("Hello again.").text

    broken = FakeModel(lambda _: ["One. ", EngineError("It broke.")]).chat()
    answer = broken.stream("Count.")
    assert next(answer) == "One. "
    with pytest.raises(EngineError, match="It broke"):
        next(answer)
    assert broken.messages == []
    assert next(answer, None) is None


@pytest.mark.parametrize("way", ["close", "drop", "next question"])
def test_of_a_stream_that_is_left_stays_what_was_read(way: str) -> None:
    model = FakeModel(endless)
    chat = model.chat()
    answer = chat.stream("Count.")
    assert [next(answer), next(answer)] == ["One. ", "Two. "]
    if way == "close":
        answer.close()
        assert next(answer, None) is None
    elif way == "drop":
        del answer
        gc.collect()
    else:
        other = chat.stream("And now?")
        assert next(other) == "One. "
        with pytest.raises(RequestError, match="its chat was asked something else"):
            next(answer)
        other.close()
    assert texts(chat.messages)[:2] == [("user", "Count."), ("assistant", "One. Two. ")]
    unread = chat.stream("More.")
    unread.close()
    assert ("user", "More.") not in texts(chat.messages)
    with ThreadPoolExecutor(1) as waiting:
        waiting.submit(wait_for, lambda: model.num_open == 0).result(PATIENCE_S)


def wait_for(holds: Any) -> None:
    while not holds():
        time.sleep(0.01)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background may ignore Ctrl-C, and then nothing would interrupt it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_an_answer_and_leaves_the_chat() -> None:
    def interrupt(_: object) -> list[str | Exception | None]:
        if model.num_open == model.most_at_once:
            _thread.interrupt_main()
        return [None]

    model = FakeModel(interrupt, at_once=1)
    chat = model.chat()
    with pytest.raises(KeyboardInterrupt):
        chat.ask("Hello.")
    assert (model.num_open, chat.messages) == (0, [])
    with pytest.raises(KeyboardInterrupt):
        list(chat.stream("Hello."))
    assert chat.messages == []
    with pytest.raises(KeyboardInterrupt):
        model.generate(["Hello."] * 20)
    assert model.num_open == 0


async def test_a_cancelled_task_ends_its_answer() -> None:
    model = FakeModel(endless)
    chat = model.chat()
    asking = asyncio.create_task(chat.aask("Hello."))
    while not model.num_open:
        await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="writing an answer already"):
        await chat.aask("Hello?")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (model.num_open, chat.messages) == (0, [])

    async def read() -> None:
        async for _ in chat.stream("Count."):
            pass

    reading = asyncio.create_task(read())
    while not model.num_open:
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert model.most_open == 1


def test_calls_are_kept_as_calls_and_answered_in_order() -> None:
    def say(messages: Any) -> list[Any]:
        return ["It rains."] if messages[-1].role == "tool" else ["I look.\n\n", CALL[:15], CALL[15:]]

    model = FakeModel(say)
    chat = model.chat()
    reply = chat.ask("Does it rain?", tools=[TOOL])
    assert (reply.text, reply.tool_calls, str(reply)) == ("I look.", (ToolCall("f", {"a": 1}),), "I look.\nf(a=1)")
    for wrong in ([], [1, 2]):
        with pytest.raises(PromptError, match=f"has 1 calls, and there are {len(wrong)} results"):
            chat.answer_calls(wrong)
    with pytest.raises(PromptError, match="A tool's result must be a string, JSON values or pictures; got object"):
        chat.answer_calls([object()])
    chat.answer_calls([{"rain": True}])
    assert chat.ask().text == "It rains."
    given, answered = chat.messages[1:3]
    assert given == Message("assistant", "I look.", tool_calls=reply.tool_calls)
    assert answered == Message("tool", json.dumps({"rain": True}), name="f")
    # They are the chat's from then on.
    assert [asked["tools"] for asked in model.asked] == [(TOOL,), (TOOL,)]
    answer = chat.stream("And tomorrow?")
    assert "".join(answer) == "I look."
    assert answer.result.tool_calls == chat.messages[-1].tool_calls == reply.tool_calls


class Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    corners: int = pydantic.Field(ge=0, le=9)


def test_a_schema_gives_values(model: LocalBackend) -> None:
    chat = model.chat(params={"temperature": 0})
    for schema, expected in ((Shape, Shape), (Shape.model_json_schema(), dict), (json.dumps({"type": "null"}), None)):
        reply = chat.ask("Describe a shape.", schema=schema, max_tokens=60)
        assert reply.finish_reason == "stop"
        assert reply.parsed is None if expected is None else isinstance(reply.parsed, expected)
        assert "schema" not in reply.to_dict()
    assert isinstance(model.chat(params={"schema": Shape}).ask("A shape?").parsed, Shape)
    answer = chat.stream("A shape?", schema=Shape)
    assert Shape.model_validate_json("".join(answer)) == answer.result.parsed
    cut = chat.ask("Describe.", schema={"type": "string", "minLength": 99}, max_tokens=3)
    assert (cut.finish_reason, cut.parsed) == ("length", None)
    assert chat.ask("Hello.").parsed is None


class Even(Shape):
    @pydantic.field_validator("corners")
    @classmethod
    def check(cls, value: int) -> int:
        raise ValueError("never even enough")


def test_what_a_class_refuses_beyond_its_schema_is_its_own_error() -> None:
    reply = FakeModel(lambda _: ['{"corners": 3}']).chat().ask("A shape?", schema=Even)
    assert reply.text == '{"corners": 3}'
    with pytest.raises(pydantic.ValidationError, match="never even enough"):
        _ = reply.parsed


def test_another_answer_and_another_chat() -> None:
    model = FakeModel(lambda messages: [f"{len(messages)} {messages[-1].text}"])
    chat = model.chat(messages=[{"role": "system", "content": "Brief."}], name="mine", tools=[TOOL], thinking=True)
    chat.ask("Hello.")
    chat.drop_answer()
    assert chat.ask(seed=3).text == "2 Hello."
    other = chat.fork()
    other.ask("Here.")
    chat.messages = [*chat.messages, {"role": "user", "content": "There."}]  # pyright: ignore
    assert chat.ask().text == "4 There."
    assert texts(other.messages)[2:] == [("assistant", "2 Hello."), ("user", "Here."), ("assistant", "4 Here.")]
    names = [asked["conversation"] for asked in model.asked]
    assert (names[0], names[1], names[3], names[2] == "mine") == ("mine", "mine", "mine", False)
    assert all((asked["tools"], asked["enable_thinking"]) == ((TOOL,), True) for asked in model.asked)
    assert [asked["params"].seed for asked in model.asked] == [None, 3, None, None]
    with pytest.raises(PromptError, match="nothing to answer"):
        chat.ask()
    with pytest.raises(PromptError, match="no answer yet"):
        model.chat().drop_answer()
    with pytest.raises(PromptError, match="no messages"):
        model.chat().ask()


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda m: m.chat(["system"]), PromptError, "system message must be a string; got list"),
        (lambda m: m.chat(messages=[3]), PromptError, "got one with int in it"),
        (
            lambda m: m.chat(tools={"type": "function"}),
            PromptError,
            "a list of functions or definitions.*got dict",
        ),
        (lambda m: m.chat(tools=[print]), PromptError, "function 'print' have no JSON schema"),
        (lambda m: m.chat(tools=["f"]), PromptError, "definition in OpenAI's form.*got 'f'"),
        (lambda m: m.chat(thinking="yes"), ConfigError, "thinking must be True or False.*got 'yes'"),
        (lambda m: m.chat(params=0.5), ConfigError, "params must be SamplingParams, or a dict.*got 0.5"),
        (lambda m: m.chat(name=3), ConfigError, "name must be a string.*got 3"),
        (lambda m: m.chat(tenant=3), RequestError, "tenant must be a string.*got 3"),
        (lambda m: m.chat(retain="all"), RequestError, "retain must be one of.*got 'all'"),
        (lambda m: m.chat().ask(3), PromptError, "can't hold a int"),
        (lambda m: m.chat().ask(Message("user", "a")), PromptError, "can't be the text of another one"),
        (lambda m: m.chat().ask("a", images=3), PromptError, "The image is a int"),
        (lambda m: m.chat().ask("a", images=[["a.jpg"]]), PromptError, "The image is a list"),
        (lambda m: m.chat().ask("a", images="https://example.org/a.jpg"), PromptError, "remote media are not fetched"),
        (lambda m: m.chat().ask("a", videos=Image("a.jpg")), PromptError, "The video is a Image"),
        (lambda m: m.chat().ask("a", max_token=3), ConfigError, "'max_token': did you mean max_tokens"),
        (lambda m: m.chat().ask("a", params={"temprature": 0}), ConfigError, "did you mean temperature"),
        (lambda m: m.chat().ask("a", image="a.jpg"), ConfigError, r"'image': a chat's question takes images=\["),
        (lambda m: m.generate("a", videos="a.mp4"), ConfigError, r"prompts hold theirs: Message\('user', \[Video"),
        (lambda m: m.generate("a", system="Brief."), ConfigError, "'system': it is said once, as model.chat"),
        (lambda m: m.chat().ask("a", colour=3), ConfigError, "'colour': known are temperature"),
        (lambda m: m.chat().ask("a", temperature="hot"), ConfigError, "temperature must be a number.*got 'hot'"),
        (lambda m: m.chat().ask("a", schema=3), ConfigError, "json_schema must be a dict"),
        (lambda m: m.chat().ask("a", timeout_s="5"), RequestError, "timeout_s must be a number"),
        (lambda m: m.chat().answer_calls("a"), PromptError, "has 0 calls, and there are 1 results"),
    ],
)
def test_what_was_meant_otherwise_is_refused_in_words(ask: Any, error: type[Exception], words: str, model: Any) -> None:
    with pytest.raises(error, match=words):
        ask(model)
