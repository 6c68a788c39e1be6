"""Types for the OpenAPI document: conversations and answers, which the code handles as plain dicts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema
from typing_extensions import NotRequired, TypedDict

Words = Annotated[str, Field(min_length=1)]
Detail = Literal["low", "high", "auto", "original"]


class Described:
    """An annotation: the document shows `shape`; the values are checked elsewhere."""

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(TypeAdapter(self._shape).core_schema)


class TextPart(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: Words


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: Words


class ImageAddress(TypedDict):
    url: Words
    detail: NotRequired[Detail | None]


class ImagePart(TypedDict):
    type: Literal["image_url", "input_image"]
    image_url: Words | ImageAddress


class VideoAddress(TypedDict):
    url: Words


class VideoPart(TypedDict):
    type: Literal["video_url"]
    video_url: Words | VideoAddress


class InputVideoPart(TypedDict):
    type: Literal["input_video"]
    input_video: NotRequired[Any]
    video_url: NotRequired[Any]


class OtherPart(TypedDict):
    """A part of another type is read as one of these, carried as text, or left out with a note."""

    type: str


class CalledFunction(TypedDict):
    name: Words
    # A text that isn't JSON becomes one argument.
    arguments: NotRequired[str | dict[str, Any] | None]


class Call(TypedDict):
    function: CalledFunction
    id: NotRequired[str | None]


ChatPart = TextPart | RefusalPart | ImagePart | VideoPart | InputVideoPart | OtherPart


class ChatMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"] | str
    # In earlier turns and in tools' results, any other value is read as JSON text.
    content: NotRequired[str | list[str | ChatPart] | Any]
    reasoning_content: NotRequired[str | None]
    # Other forms of calls are read, too, as a single one.
    tool_calls: NotRequired[list[Call] | Any]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


class TextFormat(TypedDict):
    type: Literal["text"]


class JsonFormat(TypedDict):
    type: Literal["json_object"]
    schema: NotRequired[dict[str, Any]]


class NamedSchema(TypedDict):
    schema: dict[str, Any]
    name: NotRequired[Any]
    strict: NotRequired[Any]


class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class RegexFormat(TypedDict):
    type: Literal["regex"]
    pattern: str


class GrammarFormat(TypedDict):
    type: Literal["grammar"]
    grammar: str


ResponseFormat = TextFormat | JsonFormat | SchemaFormat | FlatSchemaFormat | RegexFormat | GrammarFormat


class TextBlock(TypedDict):
    type: Literal["text"]
    text: NotRequired[str | None]


class ImageSource(TypedDict):
    type: Literal["base64", "url"]
    data: NotRequired[str]
    url: NotRequired[str]


class ImageBlock(TypedDict):
    type: Literal["image"]
    source: ImageSource


class DocumentBlock(TypedDict):
    type: Literal["document"]
    source: dict[str, Any]
    title: NotRequired[str | None]
    context: NotRequired[str | None]


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[TextBlock | ImageBlock | DocumentBlock | OtherBlock] | None]
    is_error: NotRequired[bool | None]


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str


class OtherBlock(TypedDict):
    """A block of another type is carried as text, if it says something."""

    type: str


Block = TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | OtherBlock


class AnthropicMessage(TypedDict):
    role: str
    content: NotRequired[str | list[str | Block] | Block | None]


class ErrorOfOpenAI(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    error: ErrorOfOpenAI


class ErrorOfAnthropic(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: ErrorOfAnthropic


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: NotRequired[int]
    total_tokens: int


class ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class Choice(TypedDict):
    index: int
    message: ReplyMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: dict[str, float | None]


class TextChoice(TypedDict):
    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class AnthropicReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int | str]


class InputTokens(TypedDict):
    input_tokens: int


class Response(TypedDict):
    id: str
    object: Literal["response"]
    status: str
    output: list[dict[str, Any]]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    context_length: int
    architecture: dict[str, list[str]]
    status: dict[str, str]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Prompt(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: Literal["ok", "ready"]
    waiting: NotRequired[int]


# By path; others answer some object.
REPLIES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/embeddings": Embeddings,
    "/v1/messages": AnthropicReply,
    "/v1/messages/count_tokens": InputTokens,
    "/v1/responses": Response,
    "/v1/responses/input_tokens": InputTokens,
    "/v1/models": Models,
    "/v1/models/{name:path}": Model,
    "/version": Version,
    "/tokenize": Tokens,
    "/detokenize": Prompt,
    "/apply-template": Prompt,
    "/health": Health,
    "/ready": Health,
}
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
