"""Anthropic's messages and their content blocks, from a request's body to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwen35mm.contract import Image, Message, Text, ToolCall, Video
from qwen35mm.server.anthropic.tools import Toolbox
from qwen35mm.server.carried import add_line, carried, json_text, result_parts
from qwen35mm.server.errors import ApiError
from qwen35mm.server.history import CallReader, left_out
from qwen35mm.server.notes import Notes
from qwen35mm.server.parts import Parts, UnreadableError

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What clients say about themselves in front of the system prompt. It may change with every request.
_BILLING = "x-anthropic-billing-header:"
_COMMON = ("type", "id", "cache_control", "citations", "caller", "index")
# Blocks that say nothing to the model.
_SILENT = ("redacted_thinking", "fallback")
_DATA = ("source", "title", "context", "text", "media_type")
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": _DATA,
    "document": _DATA,
    "search_result": ("source", "title", "content"),
    "tool_use": ("name", "input", "signature"),
    "tool_result": ("tool_use_id", "content", "is_error", "name"),
    "thinking": ("thinking", "signature"),
    "tool_reference": ("tool_name",),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
}
Content = list[Text | Image | Video]
# What clients write after a tool's result: notes between these tags, and one text after results that name tools.
_NOTE, _NOTE_END = "<system-reminder>", "</system-reminder>"
_LOADED = "Tool loaded."


@dataclass
class _Result:
    """A tool's result.

    Attributes:
        loads_tools: whether it tells the model of tools.
    """

    content: Content
    call_id: str | None
    loads_tools: bool

    def takes(self, text: str) -> bool:
        """Whether a text after this result belongs to it: a note of the client, such as a reminder, or that tools are
        loaded.

        As the user's own turn it would be a new question, for which the template drops the thinking of all steps
        before: they would have to be read again. What a person writes is always the user's turn.
        """
        return (self.loads_tools and text.strip() == _LOADED) or _is_note(text)

    @property
    def message(self) -> Message:
        return Message("tool", tuple(self.content) or (Text(""),), tool_call_id=self.call_id)


class Blocks:
    """Reads the messages of one request."""

    def __init__(self, parts: Parts, toolbox: Toolbox, notes: Notes) -> None:
        self._parts = parts
        self._toolbox = toolbox
        self._notes = notes
        self._calls = CallReader(notes)

    def system(self, system: str | Sequence[Any]) -> list[Message]:
        """The system message; none if it says nothing."""
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        texts: list[str] = []
        for at, block in enumerate(blocks):
            text = self._system_text(block, f"system.{at}")
            if text.startswith(_BILLING):
                self._notes.ignore(f"system.{at}", "begins with a line about billing")
                # Some gateways join a system prompt's blocks.
                text = text.partition("\n")[2].lstrip("\n")
            if text:
                texts.append(text)
        return [Message("system", (Text("\n\n".join(texts)),))] if texts else []

    def _system_text(self, block: Any, place: str) -> str:
        if isinstance(block, str):
            return block
        if block.get("type") in ("text", None):
            self._check_fields({**block, "type": "text"}, place)
            return self._text(block.get("text"), f"{place}.text")
        return self._carried(block, place) or ""

    async def messages(self, values: Sequence[dict[str, Any]]) -> list[Message]:
        """The conversation after the system message.

        Raises:
            ApiError: 400, says what is wrong and where.
        """
        answered = max((at for at, each in enumerate(values) if each.get("role") == "assistant"), default=-1)
        found: list[Message] = []
        for at, each in enumerate(values):
            found += await self._message(each, f"messages.{at}", is_new=at > answered)
        if found and found[-1].role == "assistant" and not found[-1].tool_calls and not found[-1].text:
            # There is nothing to continue.
            found.pop()
        return found

    async def _message(self, values: dict[str, Any], place: str, *, is_new: bool) -> list[Message]:
        """One message of a body. Each tool result becomes a turn of its own."""
        self._notes.ignore_rest(values, ("role", "content", "id", "type", "cache_control", "model"), place)
        given = values.get("role")
        if not isinstance(given, str):
            raise ApiError(400, f"{place}.role must be user or assistant; got {given!r:.100}.", f"{place}.role")
        role = ROLES.get(given)
        if role is None:
            self._notes.change(f"{place}.role", f"{given!r:.60} is read as user")
            role = "user"
        results: list[_Result] = []
        content: Content = []
        calls: list[ToolCall] = []
        thoughts: list[str] = []
        blocks = values.get("content")
        must_read = is_new and role == "user"
        listed = (
            _listed(blocks, f"{place}.content")
            if must_read
            else result_parts(blocks, _is_typed, f"{place}.content", self._notes)
        )
        for at, block in enumerate(listed):
            where = f"{place}.content.{at}" if isinstance(blocks, list) else f"{place}.content"
            await self._parts.breathe()
            match block:
                case {"type": "tool_use"} if role == "assistant":
                    self._check_fields(block, where)
                    calls.append(self._calls.read(block.get("name"), block.get("input"), block.get("id"), where))
                case {"type": "tool_result"} if role == "user":
                    results.append(await self._result(block, where))
                case {"type": "text", "text": str(text)} if results and results[-1].takes(text):
                    self._check_fields(block, where)
                    results[-1].content.append(Text(f"\n\n{text}"))
                case {"type": "thinking"} if role == "assistant":
                    self._check_fields(block, where)
                    thoughts.append(self._text(block.get("thinking"), f"{where}.thinking"))
                case _:
                    await self._add(content, block, where, must_read=must_read)
        if role == "system":
            return [Message("system", self._without_media(content, place))] if content else []
        if role == "assistant":
            reasoning = "".join(thoughts) or None
            return [Message("assistant", tuple(content), reasoning=reasoning, tool_calls=tuple(calls))]
        turns = [result.message for result in results]
        return [*turns, *([Message("user", tuple(content))] if content or not results else [])]

    async def _result(self, block: dict[str, Any], place: str) -> _Result:
        self._check_fields(block, place)
        content: Content = []
        listed = result_parts(block.get("content"), _is_block, f"{place}.content", self._notes)
        for at, each in enumerate(listed):
            await self._add(content, each, f"{place}.content.{at}", must_read=False)
        # The prompt has no other place for it.
        if block.get("is_error") is True and not any("error" in _lower(part) for part in content):
            content.insert(0, Text("Error: " if content else "Error"))
        name = block.get("tool_use_id")
        loads = any(isinstance(each, dict) and each.get("type") == "tool_reference" for each in listed)
        return _Result(content, name if isinstance(name, str) else None, loads)

    async def _add(self, content: Content, block: Any, place: str, *, must_read: bool) -> None:
        """Reads a block of a message, or of a tool's result."""
        await self._parts.breathe()
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        kind = block.get("type")
        if not isinstance(kind, str):
            raise ApiError(400, f"{place} must be a block with a type; got {kind!r:.100}.", f"{place}.type")
        if kind in FIELDS:
            self._check_fields(block, place)
        match kind:
            case "text":
                text = self._text(block.get("text"), f"{place}.text", must_read=must_read)
                content += [Text(text)] if text else []
            case "image" | "document" | "container_upload":
                try:
                    content += await self._file(block, kind, place, must_read=must_read)
                except UnreadableError as error:
                    if must_read:
                        raise
                    self._notes.change(place, "can't be read; a text says so to the model")
                    add_line(content, left_out(error.kind, error.name))
            case "search_result":
                head = [str(block[name]) for name in ("title", "source") if block.get(name)]
                add_line(content, "\n".join([*head, *_texts(block.get("content"))]))
            case "tool_reference":
                add_line(content, self._toolbox.introduce(block.get("tool_name")))
            case "tool_addition" | "tool_removal":
                self._change_tools(content, block, kind, place)
            case "compaction":
                self._notes.change(place, "is carried as text, after what it sums up")
                content += [Text(text)] if (text := self._text(block.get("content"), f"{place}.content")) else []
            case "thinking":
                pass
            case _ if kind not in _SILENT:
                if line := self._carried(block, place):
                    add_line(content, line)

    async def _file(self, block: dict[str, Any], kind: str, place: str, *, must_read: bool) -> Content:
        """An image, or the content of a document.

        Raises:
            UnreadableError: 400, it is of a kind that this server doesn't read, or damaged.
        """
        source = block.get("source")
        name = block.get("title")
        match source:
            case {"type": "text", "data": str(text)}:
                return [Text(_titled(block, text))]
            case {"type": "content", "content": given}:
                content: Content = []
                for at, each in enumerate(_listed(given, f"{place}.source.content")):
                    await self._add(content, each, f"{place}.source.content.{at}", must_read=False)
                return [Text(_titled(block, "")), *content] if _titled(block, "") else content
            case {"type": "base64", "data": str(data)} if kind == "image":
                part: dict[str, Any] = {"type": "image", "image": data}
            case {"type": "url", "url": str(url)} if kind == "image":
                part = {"type": "image_url", "image_url": url}
            case {"type": "base64", "data": str(data), "media_type": str(media_type)}:
                address = f"data:{media_type};base64,{data.rpartition(',')[2]}"
                part = {"type": "file", "file": {"file_data": address, "filename": name}}
            case _:
                how = source.get("type") if isinstance(source, dict) else source
                message = f"{place}: the {kind} can't be read from {how!r:.60} here; send its data along."
                raise UnreadableError(400, message, f"{place}.source", kind=kind, name=name)
        read = await self._parts.part(part, f"{place}.source", must_read=must_read)
        return [] if read is None else [read]

    def _change_tools(self, content: Content, block: dict[str, Any], kind: str, place: str) -> None:
        tool = block.get("tool")
        tool = tool if isinstance(tool, dict) else {}
        name = tool.get("name")
        if kind == "tool_removal":
            self._notes.change(place, "is told to the model, but the tool can still be called")
            add_line(content, f"The tool {name!s:.256} can't be called any more.")
        elif tool.get("type") == "tool_definition":
            line = self._toolbox.define(tool.get("definition"), f"{place}.tool.definition")
            if line is not None:
                add_line(content, line)
        else:
            add_line(content, self._toolbox.introduce(name))

    def _without_media(self, content: Content, place: str) -> tuple[Text, ...]:
        if all(isinstance(part, Text) for part in content):
            return tuple(part for part in content if isinstance(part, Text))
        self._notes.change(place, "can't hold media; a text says so to the model")
        return tuple(part if isinstance(part, Text) else Text(f"{left_out(part.kind)}\n") for part in content)

    def _carried(self, block: dict[str, Any], place: str) -> str | None:
        line = carried(block)
        what = f"of type {block.get('type')!r:.60}"
        if line is None:
            self._notes.ignore(f"{place} {what}", "says nothing here")
        else:
            self._notes.change(f"{place} {what}", "is carried as text")
        return line

    def _text(self, value: Any, place: str, *, must_read: bool = False) -> str:
        if isinstance(value, str | None):
            return value or ""
        if must_read:
            raise ApiError(400, f"{place} must be a string; got {type(value).__name__}.", place)
        self._notes.change(place, "isn't text; it is read as JSON text")
        return json_text(value)

    def _check_fields(self, block: dict[str, Any], place: str) -> None:
        self._notes.ignore_rest(block, (*_COMMON, *FIELDS[block["type"]]), place)


def _listed(content: Any, place: str) -> list[Any]:
    """The blocks of a message's content, or of a tool's result."""
    if content is None:
        return []
    listed = content if isinstance(content, list) else [content]
    if not all(isinstance(each, str | dict) for each in listed):
        raise ApiError(400, f"{place} must be a string or a list of blocks.", place)
    return listed


def _is_typed(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _is_block(value: Any) -> bool:
    return _is_typed(value) and value["type"] in (*FIELDS, *_SILENT, "container_upload", "compaction")


def _texts(blocks: Any) -> list[str]:
    listed = blocks if isinstance(blocks, list) else [blocks]
    found = [each.get("text") if isinstance(each, dict) else each for each in listed]
    return [each for each in found if isinstance(each, str)]


def _titled(block: dict[str, Any], text: str) -> str:
    """A document's text below its title and what it is about."""
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return "\n".join([*head, text]) if head else text


def _lower(part: Text | Image | Video) -> str:
    return part.text.casefold() if isinstance(part, Text) else ""


def _is_note(text: str) -> bool:
    """Whether a text is notes of the client alone."""
    *notes, rest = text.split(_NOTE_END)
    return bool(notes) and not rest.strip() and all(note.lstrip().startswith(_NOTE) for note in notes)
