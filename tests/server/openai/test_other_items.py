"""What clients of the responses API send that this server doesn't have: carried, translated or ignored, and told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from qwen35mm.contract import GenerationRequest, Message, Text, iter_media
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from tests.server import instant
from tests.server.conftest import sample
from tests.server.instant import Answer, Recording, ask

U = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
PICTURE = sample("two-shapes.jpg")
IMAGE = {"type": "input_image", "image_url": PICTURE}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Recording:
    return Recording(demo)


def post(backend: Recording, given: Any = "Hello", *, strict: bool = False, **body: Any) -> Answer:
    app = create_app(backend, strict_fields=strict)
    data = json.dumps({"input": given, "store": False, **body}).encode()
    return asyncio.run(ask(app, "/v1/responses", data))


def asked(backend: Recording, given: Any = "Hello", **body: Any) -> tuple[GenerationRequest, list[str]]:
    """What the backend was asked, and the notes on the request."""
    answer = post(backend, given, **body)
    assert answer.status == 200, answer.content
    (told,) = answer.headers.get(HEADER, [""])
    return backend.asked, told.split(" | ") if told else []


def conversation(backend: Recording, *given: Any, **body: Any) -> tuple[Sequence[Message], list[str]]:
    request, notes = asked(backend, list(given), **body)
    return request.messages, notes


def named(request: GenerationRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


def test_fields_without_effect_need_no_note(backend: Recording) -> None:
    body = {
        "client_metadata": {"session_id": "a"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": 1},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning": {"summary": "auto", "effort": None},
        "service_tier": "priority",
        "text": {"verbosity": "medium"},
        "tools": [{**TOOL, "strict": None, "defer_loading": True}],
        "truncation": "disabled",
    }
    request, notes = asked(backend, **body)
    assert notes == []
    assert named(request) == ["weather"]
    answer = post(backend, strict=True, **body)
    assert answer.status == 200
    assert answer.json()["metadata"] == {"a": "1"}


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"truncation": "auto"}, "truncation isn't supported here; ignored"),
        ({"max_tool_calls": 3}, "max_tool_calls isn't supported here; ignored"),
        ({"text": {"verbosity": "low"}}, "text.verbosity isn't supported here; ignored"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort isn't supported here; ignored"),
        ({"include": ["web_search_call.action.sources"]}, "include names what isn't known here; ignored"),
        ({"tools": [TOOL, {"type": "web_search", "filters": {}}]}, "tools.1 of type 'web_search' isn't supported"),
        ({"tools": [TOOL, TOOL]}, "tools.1 has the name of another tool, 'weather'; ignored"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools.0 is read as in the form of another protocol",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice asks for tools that were left out"),
    ],
)
def test_what_is_ignored_or_translated_is_told(body: dict[str, Any], note: str, backend: Recording) -> None:
    request, (told,) = asked(backend, **body)
    assert told.startswith(note)
    assert request.tool_choice == "auto"
    refused = post(backend, strict=True, **body)
    assert refused.status == 400


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_limit_has_many_names(name: str, backend: Recording) -> None:
    request, notes = asked(backend, **{name: 7})
    assert request.params is not None
    assert (request.params.max_tokens, notes) == (7, [])


def test_formats_of_other_servers_constrain_the_answer(backend: Recording) -> None:
    forms: list[dict[str, Any]] = [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ]
    for form in forms:
        params = asked(backend, text={"format": form})[0].params
        assert params is not None
        assert json.loads(params.json_schema or "") == SCHEMA


@pytest.mark.parametrize(
    ("body", "thinks", "budget"),
    [
        ({"enable_thinking": False}, False, None),
        ({"think": True, "reasoning": {"effort": "low"}}, True, 1024),
        ({"reasoning_effort": "minimal"}, True, 512),
        ({"reasoning_effort": "minimal", "reasoning": {"effort": "low", "summary": "auto"}}, True, 1024),
        ({"thinking": {"type": "enabled", "budget_tokens": 77}}, True, 77),
    ],
)
def test_thinking_is_asked_for_in_many_ways(
    body: dict[str, Any], thinks: bool, budget: int | None, backend: Recording
) -> None:
    request, notes = asked(backend, **body)
    assert notes == []
    assert request.params is not None
    assert request.enable_thinking is thinks
    assert request.params.thinking_budget == budget


def test_messages_come_in_many_forms(backend: Recording) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "input_text", "text": "B", "cache_control": None}, "C"]
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    given = [
        {"type": "message", "role": "user", "content": [*parts, picture]},
        {**SAID, "phase": "new"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": "D"}, {"type": "input_text", "text": "E"}]},
        {"role": "user", "content": [{**IMAGE, "detail": None, "file_id": None}]},
    ]
    messages, notes = conversation(backend, *given)
    assert notes == []
    assert [(message.role, message.text) for message in messages] == [
        ("user", "ABC"),
        ("assistant", "Hi"),
        ("user", ""),
        ("assistant", "DE"),
        ("user", ""),
    ]
    assert [len(message.media) for message in messages] == [1, 0, 0, 0, 1]


def test_parts_outside_of_messages_are_one_of_the_users(backend: Recording) -> None:
    (first, said, last), notes = conversation(backend, "A", {"type": "input_text", "text": "B"}, SAID, IMAGE, "C")
    assert (first.text, said.text, last.text, len(last.media)) == ("AB", "Hi", "C", 1)
    assert notes == [f"input.{at} is no item; it is read as part of a message of the user" for at in (0, 3)]
    request, notes = asked(backend, U)
    (only,) = request.messages
    assert (only.text, notes) == ("Hello", ["input is an item, not a list; it is read as a list of one"])


def test_chat_completions_messages_are_taken(backend: Recording) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    (_, called, result), notes = conversation(
        backend, U, said, {"role": "tool", "tool_call_id": "c1", "content": "Rain"}
    )
    assert notes == []
    assert (called.reasoning, dict(called.tool_calls[0].arguments)) == ("Hm.", {"city": "Rome"})
    assert (result.role, result.text, result.tool_call_id) == ("tool", "Rain", "c1")


def test_system_messages_may_stand_anywhere(backend: Recording) -> None:
    given: list[Any] = [{"role": "developer", "content": "A"}, {"role": "system", "content": "B"}, U, SAID]
    given += [{"role": "developer", "content": "C"}, {"role": "system", "content": ""}, U]
    messages, _ = conversation(backend, *given, instructions="I")
    assert [(message.role, message.text) for message in messages] == [
        ("system", "I\n\nA\n\nB"),
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("system", "C"),
        ("user", "Hello"),
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Ro', {"arguments": '{"city": "Ro'}),
        ("[1]", {"arguments": [1]}),
        (None, {}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_damaged_calls_are_carried(arguments: Any, read: dict[str, Any], backend: Recording) -> None:
    (_, said, _), notes = conversation(backend, U, {**CALL, "arguments": arguments}, RESULT)
    assert dict(said.tool_calls[0].arguments) == read
    assert len(notes) == ("arguments" in read)


@pytest.mark.parametrize(
    ("output", "text", "media", "notes"),
    [
        (None, "", 0, 0),
        ([], "", 0, 0),
        ("Rain", "Rain", 0, 0),
        ([{"type": "output_text", "text": "Rain"}], "Rain", 0, 0),
        ([IMAGE, {"type": "input_text", "text": "Rain"}], "Rain", 1, 0),
        ({"content": "Rain", "success": False}, "Rain", 0, 0),
        ({"a": 1}, '{"a": 1}', 0, 1),
        (5, "5", 0, 1),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]', 0, 1),
        (
            [{"type": "input_text", "text": "Rain"}, {"type": "json", "json": 1}],
            'Rain{"type": "json", "json": 1}',
            0,
            1,
        ),
        ([{**IMAGE, "image_url": "data:image/png;base64,AAAA"}], "[image left out: it can't be read here]", 0, 1),
        ([{"type": "input_audio"}], "[audio left out: it can't be read here]", 0, 1),
    ],
)
def test_results_come_in_many_forms(output: Any, text: str, media: int, notes: int, backend: Recording) -> None:
    for before in ([U, CALL], [U]):
        (*_, last), told = conversation(backend, *before, {**RESULT, "output": output})
        assert (last.role, last.text, len(last.media), len(told)) == ("tool", text, media, notes)


def test_files_of_past_turns_are_left_out(backend: Recording) -> None:
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
    message = {"role": "user", "content": [pdf, {"type": "input_text", "text": "Hi"}]}
    (first, *_), notes = conversation(backend, message, SAID, U)
    assert first.text == "[file 'a.pdf' left out: it can't be read here]Hi"
    assert len(notes) == 1
    answer = post(backend, [message])
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input.0.content.0")
    system = {"role": "system", "content": [IMAGE]}
    (system, _), notes = conversation(backend, system, U)
    assert (system.text, len(notes)) == ("[image left out: it can't be read here]", 1)


def test_all_that_is_asked_since_the_last_answer_must_be_readable(backend: Recording) -> None:
    broken = {"role": "user", "content": [{**IMAGE, "image_url": "data:image/png;base64,AAAA"}]}
    for after in (U, {"role": "developer", "content": "Be short."}):
        answer = post(backend, [SAID, broken, after])
        assert (answer.status, after) == (400, after)
    messages, _ = conversation(backend, broken, U, SAID, U)
    assert messages[0].text == "[image left out: it can't be read here]"


def test_reasoning_of_others_says_what_can_be_read(backend: Recording) -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "abc"}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    told = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "So."}]}
    messages, notes = conversation(backend, U, sealed, SAID, U, summed, SAID, U, told, SAID, U)
    assert [message.reasoning for message in messages if message.role == "assistant"] == [None, "Hm.", "So."]
    assert notes == []


def test_foreign_items_are_carried_as_text(backend: Recording) -> None:
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}
    (_, said, _), notes = conversation(backend, U, search, SAID, U)
    assert said.text == '[web_search_call: {"action": {"type": "search", "query": "x"}}]\nHi'
    assert notes == ["input.1 of type 'web_search_call' is carried as text"]
    output = {"id": 17, "status": "declined", "index": 3}
    paid = {"type": "mcp_call", "id": "m", "name": "pay", "arguments": "{}", "status": "failed", "output": output}
    (_, said, _), _ = conversation(backend, U, paid, SAID, U)
    told = (
        '{"name": "pay", "arguments": "{}", "status": "failed", "output": {"id": 17, "status": "declined", "index": 3}}'
    )
    assert said.text == f"[mcp_call: {told}]\nHi"
    for item in (
        {"type": "compaction", "encrypted_content": "x" * 2000},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "image_generation_call", "id": "i", "status": "completed", "result": "x" * 2000},
    ):
        messages, notes = conversation(backend, U, item, SAID, U)
        assert [message.text for message in messages] == ["Hello", "Hi", "Hello"]
        assert notes == [f"input.1 of type {item['type']!r} says nothing here; ignored"]


def test_calls_of_foreign_tools_are_function_calls(backend: Recording) -> None:
    shell = {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}}
    result = {"type": "local_shell_call_output", "call_id": "c1", "output": "a.txt"}
    (_, called, last), notes = conversation(backend, U, shell, result)
    (call,) = called.tool_calls
    assert (call.name, dict(call.arguments)) == ("local_shell", {"type": "exec", "command": ["ls"]})
    assert (last.role, last.text, len(notes)) == ("tool", "a.txt", 2)
    screen = {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"} | IMAGE}
    (*_, last), _ = conversation(backend, U, {**shell, "type": "computer_call"}, screen)
    assert len(last.media) == 1


NAMESPACE = {"type": "namespace", "name": "mcp__maps", "description": "About places.", "tools": [TOOL]}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}


def test_namespaces_and_custom_tools_are_functions(backend: Recording) -> None:
    request, notes = asked(backend, tools=[NAMESPACE, CUSTOM])
    assert notes == []
    place, patch = (tool["function"] for tool in request.tools)
    assert place == {"name": "mcp__maps__weather", "description": "mcp__maps: About places.", "parameters": SCHEMA}
    assert (patch["name"], patch["parameters"]["required"]) == ("apply_patch", ["input"])
    choice = {"type": "function", "name": "weather", "namespace": "mcp__maps"}
    assert asked(backend, tools=[NAMESPACE, CUSTOM], tool_choice=choice)[0].tool_choice == "mcp__maps__weather"
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    request, notes = asked(backend, tools=[{**CUSTOM, "format": grammar}])
    assert request.tools[0]["function"]["description"].endswith('follows this grammar:\nstart: "a"')
    assert notes == ["tools.0.format is shown to the model, but doesn't constrain the call"]


def call_of(name: str, parameter: str, value: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def test_calls_come_back_in_the_form_of_their_tools(backend: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = '*** Begin Patch\n+ {"a": 1}\n*** End Patch'
    calls = [call_of("mcp__maps__weather", "city", "Rome"), call_of("apply_patch", "input", patch)]
    monkeypatch.setattr(instant, "TEXT", "\n".join(calls))
    whole = post(backend, tools=[NAMESPACE, CUSTOM]).json()
    place, patched = whole["output"]
    TypeAdapter(Response).validate_python(whole, strict=True)
    assert (place["type"], place["name"], place["namespace"]) == ("function_call", "weather", "mcp__maps")
    assert json.loads(place["arguments"]) == {"city": "Rome"}
    assert (patched["type"], patched["name"], patched["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert [tool["type"] for tool in whole["tools"]] == ["namespace", "custom"]
    stream = post(backend, tools=[NAMESPACE, CUSTOM], stream=True).content.decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
    written = [event.get("delta") for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(written) == done["input"] == patch
    # In the next turn they are the same calls.
    results = [{**RESULT, "call_id": place["call_id"]}]
    results.append({"type": "custom_tool_call_output", "call_id": patched["call_id"], "output": "Done"})
    (_, called, *results), notes = conversation(backend, U, place, patched, *results, tools=[NAMESPACE, CUSTOM])
    assert [(call.name, dict(call.arguments)) for call in called.tool_calls] == [
        ("mcp__maps__weather", {"city": "Rome"}),
        ("apply_patch", {"input": patch}),
    ]
    assert [result.content for result in results] == [(Text("Rain"),), (Text("Done"),)]
    assert notes == []


def test_half_a_custom_call_is_text(backend: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call_of("apply_patch", "input", "*** Begin Patch")
    monkeypatch.setattr(instant, "TEXT", whole[: whole.index(" Patch")])
    for stream in (False, True):
        answer = post(backend, tools=[CUSTOM], stream=stream)
        events = [json.loads(line[6:]) for line in answer.content.decode().splitlines() if line.startswith("data: ")]
        response = events[-1]["response"] if stream else answer.json()
        (item,) = response["output"]
        assert item["type"] == "message"
        assert "*** Begin" in item["content"][0]["text"]


def test_kept_custom_calls_are_continued(backend: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instant, "TEXT", call_of("apply_patch", "input", "x"))
    app = create_app(backend)

    def send(**body: Any) -> Any:
        return asyncio.run(ask(app, "/v1/responses", json.dumps({"tools": [CUSTOM], **body}).encode())).json()

    first = send(input="Hello")
    (call,) = first["output"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
    send(input=[output], previous_response_id=first["id"])
    before = [(message.role, message.text, message.tool_calls) for message in backend.asked.messages]
    assert before[1][2][0].arguments == {"input": "x"}
    send(input=[U, {"type": "item_reference", "id": call["id"]}, output])
    assert [(message.role, message.text, message.tool_calls) for message in backend.asked.messages] == before


@pytest.mark.parametrize("word", ["auto", "none", "required"])
def test_a_tool_of_the_name_of_a_choice_is_not_forced(word: str, backend: Recording) -> None:
    answer = post(backend, tools=[{**TOOL, "name": word}], tool_choice={"type": "function", "name": word})
    assert answer.status == 400
    assert f"can't force a tool of the name {word!r}" in answer.json()["error"]["message"]
    for choice in (word, {"type": word}):
        assert asked(backend, tools=[TOOL], tool_choice=choice)[0].tool_choice == word


def chat(backend: Recording, **body: Any) -> tuple[GenerationRequest, str]:
    body = {"model": "default", "messages": [U], "max_tokens": 5, **body}
    answer = asyncio.run(ask(create_app(backend), "/v1/chat/completions", json.dumps(body).encode()))
    assert answer.status == 200, answer.content
    return backend.asked, answer.headers.get(HEADER, [""])[0]


def test_an_empty_beginning_of_a_reply_is_none(backend: Recording) -> None:
    request, _ = chat(backend, messages=[U, {"role": "assistant", "content": "", "prefix": True}])
    assert (len(request.messages), request.continue_reply) == (1, False)


@pytest.mark.parametrize(("value", "thinks"), [("on", True), ("false", False), ("true", True)])
def test_switches_in_words(value: str, thinks: bool, backend: Recording) -> None:
    for name in ("think", "reasoning", "enable_thinking"):
        request, notes = chat(backend, **{name: value})
        assert (request.enable_thinking, notes) == (thinks, "")
    assert "add_generation_prompt isn't supported here" in chat(backend, add_generation_prompt=False)[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "web_search"}])
def test_a_choice_of_tools_that_were_left_out_is_free(choice: Any, backend: Recording) -> None:
    left_out = [{"type": "web_search", "name": "web_search"}]
    for request, notes in (
        asked(backend, tools=left_out, tool_choice=choice),
        chat(backend, tools=left_out, tool_choice=choice),
    ):
        assert (request.tool_choice, request.tools) == ("auto", ())
        assert "tool_choice asks for tools that were left out; the model chooses" in notes


def test_names_that_no_call_can_have_leave_out_their_tool(backend: Recording) -> None:
    names = ("my tool", "a>b", "clock", "clock", "")
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
    for request, notes in (asked(backend, tools=tools), chat(backend, tools=tools)):
        assert named(request) == ["my tool", "clock"]
        for note in (
            "tools.1 can't be called by the name 'a>b'",
            "tools.3 has the name of another tool, 'clock'",
            "tools.4 can't be called by the name ''",
        ):
            assert any(note in each for each in ([notes] if isinstance(notes, str) else notes))


@pytest.mark.parametrize("choice", ["any", {"type": "any"}])
def test_any_is_required(choice: Any, backend: Recording) -> None:
    assert asked(backend, tools=[TOOL], tool_choice=choice)[0].tool_choice == "required"
    assert post(backend, tools=[TOOL], tool_choice=choice).json()["tool_choice"] == "required"


def test_allowed_tools_are_the_only_ones(backend: Recording) -> None:
    tools = [TOOL, NAMESPACE, {**TOOL, "name": "clock"}]
    for mode, choice in (("auto", "auto"), ("required", "required")):
        listed = [{"type": "function", "name": "clock"}, {"type": "function", "name": ["weather"]}]
        allowed = {"type": "allowed_tools", "mode": mode, "tools": listed}
        request, notes = asked(backend, tools=tools, tool_choice=allowed)
        assert (named(request), request.tool_choice, notes) == (["clock"], choice, [])


@pytest.mark.parametrize("number", ["1e999", "NaN"])
@pytest.mark.parametrize("field", ["tools", "format"])
def test_numbers_that_no_answer_can_repeat_are_refused(field: str, number: str, backend: Recording) -> None:
    schema = {**SCHEMA, "description": "x", "examples": ["here"]}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    fields = {"tools": {"tools": [{**TOOL, "parameters": schema}]}, "format": {"text": {"format": form}}}
    data = json.dumps({"input": "Hello", "store": True, **fields[field]}).replace('"here"', number).encode()
    assert asyncio.run(ask(create_app(backend), "/v1/responses", data)).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_each_picture_is_kept_with_its_own_plan(stream: bool, backend: Recording) -> None:
    app = create_app(backend)

    def respond(*given: Any, **body: Any) -> str:
        data = json.dumps({"input": list(given), "stream": stream, **body}).encode()
        answer = asyncio.run(ask(app, "/v1/responses", data))
        assert answer.status == 200, answer.content
        last = answer.content.rpartition(b"data: ")[2]
        return (json.loads(last)["response"] if stream else answer.json())["id"]

    pictures = [{**IMAGE, "image_url": sample(f"{name}.png")} for name in ("one-shape", "three-shapes", "five-shapes")]
    first = respond({"role": "user", "content": pictures[:1]})
    # The model isn't shown an example's pictures.
    example = {"role": "developer", "content": pictures[1:2]}
    second = respond({"role": "user", "content": pictures[2:]}, example, previous_response_id=first)
    respond(U, previous_response_id=second)
    shown: list[Any] = list(iter_media(backend.asked.messages))
    assert [medium.plan for medium in shown] == [backend.media.prepare(medium.source).plan for medium in shown]
    assert len({medium.plan.digest for medium in shown if medium.plan}) == 2
