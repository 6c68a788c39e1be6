"""Functions as tools: what the model is told of them, when they run, and what comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
import pytest
from PIL import Image as PILImage

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.scripting.chat import Chat
from qwen35mm.backends.scripting.functions import FunctionTool, ToolResult, described
from qwen35mm.contract import Image, Message, ToolCall
from qwen35mm.errors import EngineError, PromptError, RequestError
from qwen35mm.model import LoadedModel
from tests.backends.scripting.fake import FakeModel
from tests.engine.exact import picture


def call(name: str, **arguments: object) -> str:
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def replies(*written: str | Exception) -> Callable[[Sequence[Message]], list[str | Exception | None]]:
    """One after the other, by how often the assistant has spoken since the user's last question."""

    def say(messages: Sequence[Message]) -> list[str | Exception | None]:
        last = max(at for at, message in enumerate(messages) if message.role == "user")
        return [written[sum(message.role == "assistant" for message in messages[last:])]]

    return say


def get_weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """The weather in a city.

    Only for large ones.

    Args:
        city: its English name,
            with the country
        days (int): how many
    """
    return {"city": city, "days": days, "sky": "clear"}


def results_of(model: FakeModel) -> list[str]:
    return [message.text for message in model.asked[-1]["messages"] if message.role == "tool"]


def test_signature_and_docstring_make_the_definition() -> None:
    assert FunctionTool.of(get_weather) == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city. Only for large ones.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its English name, with the country"},
                    "days": {"type": "integer", "default": 1, "description": "how many"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


@dataclasses.dataclass
class Named:
    title: str


def test_annotations_may_describe_and_a_property_may_be_called_title() -> None:
    def find(place: Named, title: Annotated[str, pydantic.Field(description="Which")] = "a") -> None:
        """:param place: Where"""

    function = FunctionTool.of(find)["function"]
    assert function["description"] == ""
    properties = function["parameters"]["properties"]
    assert properties["title"] == {"type": "string", "default": "a", "description": "Which"}
    assert properties["place"]["description"] == "Where"
    (place,) = function["parameters"]["$defs"].values()
    assert place["properties"] == {"title": {"type": "string"}}


def test_docstrings_of_other_forms_are_read() -> None:
    assert described("") == ("", {})
    assert described("Does it.\n\nReturns:\n    a: nothing") == ("Does it.", {})
    assert described("Does it.\n\n:param int a: the\n    first\n:returns: b") == ("Does it.", {"a": "the first"})


def no_parameters_by_place(a: int, /) -> None: ...


def no_schema(a: threading.Lock) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda a: a, "needs a name of letters"),
        (functools.partial(get_weather, days=2), "needs a name of letters"),
        (no_parameters_by_place, "parameters by place"),
        (no_schema, "'no_schema' have no JSON schema: Unable to generate"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        FakeModel(lambda _: []).chat(tools=[function])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(PromptError, match="same name"):
        FakeModel(lambda _: []).chat(tools=[get_weather, get_weather])


def test_another_process_gets_the_definition_alone() -> None:
    made = FunctionTool.of(get_weather)
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), again) == (dict, dict(made))


def test_calls_run_until_there_is_an_answer() -> None:
    model = FakeModel(replies(call("get_weather", city="London", days="3"), call("get_weather", city="Rome"), "Clear."))
    chat = model.chat()
    reply = chat.ask("Is it clear?", tools=[get_weather])
    assert (reply.text, reply.tool_calls) == ("Clear.", ())
    assert [message.role for message in chat.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert results_of(model) == [
        '{"city": "London", "days": 3, "sky": "clear"}',
        '{"city": "Rome", "days": 1, "sky": "clear"}',
    ]
    # The chat keeps its tools, a fork too, and each question has its own rounds.
    assert chat.ask("And now?").text == chat.fork().ask("And now?").text == "Clear."


def test_every_call_of_an_answer_runs_in_order_in_this_thread() -> None:
    ran: list[tuple[int, threading.Thread]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread()))

    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    written = [call("note", number=1), call("later", number=2), call("note", number=3)]
    model = FakeModel(replies("\n".join(written), "Yes."))
    model.chat(tools=[note, later]).ask("Go.")
    assert ran == [(1, threading.current_thread()), (3, threading.current_thread())]
    assert results_of(model) == ["null", "2", "null"]


