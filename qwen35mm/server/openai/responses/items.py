"""Items in the form in which they are kept, and their conversion to and from requests and messages."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from qwen35mm.contract import Image, Message, Text, ToolCall, Video
from qwen35mm.server.errors import ApiError
from qwen35mm.server.parts import Parts

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


@dataclass(frozen=True)
class Turn:
    """The items of a request or of an answer.

    Attributes:
        items: normalized; a part with a medium has `media`, an index into `media` of the turn.
    """

    items: tuple[dict[str, Any], ...]
    media: tuple[Image | Video, ...] = ()


# Finds an item of a kept response, with the media of its turn.
Find = Callable[[str, str], Awaitable[tuple[dict[str, Any], Sequence[Image | Video]]]]


async def read_turn(given: str | Sequence[BaseModel], node: str, parts: Parts, find: Find) -> Turn:
    """Reads the items of a request's input.

    Args:
        node: 32 hex digits, the id under which the turn will be kept.
        find: looks an item up, given its id and its place in the request.

    Raises:
        ApiError: 400 or 404, an item can't be used; says which and why.
    """
    if isinstance(given, str):
        values: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": given}]
    else:
        values = [item.model_dump(exclude_none=True) for item in given]
    media: list[Image | Video] = []
    items: list[dict[str, Any]] = []
    for at, value in enumerate(values):
        place = f"input.{at}"
        if value["type"] == "item_reference":
            value, kept = await find(value["id"], place)
            for part in _media_parts(value):
                media.append(kept[part["media"]])
                part["media"] = len(media) - 1
        else:
            value = await _read_item(value, place, parts, media)
        items.append({"id": item_id(value["type"], node, at), **value})
    return Turn(tuple(items), tuple(media))


def item_id(kind: str, node: str, at: int) -> str:
    """The id of an item: its kind, the 32 hex digits of its node, and its index there."""
    return f"{PREFIXES[kind]}_{node}{at:x}"


async def _read_item(value: dict[str, Any], place: str, parts: Parts, media: list[Image | Video]) -> dict[str, Any]:
    kind = value["type"]
    if kind == "reasoning":
        thoughts = {name: value[name] for name in ("summary", "content") if value.get(name)}
        return {"type": kind, "summary": [], "status": "completed", **thoughts}
    if kind == "function_call":
        _arguments(value["arguments"], place)
        return {name: value[name] for name in ("type", "call_id", "name", "arguments")} | {"status": "completed"}
    if kind == "function_call_output":
        output = value["output"]
        if not isinstance(output, str):
            output = await _read_parts(output, f"{place}.output", parts, media)
        return {"type": kind, "call_id": value["call_id"], "output": output, "status": "completed"}
    role, content = value["role"], value["content"]
    if role == "assistant":
        said = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
        said = [_said(part) for part in said]
        return {"type": kind, "role": role, "status": value.get("status", "completed"), "content": said}
    content = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    read = await _read_parts(content, f"{place}.content", parts, media)
    if role != "user" and _media_parts({"content": read}):
        raise ApiError(400, f"{place}: a {role} message can't hold media; put them into a user message.", place)
    return {"type": kind, "role": role, "status": "completed", "content": read}


def _said(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    return {"type": "output_text", "text": part["text"], "annotations": []}


async def _read_parts(
    values: Iterable[dict[str, Any]], place: str, parts: Parts, media: list[Image | Video]
) -> list[dict[str, Any]]:
    read = []
    for at, value in enumerate(values):
        if value["type"] == "input_text":
            read.append({"type": "input_text", "text": value["text"]})
            continue
        part = await parts.part(value, f"{place}.{at}")
        assert isinstance(part, Image | Video), "a part with a text is of type input_text"
        media.append(part)
        detail = {"detail": value["detail"]} if value["type"] == "input_image" else {}
        read.append({"type": value["type"], **detail, "media": len(media) - 1})
    return read


def _media_parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of an item that have a medium."""
    content = item.get("content") or item.get("output")
    return [part for part in content if "media" in part] if isinstance(content, list) else []


