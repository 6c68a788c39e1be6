"""The items of conversations in the responses API, as in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from qwen35mm.server.fields import STRICT

MAX_ITEMS = 10_000
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
Status = Literal["in_progress", "completed", "incomplete"]
Detail = Literal["low", "high", "auto", "original"]


class InputText(BaseModel):
    model_config = STRICT

    type: Literal["input_text"]
    text: str


class InputImage(BaseModel):
    model_config = STRICT

    type: Literal["input_image"]
    image_url: str
    detail: Detail = "auto"


class VideoData(BaseModel):
    """A video file as base64."""

    model_config = STRICT

    data: str


class InputVideo(BaseModel):
    """An addition to the protocol: a video by address or as base64."""

    model_config = STRICT

    type: Literal["input_video"]
    video_url: str | None = None
    input_video: VideoData | None = None


class OutputText(BaseModel):
    model_config = STRICT

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None


class Refusal(BaseModel):
    model_config = STRICT

    type: Literal["refusal"]
    refusal: str


class SummaryText(BaseModel):
    model_config = STRICT

    type: Literal["summary_text"]
    text: str


class ReasoningText(BaseModel):
    model_config = STRICT

    type: Literal["reasoning_text"]
    text: str


# Discriminators. Tags in < > don't belong to the places in error messages.
def _text_or_list(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<list>"


def _kind_of_part(value: Any) -> str:
    return f"<{value.get('type') if isinstance(value, dict) else None}>"


def _kind_of_item(value: Any) -> str:
    if not isinstance(value, dict):
        return "<>"
    kind = value.get("type") or ("item_reference" if set(value) == {"id"} else "message")
    return f"<{'assistant' if kind == 'message' and value.get('role') == 'assistant' else kind}>"


TEXT_OR_LIST = Discriminator(_text_or_list)
_INPUT = "must be an object of type input_text, input_image or input_video"
InputPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputVideo, Tag("<input_video>")],
    Discriminator(_kind_of_part, custom_error_type="part", custom_error_message=_INPUT),
]
_SAID = "must be an object of type output_text, refusal or input_text"
SaidPart = Annotated[
    Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[InputText, Tag("<input_text>")],
    Discriminator(_kind_of_part, custom_error_type="part", custom_error_message=_SAID),
]
InputContent = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[InputPart], Tag("<list>")], TEXT_OR_LIST]
SaidContent = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[SaidPart], Tag("<list>")], TEXT_OR_LIST]


class InputMessage(BaseModel):
    model_config = STRICT

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: InputContent
    id: str | None = None
    status: Status | None = None


class SaidMessage(BaseModel):
    """A message of the assistant, in the full form of a response's output or in short."""

    model_config = STRICT

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: SaidContent
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(BaseModel):
    model_config = STRICT

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(BaseModel):
    model_config = STRICT

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: str | None = None
    status: Status | None = None


class ReasoningItem(BaseModel):
    model_config = STRICT

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ItemReference(BaseModel):
    """An item of a kept response."""

    model_config = STRICT

    type: Literal["item_reference"] = "item_reference"
    id: str


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[SaidMessage, Tag("<assistant>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_kind_of_item, custom_error_type="item", custom_error_message="must be an object: one of the items"),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
