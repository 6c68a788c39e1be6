"""Messages of a conversation, also from the form of OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image as PILImage

from qwen35mm.contract.parts import Image, Part, Tensor, Text, ToolCall, Video, is_picture
from qwen35mm.errors import PromptError
from qwen35mm_preprocess import MediaPlan
from qwen35mm_preprocess.media import is_data_uri

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KNOWN_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", *_REASONING_KEYS})
# What callers may pass as a message's content; see Message.
Piece = str | Part | PILImage.Image | np.ndarray | Tensor | Mapping[str, Any]
Content = Piece | Sequence[Piece] | None

_MEDIA_TYPES = {"image": Image, "image_url": Image, "video": Video, "video_url": Video}


@dataclass(frozen=True, init=False)
class Message:
    """One turn.

    Its content is a text, a part, a picture (PIL, or a uint8 array [height, width, 3]) or a part in OpenAI's form, or a
    list of these.

    Attributes:
        role: "system" (at any place), "user", "assistant" or "tool" (a result).
        content: parts in order of appearance; adjacent texts are not joined.
        reasoning: an assistant's thinking, without `<think>` tags.
        tool_calls: an assistant's calls.
        tool_call_id, name: passed on to templates that use them; Qwen's don't.
    """

    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __init__(
        self,
        role: Role,
        content: Content = (),
        reasoning: str | None = None,
        tool_calls: Sequence[ToolCall | Mapping[str, Any]] = (),
        tool_call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        if role not in ROLES:
            raise PromptError(f"Unknown message role {role!r}; expected {', '.join(ROLES)}.")
        values = {"role": role, "content": _parts(content), "reasoning": reasoning}
        values |= {"tool_calls": _tool_calls(tool_calls), "tool_call_id": tool_call_id, "name": name}
        for key, value in values.items():
            object.__setattr__(self, key, value)
        for key in ("reasoning", "tool_call_id", "name"):
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise PromptError(f"A message's {key} must be a string; got {type(value).__name__}.")
        if self.role != "assistant" and (self.tool_calls or self.reasoning is not None):
            raise PromptError(f"Only an assistant message has reasoning and tool calls, not one of role {self.role!r}.")

    @property
    def media(self) -> tuple[Image | Video, ...]:
        """The images and videos, in order of appearance."""
        return tuple(part for part in self.content if not isinstance(part, Text))

    @property
    def text(self) -> str:
        """All texts, joined without anything between them."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, allow_paths: bool = True) -> Message:
        """A message in OpenAI's form, or in that of transformers' chat templates.

        Args:
            data: `role`, `content` (a string, or a list of parts of type text, image, image_url, video or video_url)
                and, for an assistant, `reasoning_content` (or `reasoning`, `thinking`) and `tool_calls`.
            allow_paths: whether strings may name local files. False for messages from another machine: then media
                are `data:` URIs only.

        Raises:
            PromptError: what was wrong, in words.
        """
        if not isinstance(data, Mapping):
            raise PromptError(f"A message must be an object with role and content; got {type(data).__name__}.")
        unknown = sorted(str(key) for key, value in data.items() if key not in _KNOWN_KEYS and value)
        if unknown:
            raise PromptError(f"Unknown message field {unknown[0]!r}; known are {', '.join(sorted(_KNOWN_KEYS))}.")
        return cls(
            role=data.get("role"),  # pyright: ignore[reportArgumentType] - checked when made
            content=_content(data.get("content"), allow_paths),
            reasoning=next((data[key] for key in _REASONING_KEYS if data.get(key) is not None), None),
            tool_calls=_tool_calls(data.get("tool_calls")),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
        )


def iter_media(messages: Sequence[Message]) -> Iterator[Image | Video]:
    """All images and videos of a conversation, in order of appearance."""
    for message in messages:
        yield from message.media


