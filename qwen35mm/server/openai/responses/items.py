"""Items in the form in which they are kept, and their conversion to messages and for clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qwen35mm.contract import Image, Message, Text, ToolCall, Video
from qwen35mm.server.history import CallReader
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.responses.tools import shown_name

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
}
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# The phase of a text that stands before the answer in the same turn.
COMMENTARY = "commentary"


@dataclass(frozen=True)
class Turn:
    """The items of a request or of an answer.

    Attributes:
        items: normalized; a part with a medium has `media`, an index into `media` of the turn.
    """

    items: tuple[dict[str, Any], ...]
    media: tuple[Image | Video, ...] = ()


def item_id(kind: str, node: str, at: int) -> str:
    """The id of an item: its kind, the 32 hex digits of its node, and its index there."""
    return f"{PREFIXES[kind]}_{node}{at:x}"


def media_parts(item: dict[str, Any]) -> list[dict[str, Any]]:
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


def messages_of(turns: Sequence[Turn], instructions: str | None, notes: Notes) -> list[Message]:
    """Converts turns to the messages of a conversation. The last turn is the request's input.

    Instructions, and the system messages before all others, are one system message.
    """
    system = [instructions] if instructions else []
    messages: list[Message] = []
    calls = CallReader(notes)
    for number, turn in enumerate(turns):
        reply = _Reply(calls)
        for at, item in enumerate(turn.items):
            place = f"input.{at}" if number == len(turns) - 1 else f"previous_response_id: item {item['id']}"
            if item["type"] in ("reasoning", *CALLS) or item.get("role") == "assistant":
                messages += reply.take(item, place)
                continue
            messages += reply.end()
            if item["type"] in OUTPUTS:
                output = item["output"]
                content = (Text(output),) if isinstance(output, str) else _content(output, turn.media)
                messages.append(Message("tool", content, tool_call_id=item["call_id"]))
            elif item["role"] == "user":
                messages.append(Message("user", _content(item["content"], turn.media)))
            elif text := "".join(part["text"] for part in item["content"]):
                if messages:
                    messages.append(Message("system", (Text(text),)))
                else:
                    system.append(text)
        messages += reply.end()
    return [Message("system", (Text("\n\n".join(system)),)), *messages] if system else messages


class _Reply:
    """Collects items into one answer of the assistant."""

    def __init__(self, calls: CallReader) -> None:
        self._reader = calls
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        # Whether the last text belongs to the answer that follows.
        self._is_open = False

    def take(self, item: dict[str, Any], place: str) -> list[Message]:
        """Adds an item. Returns the previous answer if this item begins a new one."""
        ended: list[Message] = []
        if item["type"] == "function_call" and item.get("status") == "incomplete":
            # Its arguments are cut off, so it is no call: the model sees what it wrote.
            self._texts.append(f"{item['name']}: {item['arguments']}")
        elif item["type"] in CALLS:
            name = shown_name(item["name"], item.get("namespace"))
            given = {"input": item["input"]} if item["type"] == "custom_tool_call" else item["arguments"]
            self._calls.append(self._reader.read(name, given, item["call_id"], place))
        elif item["type"] == "reasoning":
            ended = self.end() if (self._texts and not self._is_open) or self._calls else []
            self._thoughts += [part["text"] for part in item.get("content") or item["summary"]]
        else:
            # Calls may stand between the texts of one answer, but two texts in a row are two answers.
            ended = self.end() if self._texts and not self._calls and not self._is_open else []
            self._texts.append("".join(part.get("text") or part.get("refusal", "") for part in item["content"]))
            self._is_open = item.get("phase") == COMMENTARY
        return ended

    def end(self) -> list[Message]:
        """The answer, if it isn't empty."""
        text, thoughts, calls = "".join(self._texts), "".join(self._thoughts), tuple(self._calls)
        self._texts, self._thoughts, self._calls, self._is_open = [], [], [], False
        content = (Text(text),) if text or not calls else ()
        return [Message("assistant", content, reasoning=thoughts or None, tool_calls=calls)] if text or calls else []


def _content(parts: Iterable[dict[str, Any]], media: Sequence[Image | Video]) -> tuple[Text | Image | Video, ...]:
    return tuple(media[part["media"]] if "media" in part else Text(part["text"]) for part in parts)
