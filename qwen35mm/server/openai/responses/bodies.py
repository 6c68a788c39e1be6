"""Request bodies of the responses API, as in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag

from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS
from qwen35mm.server import fields
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import MAX_TOOLS, STRICT, Effort, FunctionName, RequestFields, ToolChoice, Values
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.responses.item_bodies import KINDS, TEXT_OR_LIST, Items

# Each with the values that ask for nothing.
_HINTS: dict[str, Values] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "service_tier": ("auto", "default", "flex", "priority"),
    "truncation": ("disabled",),
}
_REFUSED: dict[str, Values] = {
    # The client would ask again for an answer that it already has.
    "background": (False,),
    # Texts that are kept elsewhere.
    "conversation": (),
    "prompt": (),
}
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "message.input_video.video_url",
    "reasoning.encrypted_content",
]


class Tool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(BaseModel):
    model_config = STRICT

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    # The former name of `summary`.
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn"] | None = None

    @property
    def asked_summary(self) -> str | None:
        return self.summary or self.generate_summary


class PlainText(BaseModel):
    model_config = STRICT

    type: Literal["text"]


class JsonObject(BaseModel):
    model_config = STRICT

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = STRICT

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    # The schema always constrains the answer, strict or not.
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = STRICT

    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(BaseModel):
    model_config = STRICT

    include_obfuscation: bool | None = None


class CountRequest(RequestFields):
    """The body of POST /v1/responses/input_tokens."""

    input: Annotated[Annotated[str, Tag("<text>"), Field(min_length=1)] | Annotated[Items, Tag("<list>")], TEXT_OR_LIST]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: ToolChoice = "auto"
    reasoning: Reasoning | None = None
    text: TextOptions | None = None

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort


class ResponsesRequest(CountRequest):
    """The body of POST /v1/responses. Unknown and unsupported fields are refused by name."""

    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[Includable] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    store: bool = True
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops what has no effect.

    Raises:
        ApiError: 400, a field, an item or a tool asks for something that can't be done.
    """
    body = fields.known_fields(body, notes, hints=_HINTS, refused=_REFUSED)
    for name, known in (("input", KINDS), ("tools", ("function",))):
        for at, each in enumerate(_dicts(body.get(name))):
            kind = each.get("type")
            if kind is not None and kind not in known:
                place = f"{name}.{at}.type"
                message = f"{place}: {kind!r} isn't supported here; these are: {', '.join(known)}."
                raise ApiError(400, message, place, "unsupported_field")
    return {name: _without_nulls(value) if name == "input" else value for name, value in body.items()}


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [each if isinstance(each, dict) else {} for each in values] if isinstance(values, list) else []


def _without_nulls(value: Any) -> Any:
    """Drops nulls: clients send a received item back with all its fields, null where there is no value."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
