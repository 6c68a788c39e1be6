"""The items of conversations in the responses API, as in the OpenAPI document; `item_reader` reads them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

MAX_ITEMS = 10_000


class InputText(TypedDict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(TypedDict):
    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[str | None]


class VideoData(TypedDict):
    """A video file as base64."""

    data: str


class InputVideo(TypedDict):
    """An addition to the protocol: a video by address or as base64."""

    type: Literal["input_video"]
    video_url: NotRequired[str | None]
    input_video: NotRequired[VideoData | None]


class OtherPart(TypedDict):
    """A part of another type; it must be readable in the last message only."""

    type: str


Content = str | list[str | InputText | InputImage | InputVideo | OtherPart] | None


class ItemMessage(TypedDict):
    """A message; `role` is user, assistant, system or developer."""

    type: NotRequired[Literal["message"] | None]
    role: str
    content: NotRequired[Content]


class FunctionCall(TypedDict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str | None]


class FunctionCallOutput(TypedDict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class CustomToolCall(TypedDict):
    """A call whose argument is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str | None]


class ReasoningItem(TypedDict):
    type: Literal["reasoning"]
    summary: NotRequired[list[dict[str, Any]] | None]
    content: NotRequired[list[dict[str, Any]] | None]


class ItemReference(TypedDict):
    """An item of a kept response."""

    type: NotRequired[Literal["item_reference"] | None]
    id: str


class OtherItem(TypedDict):
    """An item of another type is carried as text, if it says something."""

    type: str


Item = ItemMessage | FunctionCall | FunctionCallOutput | CustomToolCall | ReasoningItem | ItemReference | OtherItem
