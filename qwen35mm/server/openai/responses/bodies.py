"""Request bodies of the responses API, as in the OpenAPI document."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Discriminator, Field, Tag

from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS
from qwen35mm.server import fields
from qwen35mm.server.fields import EFFORTS, STRICT, RequestFields, Values
from qwen35mm.server.notes import UNSUPPORTED, Notes
from qwen35mm.server.openai.responses.item_bodies import MAX_ITEMS, Item
from qwen35mm.server.openai.responses.tools import Tool, plain_tools
from qwen35mm.server.other_names import thinking_in_our_names
from qwen35mm.server.shapes import Described
from qwen35mm.server.tools import MAX_TOOLS

# Each with the values that ask for nothing.
HINTS: dict[str, Values] = {
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
# The other protocols' names.
_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
# Describe the client.
_SILENT = ("client_metadata",)
REFUSED: dict[str, Values] = {
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


_SUMMARIES = ("auto", "concise", "detailed")


class Reasoning(BaseModel):
    model_config = STRICT

    effort: str | None = None
    summary: str | None = None
    # The former name of `summary`.
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None

    @property
    def asked_summary(self) -> str | None:
        """The requested summary, which is the thinking itself; None for none."""
        asked = self.summary or self.generate_summary
        return None if asked == "none" else asked if asked in _SUMMARIES or asked is None else "auto"


class PlainText(BaseModel):
    model_config = STRICT

    type: Literal["text"]


class JsonObject(BaseModel):
    model_config = STRICT

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = STRICT

    type: Literal["json_schema"]
    name: str = "answer"
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    # The schema always constrains the answer, strict or not.
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = STRICT

    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class StreamOptions(BaseModel):
    model_config = STRICT

    include_obfuscation: bool | None = None


def _kind_of_input(value: Any) -> str:
    # Tags in < > don't belong to the places in error messages.
    return "<text>" if isinstance(value, str) else "<item>" if isinstance(value, dict) else "<list>"


_AnyItem = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Described(Item), Tag("<item>")],
    Discriminator(_kind_of_input, custom_error_type="item", custom_error_message="must be a text, or an object"),
]
_Items = Annotated[list[_AnyItem], Field(min_length=1, max_length=MAX_ITEMS)]


class CountRequest(RequestFields):
    """The body of POST /v1/responses/input_tokens."""

    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("<text>")]
        | Annotated[_Items, Tag("<list>")]
        | Annotated[dict[str, Any], Described(Item), Tag("<item>")],
        Discriminator(_kind_of_input),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: Reasoning | None = None
    text: TextOptions | None = None

    @property
    def effort(self) -> Any:
        """The reasoning's effort, if it is a known one."""
        effort = self.reasoning and self.reasoning.effort
        return effort if effort in EFFORTS else None


class ResponsesRequest(CountRequest):
    """The body of POST /v1/responses. Unknown fields are noted."""

    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    include: list[Includable] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    store: bool = True
    metadata: dict[str, Any] | None = None


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops what has no effect, and translates what other forms say.

    Raises:
        ApiError: 400, a field asks for something that can't be done.
    """
    body = _thinking_in_our_names(fields.known_fields(body, notes, hints=HINTS, refused=REFUSED), notes)
    body = {_NAMES.get(name, name): value for name, value in body.items() if name not in _SILENT}
    if isinstance(included := body.get("include"), list):
        body["include"] = [each for each in included if each in _INCLUDABLE]
        if len(body["include"]) < len(included):
            notes.ignore("include", "names what isn't known here")
    if isinstance(metadata := body.get("metadata"), dict):
        body["metadata"] = {
            name: each if isinstance(each, str) else json.dumps(each) for name, each in metadata.items()
        }
    if format_ := _schema_format(_at(body, "text", "format"), notes):
        body["text"] = {**body["text"], "format": format_}
    if _at(body, "text", "verbosity") not in (None, "medium"):
        notes.ignore("text.verbosity", UNSUPPORTED)
    effort = _at(body, "reasoning", "effort")
    if isinstance(effort, str) and effort not in EFFORTS:
        notes.ignore("reasoning.effort", UNSUPPORTED)
    return {**body, "tools": plain_tools(body["tools"], notes)} if "tools" in body else body


def _thinking_in_our_names(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Reads other servers' ways to ask for thinking. What `reasoning` says wins: it is the protocol's own field."""
    own = body.pop("reasoning", None)
    body = thinking_in_our_names(body, notes)
    effort = body.pop("reasoning_effort", None)
    if effort is not None and (own is None or isinstance(own, dict)):
        own = {"effort": effort, **(own or {})}
    return body if own is None else {**body, "reasoning": own}


_INCLUDABLE = get_args(Includable)


def _schema_format(given: Any, notes: Notes) -> dict[str, Any] | None:
    """A format with a schema, from other servers' forms of it."""
    if not isinstance(given, dict):
        return None
    if isinstance(given.get("json_schema"), dict):
        notes.change("text.format", "is read as in the form of chat completions")
        return {**given["json_schema"], "type": "json_schema"}
    if given.get("type") == "json_object" and isinstance(given.get("schema"), dict):
        return {**given, "type": "json_schema"}
    return None


def _at(body: dict[str, Any], name: str, inner: str) -> Any:
    value = body.get(name)
    return value.get(inner) if isinstance(value, dict) else None