def with_addresses(item: dict[str, Any], address_of: Callable[[str, int], str | None]) -> dict[str, Any]:
    """The item in the form for a client.

    Args:
        address_of: the address of a medium, from its part's type and its index in the turn; None leaves it out.
    """
    names = {"input_image": "image_url", "input_video": "video_url"}

    def shown(part: dict[str, Any]) -> dict[str, Any]:
        if "media" not in part:
            return part
        values = {name: value for name, value in part.items() if name != "media"}
        address = address_of(part["type"], part["media"])
        return values if address is None else {**values, names[part["type"]]: address}

    shown_parts = {
        name: list(map(shown, item[name])) for name in ("content", "output") if isinstance(item.get(name), list)
    }
    return {**item, **shown_parts}


def messages_of(turns: Sequence[Turn], instructions: str | None) -> list[Message]:
    """Converts turns to the messages of a conversation.

    Raises:
        ApiError: 400, an item is in the wrong place. The last turn is the request's input.
    """
    system = [instructions] if instructions else []
    messages: list[Message] = []
    called: set[str] = set()
    for number, turn in enumerate(turns):
        reply = _Reply()
        for at, item in enumerate(turn.items):
            place = f"input.{at}" if number == len(turns) - 1 else f"previous_response_id: item {item['id']}"
            if item["type"] == "function_call" and item.get("status") != "incomplete":
                called.add(item["call_id"])
            if item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant":
                messages += reply.take(item, place)
                continue
            messages += reply.end()
            if item["type"] == "function_call_output":
                if item["call_id"] not in called:
                    raise ApiError(400, f"{place}: there is no function call {item['call_id'][:200]!r} before.", place)
                output = item["output"]
                content = (Text(output),) if isinstance(output, str) else _content(output, turn.media)
                messages.append(Message("tool", content, tool_call_id=item["call_id"]))
            elif item["role"] == "user":
                messages.append(Message("user", _content(item["content"], turn.media)))
            elif messages:
                raise ApiError(400, f"{place}: a {item['role']} message must come before all others.", place)
            else:
                system.append("".join(part["text"] for part in item["content"]))
        messages += reply.end()
    return [Message("system", (Text("\n\n".join(system)),)), *messages] if system else messages


class _Reply:
    """Collects items into one answer of the assistant."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def take(self, item: dict[str, Any], place: str) -> list[Message]:
        """Adds an item. Returns the previous answer if this item begins a new one."""
        ended: list[Message] = []
        if item["type"] == "function_call" and item.get("status") == "incomplete":
            # Its arguments are cut off, so it is no call: the model sees what it wrote.
            self._texts.append(f"{item['name']}: {item['arguments']}")
        elif item["type"] == "function_call":
            self._calls.append(ToolCall(item["name"], _arguments(item["arguments"], place), item["call_id"]))
        elif item["type"] == "reasoning":
            ended = self.end() if self._texts or self._calls else []
            self._thoughts += [part["text"] for part in item.get("content") or item["summary"]]
        else:
            # Calls may stand between the texts of one answer, but two texts in a row are two answers.
            ended = self.end() if self._texts and not self._calls else []
            self._texts.append("".join(part.get("text") or part.get("refusal", "") for part in item["content"]))
        return ended

    def end(self) -> list[Message]:
        """The answer, if it isn't empty."""
        text, thoughts, calls = "".join(self._texts), "".join(self._thoughts), tuple(self._calls)
        self._texts, self._thoughts, self._calls = [], [], []
        content = (Text(text),) if text or not calls else ()
        return [Message("assistant", content, reasoning=thoughts or None, tool_calls=calls)] if text or calls else []


def _content(parts: Iterable[dict[str, Any]], media: Sequence[Image | Video]) -> tuple[Text | Image | Video, ...]:
    return tuple(media[part["media"]] if "media" in part else Text(part["text"]) for part in parts)


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{place}.arguments must be a JSON object, as text.", f"{place}.arguments")
    return arguments