async def test_an_event_loop_runs_them_side_by_side() -> None:
    came: list[int] = []
    both = asyncio.Event()

    async def meet(number: int) -> int:
        came.append(number)
        if len(came) == 2:
            both.set()
        await both.wait()
        return number

    def fail() -> None:
        raise ZeroDivisionError

    written = "\n".join([call("meet", number=1), call("meet", number=2), call("fail")])
    model = FakeModel(replies(written, "Yes."))
    assert str(await model.chat(tools=[meet, fail]).aask("Go.")) == "Yes."
    assert results_of(model) == ["1", "2", "Error: ZeroDivisionError"]


def test_faults_become_results_in_words() -> None:
    def fail(text: str) -> object:
        if text == "raise":
            raise OSError("no such file")
        return threading.Lock()

    written = [
        call("fail", text="raise"),
        call("fail", text="return"),
        call("get_weather", city="Rome", days="many"),
        call("get_weather"),
    ]
    model = FakeModel(replies("\n".join(written), "I see."))
    assert model.chat(tools=[fail, get_weather]).ask("Go.").text == "I see."
    assert results_of(model) == [
        "Error: OSError: no such file",
        "Error: A tool's result must be a string, JSON values or pictures; got lock.",
        "Error: days: Input should be a valid integer, unable to parse string as an integer",
        "Error: city: Missing required argument",
    ]


def test_a_name_that_is_not_there_is_said_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called = [(ToolCall("get_whether", {"city": "Rome"}, "a"),), ()]
    monkeypatch.setattr("tests.backends.scripting.fake.read_calls", lambda *_: ("", called.pop(0)))
    model = FakeModel(lambda _: [""])
    model.chat(tools=[get_weather]).ask("Go.")
    assert results_of(model) == ["Error: there is no tool 'get_whether'; the tools are get_weather"]


def test_values_of_other_types_become_json_and_pictures_stay() -> None:
    @dataclasses.dataclass
    class Place:
        x: int

    shown = picture(3)

    def give(what: str) -> object:
        values = {"text": "as it is", "dataclass": [Place(1)], "set": {2}, "picture": shown}
        return values.get(what, ["Here:", shown])

    kinds = ("text", "dataclass", "set", "picture", "both")
    model = FakeModel(replies("\n".join(call("give", what=kind) for kind in kinds), "Yes."))
    chat = model.chat(tools=[give])
    chat.ask("Go.")
    contents = [message.content for message in chat.messages if message.role == "tool"]
    assert results_of(model) == ["as it is", '[{"x": 1}]', "[2]", "", "Here:"]
    assert [len(content) for content in contents] == [1, 1, 1, 1, 2]
    assert all(isinstance(content[-1], Image) for content in contents[3:])


def test_definitions_are_left_to_the_caller() -> None:
    definition = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    model = FakeModel(replies(call("f") + "\n" + call("get_weather", city="Rome")))
    both = ["f", "get_weather"]
    assert [each.name for each in model.chat(tools=[get_weather, definition]).ask("Go.").tool_calls] == both
    # A batch runs nothing.
    assert [each.name for each in model.generate("Go.", tools=[get_weather, definition]).tool_calls] == both


async def ask_as(way: str, chat: Chat) -> None:
    match way:
        case "ask":
            chat.ask("Go.", max_rounds=2)
        case "aask":
            await chat.aask("Go.", max_rounds=2)
        case "stream":
            list(chat.stream("Go.", max_rounds=2))
        case _:
            [text async for text in chat.stream("Go.", max_rounds=2)]


@pytest.mark.parametrize("way", ["ask", "aask", "stream", "astream"])
async def test_rounds_have_an_end_that_leaves_the_chat_as_it_was(way: str) -> None:
    ran: list[str] = []

    def more(what: str) -> str:
        ran.append(what)
        return "more"

    model = FakeModel(lambda _: [call("more", what="x")])
    chat = model.chat("Brief.", tools=[more])
    with pytest.raises(RequestError, match="called tools 2 times for one question"):
        await ask_as(way, chat)
    assert ran == ["x", "x"]
    assert [message.role for message in chat.messages] == ["system"]
    with pytest.raises(RequestError, match="max_rounds must be"):
        chat.ask("Go.", max_rounds=0)


