"""Reads the items of a request's input, as clients of many servers write them, into the form in which they are kept."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from qwen35mm.contract import Image, Text, Video
from qwen35mm.server.carried import carried, result_parts
from qwen35mm.server.errors import ApiError
from qwen35mm.server.history import left_out, reasoning_of
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.responses.items import CALLS, COMMENTARY, OUTPUTS, Turn, item_id, media_parts
from qwen35mm.server.parts import Parts, is_part

# Finds an item of a kept response, with the media of its turn.
Find = Callable[[str, str], Awaitable[tuple[dict[str, Any], Sequence[Image | Video]]]]

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
_DETAILS = ("low", "high", "auto", "original")
# What a response brings along, and clients send back with it; it says nothing to the model.
_SAID = (
    "type",
    "id",
    "status",
    "phase",
    "created_by",
    "caller",
    "async",
    "response_id",
    "agent",
    "internal_chat_message_metadata_passthrough",
)
KNOWN: dict[str, tuple[str, ...]] = {
    "message": ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning", "refusal", "tool_call_id"),
    "function_call": ("call_id", "name", "arguments", "namespace", "parsed_arguments"),
    "custom_tool_call": ("call_id", "name", "input", "namespace"),
    "function_call_output": ("call_id", "output", "name"),
    "custom_tool_call_output": ("call_id", "output", "name"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
# Fields of other servers' calls and results that hold their arguments and what came back.
_ARGUMENTS = ("arguments", "action", "operation", "input")
Item = dict[str, Any]


async def read_turn(given: Any, node: str, parts: Parts, find: Find, notes: Notes) -> Turn:
    """Reads the items of a request's input.

    Args:
        given: a text, an item, or a list of texts, items and content parts.
        node: 32 hex digits, the id under which the turn will be kept.
        find: looks an item up, given its id and its place in the request.

    Raises:
        ApiError: 400 or 404, an item can't be used; says which and why.
    """
    reader = _Reader(parts, find, notes)
    items = await reader.read(given)
    named = tuple({"id": item_id(item["type"], node, at), **item} for at, item in enumerate(items))
    return Turn(named, tuple(reader.media))


class _Reader:
    """Reads the items of one request."""

    def __init__(self, parts: Parts, find: Find, notes: Notes) -> None:
        self._parts = parts
        self._find = find
        self._notes = notes
        self.media: list[Image | Video] = []

    async def read(self, given: Any) -> list[Item]:
        if isinstance(given, str):
            return [_message("user", [{"type": "input_text", "text": given}])]
        if isinstance(given, dict):
            self._notes.change("input", "is an item, not a list; it is read as a list of one")
            given = [given]
        found: list[Item] = []
        loose: list[Any] = []
        answered = max((at for at, value in enumerate(given) if _is_answer(value)), default=-1)
        for at, value in enumerate(given):
            if _is_part(value):
                loose.append(value)
                if at + 1 < len(given) and _is_part(given[at + 1]):
                    continue
                place = f"input.{at + 1 - len(loose)}"
                self._notes.change(place, "is no item; it is read as part of a message of the user")
                found.append(_message("user", await self._content(loose, "input", at > answered, at + 1 - len(loose))))
                loose = []
            else:
                found += await self._items(value, f"input.{at}", is_new=at > answered)
        return found

    async def _items(self, value: Item, place: str, *, is_new: bool) -> list[Item]:
        """One value of the input; a message in the form of chat completions may become several items."""
        await self._parts.breathe()
        kind = value.get("type")
        if kind is None:
            is_reference = "role" not in value and isinstance(value.get("id"), str)
            kind = "item_reference" if is_reference else "message"
        if not isinstance(kind, str):
            raise ApiError(400, f"{place}.type must be a string; got {type(kind).__name__}.", f"{place}.type")
        if kind in KNOWN:
            unknown = {name: each for name, each in value.items() if each is not None}
            self._notes.ignore_rest(unknown, (*_SAID, *KNOWN[kind]), place)
        if kind == "item_reference":
            return [await self._kept(value.get("id"), place)]
        if kind == "message":
            return await self._messages(value, place, is_new=is_new)
        if kind == "reasoning":
            thoughts = {name: _thoughts(value.get(name), each) for name, each in _THOUGHTS.items()}
            return [
                {
                    "type": kind,
                    "summary": [],
                    "status": "completed",
                    **{n: each for n, each in thoughts.items() if each},
                }
            ]
        if kind in CALLS:
            return [self._call(value, kind, place)]
        if kind in OUTPUTS:
            return [await self._output(value, kind, place)]
        return await self._foreign(value, kind, place)

    async def _kept(self, name: Any, place: str) -> Item:
        if not isinstance(name, str):
            raise ApiError(400, f"{place}.id must be the id of an item.", f"{place}.id")
        item, media = await self._find(name, place)
        for part in media_parts(item):
            self.media.append(media[part["media"]])
            part["media"] = len(self.media) - 1
        return item

    async def _messages(self, value: Item, place: str, *, is_new: bool) -> list[Item]:
        given = value.get("role")
        if not isinstance(given, str):
            raise ApiError(400, f"{place}.role must be user, assistant, system or developer.", f"{place}.role")
        if given in ("tool", "function"):
            return [
                await self._output(
                    {"call_id": value.get("tool_call_id"), "output": value.get("content")}, OUTPUTS[0], place
                )
            ]
        role = ROLES.get(given)
        if role is None:
            self._notes.change(f"{place}.role", f"{given!r:.60} is read as user")
            role = "user"
        num_media = len(self.media)
        content = await self._content(value.get("content"), f"{place}.content", must_read=is_new and role == "user")
        if role == "user":
            return [_message(role, content)]
        texts = self._without_media(content, place)
        # The turn's media are those of its prompt: plans are matched to them in order.
        del self.media[num_media:]
        if role != "assistant":
            return [_message(role, texts)] if texts else []
        said = [{"type": "output_text", "text": part["text"], "annotations": []} for part in texts]
        refusal = value.get("refusal")
        if not said and isinstance(refusal, str) and refusal:
            said = [{"type": "refusal", "refusal": refusal}]
        # The form of chat completions.
        thought = reasoning_of(value)
        found: list[Item] = []
        if thought:
            found.append(
                {
                    "type": "reasoning",
                    "summary": [],
                    "status": "completed",
                    "content": [{"type": "reasoning_text", "text": thought}],
                }
            )
        if said:
            found.append(_message(role, said))
        calls = value.get("tool_calls")
        for at, call in enumerate(calls if isinstance(calls, list) else []):
            function = call.get("function") if isinstance(call, dict) else None
            await self._parts.breathe()
            if isinstance(function, dict):
                where = f"{place}.tool_calls.{at}"
                found.append(self._call({**function, "call_id": call.get("id")}, CALLS[0], where))
        return found

    def _call(self, value: Item, kind: str, place: str) -> Item:
        name, namespace = value.get("name"), value.get("namespace")
        item = {"type": kind, "call_id": _call_id(value, place), "name": name if isinstance(name, str) else ""}
        if isinstance(namespace, str) and namespace:
            item["namespace"] = namespace
        if kind == "custom_tool_call":
            return {**item, "input": _plain(value.get("input"))}
        status = "incomplete" if value.get("status") == "incomplete" else "completed"
        return {**item, "arguments": _plain(value.get("arguments")), "status": status}

    async def _output(self, value: Item, kind: str, place: str) -> Item:
        output = value.get("output")
        if isinstance(output, dict) and isinstance(output.get("content"), str):
            output = output["content"]
        if not isinstance(output, str):
            given = result_parts(output, is_part, f"{place}.output", self._notes)
            output = await self._content(given, f"{place}.output", must_read=False)
        return {"type": kind, "call_id": _call_id(value, place), "output": output or "", "status": "completed"}

    async def _foreign(self, value: Item, kind: str, place: str) -> list[Item]:
        """An item of a tool that this server doesn't have: a call, its result, or a text."""
        what = f"of type {kind[:60]!r}"
        if kind == "compaction_trigger":
            message = f"{place}: there is no compaction here. Ask for a summary instead."
            raise ApiError(400, message, f"{place}.type", "unsupported_field")
        if "call_id" in value and kind.endswith("_call"):
            self._notes.change(f"{place} {what}", "is read as a function call")
            arguments = next((value[name] for name in _ARGUMENTS if value.get(name) is not None), None)
            named = {"call_id": value["call_id"], "name": kind.removesuffix("_call"), "arguments": arguments}
            return [self._call(named, CALLS[0], place)]
        if "call_id" in value and kind.endswith("_output") and "output" in value:
            self._notes.change(f"{place} {what}", "is read as a function's result")
            output = value["output"]
            if isinstance(output, dict) and isinstance(output.get("image_url"), str):
                output = [{"type": "input_image", "image_url": output["image_url"]}]
            return [await self._output({**value, "output": output}, OUTPUTS[0], place)]
        line = carried(value)
        if line is None:
            self._notes.ignore(f"{place} {what}", "says nothing here")
            return []
        self._notes.change(f"{place} {what}", "is carried as text")
        text = {"type": "output_text", "text": f"{line}\n", "annotations": []}
        return [{**_message("assistant", [text]), "phase": COMMENTARY}]

    async def _content(self, content: Any, place: str, must_read: bool, first: int = 0) -> list[Item]:
        """The parts of a message or of a result. Media get an index into those of the turn."""
        listed = content if isinstance(content, list) else [content]
        found: list[Item] = []
        for at, value in enumerate(listed, start=first):
            where = f"{place}.{at}" if isinstance(content, list) else place
            if must_read and not isinstance(value, str | dict | None):
                raise ApiError(400, f"{where} must be a text or a part; got {type(value).__name__}.", where)
            if isinstance(value, dict):
                value = {name: each for name, each in value.items() if each is not None}
            for part in await self._parts.content(value, where, must_read=must_read):
                if isinstance(part, Text):
                    found.append({"type": "input_text", "text": part.text})
                    continue
                self.media.append(part)
                told: Item = {"type": f"input_{part.kind}"}
                if part.kind == "image":
                    detail = value.get("detail") if isinstance(value, dict) else None
                    told["detail"] = detail if detail in _DETAILS else "auto"
                found.append({**told, "media": len(self.media) - 1})
        return found

    def _without_media(self, content: list[Item], place: str) -> list[Item]:
        if any("media" in part for part in content):
            self._notes.change(place, "can't hold media; a text says so to the model")
        return [
            {"type": "input_text", "text": left_out(part["type"].removeprefix("input_"))} if "media" in part else part
            for part in content
        ]


