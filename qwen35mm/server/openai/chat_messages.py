"""The messages of chat completions, as clients of many servers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.contract import Message, Text, ToolCall
from qwen35mm.server.carried import result_parts
from qwen35mm.server.errors import ApiError
from qwen35mm.server.history import CallReader, reasoning_of
from qwen35mm.server.notes import Notes
from qwen35mm.server.parts import Parts, is_part

# The roles of other servers and of older versions of the protocol.
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "ipython": "tool",
}
# What a reply brings along, and clients send back with it; it says nothing to the model.
_SAID = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "prefix", "partial"),
    *("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks", "provider_specific_fields"),
    *(
        "images",
        "annotations",
        "audio",
        "cache_control",
        "id",
        "index",
        "type",
        "status",
        "model",
        "created",
        "finish_reason",
    ),
)


async def read_messages(given: Sequence[Mapping[str, Any]], parts: Parts, notes: Notes) -> list[Message]:
    """The messages of a request.

    Only what the user says now must be readable. In earlier turns and in tools' results, a text stands for a part that
    can't be read: those come again with each turn.

    Raises:
        ApiError: 400, says what is wrong and where.
    """
    roles = [_role(values, f"messages.{at}", notes) for at, values in enumerate(given)]
    answered = max((at for at, role in enumerate(roles) if role == "assistant"), default=-1)
    calls = CallReader(notes)
    found: list[Message] = []
    for at, (values, role) in enumerate(zip(given, roles, strict=True)):
        must_read = at > answered and role == "user"
        found += await _messages(values, role, f"messages.{at}", parts, calls, notes, must_read=must_read)
    return found


def continues(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the reply, as DeepSeek's and DashScope's clients say it."""
    is_reply = isinstance(role := last.get("role"), str) and ROLES.get(role) == "assistant"
    return is_reply and (last.get("prefix") is True or last.get("partial") is True)


def _role(values: Mapping[str, Any], place: str, notes: Notes) -> str:
    role = values.get("role")
    if not isinstance(role, str):
        expected = "system, developer, user, assistant or tool"
        raise ApiError(400, f"{place}.role must be {expected}; got {role!r:.100}.", f"{place}.role")
    if role not in ROLES:
        notes.change(f"{place}.role", f"{role!r:.60} is read as user")
    return ROLES.get(role, "user")


async def _messages(
    values: Mapping[str, Any],
    role: str,
    place: str,
    parts: Parts,
    reader: CallReader,
    notes: Notes,
    *,
    must_read: bool,
) -> list[Message]:
    """One message of a request; a system message with media becomes two."""
    unknown = {name: value for name, value in values.items() if value is not None and name not in _SAID}
    notes.ignore_rest(unknown, (), place)
    given = values.get("content")
    if role == "tool":
        given = result_parts(given, is_part, f"{place}.content", notes)
    content = await parts.content(given, f"{place}.content", must_read=must_read)
    if isinstance(images := values.get("images"), list):
        # Ollama's form: base64 beside the text.
        listed = [{"type": "image", "image": each} for each in images]
        content = (*await parts.content(listed, f"{place}.images", must_read=must_read), *content)
    name = values.get("name") if isinstance(values.get("name"), str) else None
    if role == "assistant":
        if not content and isinstance(refusal := values.get("refusal"), str) and refusal:
            content = (Text(refusal),)
        reasoning = reasoning_of(values) or _thoughts(values.get("content"))
        calls = await _calls(values, place, parts, reader, notes)
        return [Message("assistant", content, reasoning=reasoning, tool_calls=calls, name=name)]
    for field in ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"):
        if values.get(field):
            notes.ignore(f"{place}.{field}", f"has no meaning in a message of role {role}")
    if role == "tool":
        call_id = values.get("tool_call_id")
        return [Message("tool", content, tool_call_id=call_id if isinstance(call_id, str) else None, name=name)]
    texts = tuple(part for part in content if isinstance(part, Text))
    if role == "system" and len(texts) < len(content):
        notes.change(place, "is a system message with media, which are read as the user's")
        media = tuple(part for part in content if not isinstance(part, Text))
        return [*([Message("system", texts)] if texts else []), Message("user", media)]
    return [Message("system" if role == "system" else "user", content, name=name)]


def _thoughts(content: Any) -> str | None:
    """The thinking that is among an assistant's content parts."""
    parts = content if isinstance(content, list) else []
    blocks = [each for each in parts if isinstance(each, dict) and each.get("type") in ("thinking", "reasoning")]
    return reasoning_of({"thinking_blocks": blocks})


async def _calls(
    values: Mapping[str, Any], place: str, parts: Parts, reader: CallReader, notes: Notes
) -> tuple[ToolCall, ...]:
    calls, former = values.get("tool_calls"), values.get("function_call")
    listed = calls if isinstance(calls, list) else [each for each in (calls, former) if isinstance(each, dict)][:1]
    found: list[ToolCall] = []
    for at, call in enumerate(listed):
        where = f"{place}.tool_calls.{at}"
        await parts.breathe()
        if not isinstance(call, dict):
            notes.ignore(where, "isn't an object")
            continue
        function = next((call[kind] for kind in ("function", "custom") if isinstance(call.get(kind), dict)), call)
        # A custom tool takes a text.
        given = function["input"] if "input" in function else function.get("arguments")
        if "input" in function and isinstance(given, str):
            given = {"input": given}
        found.append(reader.read(function.get("name"), given, call.get("id"), where))
    return tuple(found)