def test_a_later_round_that_fails_leaves_the_chat_as_it_was() -> None:
    model = FakeModel(replies(call("get_weather", city="Rome"), EngineError("gone")))
    chat = model.chat(tools=[get_weather])
    for ask in (chat.ask, lambda text: list(chat.stream(text))):
        with pytest.raises(EngineError, match="gone"):
            ask("Go.")
        assert chat.messages == []


def test_a_forced_call_is_forced_once() -> None:
    model = FakeModel(replies(call("get_weather", city="Rome"), "Clear."))
    assert model.chat(tools=[get_weather]).ask("Go.", tool_choice="required").text == "Clear."
    assert [each["tool_choice"] for each in model.asked] == ["required", "auto"]


async def test_a_stream_shows_texts_calls_and_results() -> None:
    model = FakeModel(replies("Let me see. " + call("get_weather", city="Rome"), "Clear."))

    def shown(events: Sequence[object]) -> list[object]:
        return [event.message.text if isinstance(event, ToolResult) else event for event in events]

    expected = ["Let me see. ", "get_weather", '{"city": "Rome", "days": 1, "sky": "clear"}', "Clear."]
    for is_async in (False, True):
        stream = model.chat(tools=[get_weather]).stream("Go.")
        found = [event async for event in stream.aevents()] if is_async else list(stream.events())
        names = [event.name if isinstance(event, ToolCall) else event for event in shown(found)]
        assert [str(name).strip() for name in names] == [str(name).strip() for name in expected]
        assert stream.result.text == "Clear."
    chat = model.chat(tools=[get_weather])
    stream = chat.stream("Go.")
    with pytest.raises(RequestError, match="isn't complete"):
        _ = stream.result
    assert "".join(stream).split() == ["Let", "me", "see.", "Clear."]
    assert len(chat.messages) == 4
    stream = model.chat(tools=[get_weather]).stream("Go.")
    assert [next(stream).strip(), (await anext(model.chat(tools=[get_weather]).stream("Go."))).strip()] == [
        "Let me see."
    ] * 2
    plain = model.chat(tools=[dict(FunctionTool.of(get_weather))]).stream("Go.")
    assert [str(event).strip() for event in plain.events()] == ["Let me see.", "get_weather(city='Rome')"]


def test_a_stream_that_is_left_keeps_no_call_without_a_result() -> None:
    model = FakeModel(replies("See. " + call("get_weather", city="Rome"), "Clear."))
    chat = model.chat(tools=[get_weather])
    for event in chat.stream("Go.").events():
        if isinstance(event, ToolCall):
            break
    assert [message.role for message in chat.messages] == ["user"]
    chat.messages.clear()
    stream = chat.stream("Go.")
    for _ in stream:
        stream.close()
    assert [message.text.strip() for message in chat.messages] == ["Go.", "See."]
    assert list(stream) == list(stream.events()) == []
    chat.messages.clear()
    for event in chat.stream("Go.").events():
        if isinstance(event, ToolResult):
            break
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]


def test_a_stream_whose_chat_was_asked_meanwhile_stops() -> None:
    model = FakeModel(replies(call("get_weather", city="Rome"), "Clear."))
    chat = model.chat(tools=[get_weather])
    events = iter(chat.stream("Go.").events())
    while not isinstance(next(events), ToolResult):
        pass
    assert chat.ask("Another question?").text == "Clear."
    with pytest.raises(RequestError, match="asked something else"):
        list(events)


def test_each_round_begins_where_the_last_one_ended(demo: LoadedModel) -> None:
    """By the real model and template, with a picture as a result."""
    model = LocalBackend(demo, min_segment=16)
    with model:
        shown: PILImage.Image = picture(5)

        def look(at: str) -> list[object]:
            """Shows a picture."""
            return ["Here it is:", shown]

        chat = model.chat(tools=[look], params={"max_tokens": 40, "temperature": 0.0})
        first = chat.ask("Look at the picture, and say what it shows.", tool_choice="required", max_rounds=1)
        assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
        assert chat.messages[2].media[0].plan is not None
        assert first.cache.num_cached_tokens > 0