_THOUGHTS = {"summary": "summary_text", "content": "reasoning_text"}


def _message(role: str, content: list[Item]) -> Item:
    return {"type": "message", "role": role, "status": "completed", "content": content}


def _thoughts(values: Any, kind: str) -> list[Item]:
    listed = values if isinstance(values, list) else [values]
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in listed]
    return [{"type": kind, "text": text} for text in texts if isinstance(text, str) and text]


def _is_part(value: Any) -> bool:
    """Whether a value of the input is a content part outside of a message."""
    if not isinstance(value, dict):
        return isinstance(value, str)
    kind = value.get("type")
    return isinstance(kind, str) and (kind.startswith("input_") or kind in ("text", "image_url", "image", "video_url"))


def _is_answer(value: Any) -> bool:
    """Whether a value of the input is, or follows, an answer of the model: what stands before needn't be readable."""
    kind = value.get("type") if isinstance(value, dict) else None
    is_call = isinstance(kind, str) and kind.endswith("_call")
    return (
        is_call
        or kind in ("reasoning", "item_reference")
        or (isinstance(value, dict) and value.get("role") == "assistant")
    )


def _call_id(value: Item, place: str) -> str:
    for name in ("call_id", "id"):
        if isinstance(value.get(name), str) and value[name]:
            return value[name]
    return f"call_{place}"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
