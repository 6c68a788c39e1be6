"""What clients of Anthropic's protocol send that this server doesn't have: carried, translated or ignored, and told."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from qwen35mm.contract import GenerationRequest, Image, Message, Text
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from tests.server import instant
from tests.server.conftest import CALL, sample
from tests.server.instant import Answer, Recording, ask

U = {"role": "user", "content": "Hello"}
HI = {"type": "text", "text": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
PICTURE = sample("two-shapes.jpg").partition(",")[2]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": PICTURE}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Recording:
    return Recording(demo)


def post(backend: Recording, path: str = "/v1/messages", *, strict: bool = False, **body: Any) -> Answer:
    body = {"model": "default", "messages": [U], "max_tokens": 5, **body}
    app = create_app(backend, strict_fields=strict)
    return asyncio.run(ask(app, path, json.dumps(body).encode()))


def asked(backend: Recording, **body: Any) -> tuple[GenerationRequest, list[str]]:
    """What the backend was asked, and the notes on the request."""
    answer = post(backend, **body)
    assert answer.status == 200, answer.content
    (told,) = answer.headers.get(HEADER, [""])
    return backend.asked, told.split(" | ") if told else []


def conversation(backend: Recording, *messages: Any, **body: Any) -> tuple[tuple[Message, ...], list[str]]:
    request, notes = asked(backend, messages=list(messages), **body)
    return tuple(request.messages), notes


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(**more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content, **more}]}


def test_fields_without_effect_need_no_note(backend: Recording) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    tool = {**TOOL, "type": None, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    body = {
        "betas": ["a"],
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": edits},
        "container": None,
        "mcp_servers": [],
        "service_tier": "auto",
        "speed": "standard",
        "thinking": {"type": "adaptive", "display": "updates"},
        "tools": [{**tool, "input_examples": [{"city": "Rome"}], "allowed_callers": ["direct"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
        "top_k": -1,
    }
    request, notes = asked(backend, **body)
    assert notes == []
    assert request.tools == ({"type": "function", "function": {**without(TOOL, "input_schema"), "parameters": SCHEMA}},)
    assert request.params is not None
    assert request.params.top_k == 0
    assert post(backend, strict=True, **body).status == 200


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management isn't supported",
        ),
        (
            {"mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]},
            "mcp_servers isn't supported here",
        ),
        ({"speed": "fast"}, "speed isn't supported here; ignored"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort isn't supported here; ignored"),
        ({"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget isn't a known field; ignored"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type isn't supported here; ignored"),
        ({"stop_sequences": ["", "x"]}, "stop_sequences has empty texts; ignored"),
        ({"tools": [TOOL], "tool_choice": {"type": "new"}}, "tool_choice.type isn't supported here; ignored"),
        ({"system": [{"type": "poem", "verse": "A"}]}, "system.0 of type 'poem' is carried as text"),
        ({"messages": [{**U, "mood": "good"}]}, "messages.0.mood isn't a known field; ignored"),
        ({"messages": [{"role": "user", "content": [{**HI, "mood": 1}]}]}, "messages.0.content.0.mood isn't a known"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role 'critic' is read as user"),
    ],
)
def test_what_is_ignored_or_translated_is_told(body: dict[str, Any], note: str, backend: Recording) -> None:
    (told,) = asked(backend, **body)[1]
    assert told.startswith(note)
    refused = post(backend, strict=True, **body)
    assert refused.status == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread isn't supported here"),
        ({"compaction": {"instructions": "x"}}, "compaction isn't supported here"),
        ({"output_config": {"format": {"type": "grammar"}}}, "must be of type json_schema with a schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "got 'other'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "got ''"),
        ({"tools": [{"name": "none"}], "tool_choice": {"type": "tool", "name": "none"}}, "can't force a tool"),
        ({"messages": [{"role": "user", "content": [HI, PDF]}]}, "got a file of type 'application/pdf'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "from 'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text must be a string; got int"),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "must be a block with a type"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, "role must be user or assistant; got 5"),
        ({"max_tokens": "many"}, "max_tokens can't be used"),
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any], words: str, backend: Recording) -> None:
    answer = post(backend, **body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "thinks", "budget"),
    [
        ({"output_config": {"effort": "low"}}, None, 1024),
        ({"output_config": {"effort": "medium"}, "thinking": {"type": "adaptive"}}, True, 4096),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, True, None),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 77}}, True, 77),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
    ],
)
def test_effort_limits_thinking(
    body: dict[str, Any], thinks: bool | None, budget: int | None, backend: Recording
) -> None:
    request, notes = asked(backend, **body)
    assert notes == []
    assert request.params is not None
    assert (request.enable_thinking, request.params.thinking_budget) == (thinks, budget)


@pytest.mark.parametrize(
    "body",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_format_constrains_the_answer(body: dict[str, Any], backend: Recording) -> None:
    request, notes = asked(backend, **body)
    assert notes == []
    assert request.params is not None
    assert json.loads(request.params.json_schema or "") == SCHEMA


def test_a_request_may_leave_its_limit_out(backend: Recording) -> None:
    for none in (None, 0, -1):
        assert asked(backend, max_tokens=none)[1] == []


def test_counting_takes_the_fields_of_a_reply(backend: Recording) -> None:
    body: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    answer = post(backend, "/v1/messages/count_tokens", **body, stream=True, temperature=1, stop_sequences=["x"])
    assert HEADER not in answer.headers
    assert answer.json() == post(backend, "/v1/messages/count_tokens", **body).json()


def test_system_messages_may_stand_anywhere(backend: Recording) -> None:
    said = [U, {"role": "system", "content": [HI]}, assistant(HI), {"role": "developer", "content": "Be brief."}, U]
    messages, _ = conversation(backend, *said, system="First.")
    assert [(message.role, message.text) for message in messages] == [
        ("system", "First."),
        ("user", "Hello"),
        ("system", "Hi"),
        ("assistant", "Hi"),
        ("system", "Be brief."),
        ("user", "Hello"),
    ]


def test_the_system_prompt_is_what_says_something(backend: Recording) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00a1b;"}
    blocks = [billing, {**HI, "cache_control": {"type": "ephemeral", "ttl": "1h"}, "citations": None}]
    (system, _), notes = conversation(backend, U, system=[*blocks, {"type": "text", "text": ""}, "There."])
    assert system.text == "Hi\n\nThere."
    assert notes == ["system.0 begins with a line about billing; ignored"]
    # Joined by a gateway.
    (system, _), notes = conversation(backend, U, system=f"{billing['text']}\n\nBe brief.\nAlways.")
    assert (system.text, len(notes)) == ("Be brief.\nAlways.", 1)
    (system, _), notes = conversation(backend, U, system=[{"type": None, "text": "Hi"}])
    assert (system.text, notes) == ("Hi", [])
    (only,), notes = conversation(backend, U, system=[{"type": "text", "text": ""}])
    assert (only.role, notes) == ("user", [])


def test_documents_and_search_results_are_text(backend: Recording) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    parts = {"type": "content", "content": [HI, IMAGE]}
    encoded = {"type": "base64", "media_type": "text/markdown", "data": base64.b64encode(b"# Twice").decode()}
    found = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [HI]}
    blocks = [
        {"type": "document", "source": source, "title": "Tale", "context": "Old", "citations": {"enabled": True}},
        {"type": "document", "source": parts},
        {"type": "document", "source": encoded},
        found,
    ]
    (message,), notes = conversation(backend, {"role": "user", "content": blocks})
    assert notes == []
    assert len(message.media) == 1
    assert message.text == "Tale\nOld\nOnce.Hi# Twice\nA\nhttps://a.example\nHi\n"


def test_files_of_past_turns_are_left_out(backend: Recording) -> None:
    before = {"role": "user", "content": [HI, PDF, {"type": "container_upload", "file_id": "f"}]}
    (first, *_), notes = conversation(backend, before, assistant(HI), U)
    assert (
        first.text == "Hi\n[file left out: it can't be read here]\n[container_upload left out: it can't be read here]\n"
    )
    assert [note.partition(" ")[0] for note in notes] == ["messages.0.content.1", "messages.0.content.2"]
    # Nor does a tool's result end a conversation.
    damaged = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for block, kind in ((PDF, "file"), (damaged, "image")):
        (*_, last), notes = conversation(backend, U, assistant(use()), result([block]), tools=[TOOL])
        assert last.text == f"[{kind} left out: it can't be read here]\n"
        assert len(notes) == 1


def test_all_that_is_asked_since_the_last_answer_must_be_readable(backend: Recording) -> None:
    damaged = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    asking = {"role": "user", "content": [damaged]}
    for after in (U, {"role": "system", "content": "Be short."}):
        assert post(backend, messages=[U, assistant(HI), asking, after]).status == 400
    assert post(backend, messages=[asking, U, assistant(HI), U]).status == 200


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            '[server_tool_use: {"name": "web_search", "input": {"query": "x"}}]\nHi',
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"type": "web_search_result", "url": "https://a.example", "encrypted_content": "e"}],
            },
            '[web_search_tool_result: {"content": [{"type": "web_search_result", "url": "https://a.example"}]}]\nHi',
        ),
        ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [HI]}, None),
        ({"type": "hologram", "data": "x" * 5000, "at": 1}, '[hologram: {"at": 1}]\nHi'),
        ({"type": "hologram"}, "Hi"),
        ({"type": "hologram", "text": "数据" * 600}, f'[hologram: {{"text": "{"数据" * 600}"}}]\nHi'),
        ({"type": "compaction", "content": "Summary. "}, "Summary. Hi"),
    ],
)
def test_foreign_blocks_are_carried_as_text(block: dict[str, Any], text: str | None, backend: Recording) -> None:
    (_, said, _), notes = conversation(backend, U, assistant(block, HI), U)
    assert said.text == text if text is not None else "[mcp_tool_result" in said.text
    assert len(notes) == 1
    assert notes[0].startswith("messages.1.content.0 ")


def test_blocks_that_say_nothing_are_left_out(backend: Recording) -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "text", "text": ""},
        {"type": "text", "text": None},
        HI,
    ]
    (_, said, _), notes = conversation(backend, U, assistant(*blocks), U)
    assert (said.reasoning, said.content, notes) == ("Hm.", (Text("Hi"),), [])


@pytest.mark.parametrize(("given", "read"), [('{"city": "Ro', {"arguments": '{"city": "Ro'}), (None, {}), ("", {})])
def test_damaged_calls_are_carried(given: Any, read: dict[str, Any], backend: Recording) -> None:
    (_, said, _), notes = conversation(backend, U, assistant(use(input=given)), result("Rain"), tools=[TOOL])
    assert dict(said.tool_calls[0].arguments) == read
    assert len(notes) == bool(given)


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        (None, {}, ""),
        ([], {}, ""),
        ("", {}, ""),
        ({"a": 1}, {}, '{"a": 1}'),
        (5, {}, "5"),
        ([{"id": 1}, {"id": 2}], {}, '[{"id": 1}, {"id": 2}]'),
        ([HI, {"type": "json", "json": 1}], {}, 'Hi{"type": "json", "json": 1}'),
        (["Rain"], {}, "Rain"),
        ("Nothing there.", {"is_error": True}, "Error: Nothing there."),
        ("Error 5", {"is_error": True}, "Error 5"),
        ("", {"is_error": True}, "Error"),
        ("Fine.", {"is_error": False}, "Fine."),
    ],
)
def test_results_come_in_many_forms(content: Any, more: dict[str, Any], text: str, backend: Recording) -> None:
    (*_, last), _ = conversation(backend, U, assistant(use()), result(content, **more), tools=[TOOL])
    assert (last.role, last.text, last.tool_call_id) == ("tool", text, "t1")


@pytest.mark.parametrize(
    ("block", "text"), [(5, "[5]"), ({"a": 1}, '[{"a": 1}]'), ({"type": "text", "text": [1]}, "[1]")]
)
def test_odd_blocks_end_no_conversation(block: Any, text: str, backend: Recording) -> None:
    (_, said, _), notes = conversation(backend, U, assistant(block), U)
    assert said.text == text
    assert len(notes) == 1
    assert post(backend, messages=[{"role": "user", "content": [block]}]).status == 400


def test_notes_of_the_client_after_a_result_are_no_new_question(backend: Recording) -> None:
    reminder = "<system-reminder>\nFiles changed.\n</system-reminder>\n"
    blocks = [
        *result("Rain")["content"],
        {"type": "text", "text": reminder},
        {"type": "text", "text": "And <b>now</b>?"},
    ]
    (*_, tool, user), notes = conversation(backend, U, assistant(use()), {"role": "user", "content": blocks})
    assert (tool.text, user.text, notes) == (f"Rain\n\n{reminder}", "And <b>now</b>?", [])
    # What a person wrote between two of them is a turn of its own.
    for said, role in ((f"{reminder}\n{reminder}", "tool"), (f"{reminder}And now?{reminder}", "user")):
        content = [*result("Rain")["content"], {"type": "text", "text": said}]
        (*_, last), _ = conversation(backend, U, assistant(use()), {"role": "user", "content": content}, tools=[TOOL])
        assert last.role == role
    found = result([{"type": "tool_reference", "tool_name": "weather"}])["content"]
    blocks = [*found, {"type": "text", "text": "Tool loaded."}]
    (*_, tool), _ = conversation(backend, U, assistant(use()), {"role": "user", "content": blocks})
    assert (tool.role, tool.text.endswith("\n\n\nTool loaded.")) == ("tool", True)
    for before, text in ((found, "Stop! What is 2+2?"), (result("Rain")["content"], "<task>Now delete it</task>")):
        blocks = [*before, {"type": "text", "text": text}]
        (*_, user), _ = conversation(backend, U, assistant(use()), {"role": "user", "content": blocks})
        assert (user.role, user.text) == ("user", text)


def test_calls_and_results_need_not_match(backend: Recording) -> None:
    (_, called, after), _ = conversation(backend, U, assistant(use()), U, tools=[TOOL])
    assert (len(called.tool_calls), after.role) == (1, "user")
    (_, alone), _ = conversation(backend, U, result("Rain"), tools=[TOOL])
    assert alone.role == "tool"


@pytest.mark.parametrize(
    "data",
    [
        PICTURE.replace("+", "-").replace("/", "_").rstrip("="),
        PICTURE.replace("+", "%2B"),
        "\n".join(PICTURE[at : at + 76] for at in range(0, len(PICTURE), 76)),
        f"data:image/png;base64,{PICTURE}",
    ],
    ids=["urlsafe", "percent", "lines", "data"],
)
def test_base64_comes_in_many_forms(data: str, backend: Recording) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": data}}
    (message,), notes = conversation(backend, {"role": "user", "content": [image]})
    assert isinstance(message.content[0], Image)
    assert notes == []


def test_images_of_assistants_and_system_messages(backend: Recording) -> None:
    (_, said, _), _ = conversation(backend, U, assistant(IMAGE, HI), U)
    assert len(said.media) == 1
    (system, _), notes = conversation(backend, {"role": "system", "content": [IMAGE, HI]}, U)
    assert system.text == "[image left out: it can't be read here]\nHi"
    assert notes == ["messages.0 can't hold media; a text says so to the model"]


def test_a_begun_reply_that_says_nothing_is_no_beginning(backend: Recording) -> None:
    for content in (None, "", [], [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]):
        (only,), _ = conversation(backend, U, {"role": "assistant", "content": content})
        assert (only.role, backend.asked.continue_reply) == ("user", False)
    (_, begun), _ = conversation(backend, U, {"role": "assistant", "content": "He "})
    assert (begun.text, backend.asked.continue_reply) == ("He ", True)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 9},
        {"type": "mcp_toolset", "mcp_server_name": "a"},
        {"type": "invented_20270101", "name": "invented"},
        {"name": "a>b", "input_schema": {}},
        {"name": "", "input_schema": {}},
    ],
)
def test_tools_without_a_meaning_here_are_left_out(tool: dict[str, Any], backend: Recording) -> None:
    request, notes = asked(backend, tools=[tool, TOOL])
    assert [each["function"]["name"] for each in request.tools] == ["weather"]
    assert len(notes) == 1
    assert notes[0].startswith("tools.0 ")
    for choice in ({"type": "any"}, {"type": "tool", "name": tool.get("name")}) if tool.get("name") else ():
        request, notes = asked(backend, tools=[tool], tool_choice=choice)
        assert (request.tool_choice, request.tools) == ("auto", ())
        assert notes[-1] == "tool_choice asks for tools that were left out; the model chooses"


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text"),
        ("memory_20250818", "memory", "old_path"),
    ],
)
def test_tools_that_the_client_runs_are_described(kind: str, name: str, parameter: str, backend: Recording) -> None:
    request, notes = asked(backend, tools=[{"type": kind, "name": name}], tool_choice={"type": "any"})
    (tool,) = request.tools
    assert tool["function"]["name"] == name
    assert parameter in tool["function"]["parameters"]["properties"]
    assert notes == [f"tools.0 of type {kind!r} is described by its documented parameters"]


def test_tools_in_other_forms(backend: Recording) -> None:
    function = {**without(TOOL, "input_schema"), "parameters": SCHEMA}
    forms = [{"type": "function", "function": function}, {"type": "function", **function, "name": "again"}]
    request, notes = asked(backend, tools=[*forms, {"name": f"mcp__{'x' * 200}__tool", "input_schema": {}}])
    first, second, third = (each["function"] for each in request.tools)
    assert first == function == {**second, "name": function["name"]}
    assert third["parameters"] == {"type": "object", "properties": {}}
    assert notes == ["tools.0 is read as in OpenAI's form", "tools.1 is read as in OpenAI's form"]


def test_the_second_of_two_tools_with_one_name_is_left_out(backend: Recording) -> None:
    request, notes = asked(backend, tools=[TOOL, {**TOOL, "description": "Another."}])
    assert [each["function"]["description"] for each in request.tools] == [TOOL["description"]]
    assert notes == ["tools.1 has the name of another tool, 'weather'; ignored"]


def test_deferred_tools_are_told_where_the_conversation_names_them(
    backend: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = {"name": "ToolSearch", "input_schema": SCHEMA}
    tools = [search, {**TOOL, "defer_loading": True}]
    request, notes = asked(backend, tools=tools)
    assert [each["function"]["name"] for each in request.tools] == ["ToolSearch"]
    found = result([{"type": "tool_reference", "tool_name": "weather"}])
    (*_, last), told = conversation(backend, U, assistant(use(name="ToolSearch")), found, tools=tools)
    assert [each["function"]["name"] for each in backend.asked.tools] == ["ToolSearch"]
    definition = last.text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(definition)["function"]["parameters"] == SCHEMA
    assert notes == told == []
    # The reply may call it, by its schema.
    monkeypatch.setattr(instant, "TEXT", CALL.format(3).replace("days", "city"))
    (block,) = post(backend, messages=[U, assistant(use(name="ToolSearch")), found], tools=tools).json()["content"]
    assert (block["name"], block["input"]) == ("weather", {"city": "3"})
    # Nobody but this server could search: then the model sees them all.
    server_side = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    request, _ = asked(backend, tools=[server_side, {**TOOL, "defer_loading": True}])
    assert [each["function"]["name"] for each in request.tools] == ["weather"]
    request, _ = asked(backend, tools=tools, tool_choice={"type": "tool", "name": "weather"})
    assert [each["function"]["name"] for each in request.tools] == ["ToolSearch", "weather"]


def test_only_deferred_tools_may_be_many(backend: Recording) -> None:
    tools = [{"name": f"tool_{at}", "input_schema": {}} for at in range(257)]
    answer = post(backend, tools=tools)
    assert (answer.status, answer.json()["error"]["message"]) == (
        400,
        "tools may be 256 at most, besides deferred ones; got 257.",
    )
    assert asked(backend, tools=[{**tool, "defer_loading": True} for tool in tools])[0].tools == ()


def test_tools_may_come_and_go_in_the_conversation(backend: Recording) -> None:
    definition = {"type": "tool_definition", "definition": TOOL}
    changes = [
        {"type": "tool_addition", "tool": definition},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "clock"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "clock"}},
    ]
    tools = [{"name": "clock", "input_schema": {}}]
    (_, told), notes = conversation(backend, U, {"role": "user", "content": changes}, tools=tools)
    assert '"name": "weather"' in told.text
    assert "The tool clock can't be called any more.\nThe tool clock can be called." in told.text
    assert len(notes) == 1