def pin_plans(messages: Sequence[Message], plans: Sequence[MediaPlan | None]) -> list[Message]:
    """The same messages with a plan for each medium, in order of appearance: later prompts see the same pixels.

    Args:
        plans: None leaves a medium as it is, if it has a stand-in.

    Raises:
        PromptError: there are more or fewer plans than media, or a value isn't a Message or a MediaPlan.
    """
    check_messages(messages)
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, MediaPlan | None) for plan in plans):
        raise PromptError(f"The plans must be a list of MediaPlan; got {type(plans).__name__}.")
    num_media = sum(1 for _ in iter_media(messages))
    if len(plans) != num_media:
        raise PromptError(f"There must be a plan for each medium, {num_media} in all; got {len(plans)}.")
    if any(plan is None and part.stand_in is None for part, plan in zip(iter_media(messages), plans, strict=True)):
        raise PromptError(f"The plans must be a list of MediaPlan; got {type(plans).__name__} with None in it.")
    return _with_media(messages, plans, lambda part, plan: part if plan is None else replace(part, plan=plan))


def with_stand_ins(messages: Sequence[Message], plans: Sequence[MediaPlan | None]) -> list[Message]:
    """The same messages with its stand-in in place of each medium whose plan is None.

    Args:
        plans: one for each medium, in order of appearance.
    """
    return _with_media(messages, plans, lambda part, plan: Text(part.stand_in or "") if plan is None else part)


def _with_media(
    messages: Sequence[Message],
    plans: Sequence[MediaPlan | None],
    put: Callable[[Image | Video, MediaPlan | None], Part],
) -> list[Message]:
    """The messages with what `put` makes of each medium and its plan."""
    remaining = iter(plans)

    def content(message: Message) -> tuple[Part, ...]:
        return tuple(part if isinstance(part, Text) else put(part, next(remaining)) for part in message.content)

    return [replace(message, content=content(message)) for message in messages]


def check_conversation(messages: Sequence[Message]) -> None:
    """Raises PromptError if these aren't messages, or there are none."""
    check_messages(messages)
    if not messages:
        raise PromptError("There are no messages: send at least one.")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises PromptError if these aren't messages."""
    if isinstance(messages, Message | str) or not isinstance(messages, Sequence):
        raise PromptError(f"The messages must be a list of Message; got one {type(messages).__name__}. Put it in [ ].")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Message):
            raise PromptError(f"Message {number} is a {type(message).__name__}; expected a Message (see from_dict).")


def _parts(content: Any) -> tuple[Part, ...]:
    """The parts of a message's content as a caller passes it."""
    if content is None:
        return ()
    pieces = content if isinstance(content, list | tuple) else (content,)
    return tuple(_piece(piece) for piece in pieces)


def _piece(piece: Any) -> Part:
    match piece:
        case Text() | Image() | Video():
            return piece
        case str():
            return Text(piece)
        case Mapping():
            return _part(piece, allow_paths=True)
        case _ if is_picture(piece):
            return Image(piece)
    expected = "a string, Text, Image or Video, a picture, or a part in OpenAI's form"
    raise PromptError(f"A message's content can't hold a {type(piece).__name__}; expected {expected}.")


def _content(content: Any, allow_paths: bool) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    if not isinstance(content, list | tuple):
        raise PromptError(f"A message's content must be a string or a list of parts; got {type(content).__name__}.")
    return tuple(_part(part, allow_paths) for part in content)


def _part(part: Any, allow_paths: bool) -> Part:
    if not isinstance(part, Mapping):
        raise PromptError(f"A content part must be an object with a type; got {type(part).__name__}.")
    kind = part.get("type")
    if kind == "text":
        if "text" not in part:
            raise PromptError("A part of type 'text' needs the field 'text'.")
        return Text(part["text"])
    if kind not in _MEDIA_TYPES:
        raise PromptError(f"Unknown content part type {kind!r}; expected text, {', '.join(_MEDIA_TYPES)}.")
    source = part.get(kind)
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise PromptError(f"A part of type {kind!r} needs the field {kind!r}.")
    is_path = isinstance(source, Path) or (isinstance(source, str) and not is_data_uri(source))
    medium = _MEDIA_TYPES[kind](source)
    if is_path and not allow_paths:
        raise PromptError("Media must be sent as data: URIs here; a path to a file is not accepted.")
    return medium


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise PromptError(f"tool_calls must be a list; got {type(calls).__name__}.")
    return tuple(_tool_call(call) for call in calls)


def _tool_call(call: Any) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise PromptError("A tool call must be an object with a function's name and arguments.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise PromptError(f"The arguments of the tool call {function['name']!r} are not valid JSON.") from None
    return ToolCall(function["name"], {} if arguments is None else arguments, call.get("id"))
