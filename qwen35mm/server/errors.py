"""Errors as OpenAI's clients expect them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from qwen35mm.errors import (
    ContextTooLongError,
    EngineError,
    QueueFullError,
    Qwen35mmError,
    RequestTimeoutError,
    report_bug,
)
from qwen35mm.http.bodies import RETRY_AFTER_S
from qwen35mm.http.errors import HttpError
from qwen35mm_preprocess.say import english

logger = logging.getLogger(__name__)


@dataclass
class ApiError(Exception):
    """An error for the client.

    Attributes:
        param: the field that the error is about.
        code: identifies the error for programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else _KINDS.get(self.status)
        message, param = short(self.message), self.param and short(self.param)
        return {"error": {"message": message, "type": kind or "server_error", "param": param, "code": self.code}}


_MAX_FAULTS = 1000
# The wrong part may be a field's whole value, or its name.
_MAX_CHARACTERS = 1000
_KINDS = {429: "rate_limit_error"}


def short(text: str) -> str:
    """Shortens a message for the client."""
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."


def api_error(error: Exception) -> ApiError:
    """Converts an error for the client. An unforeseen one shows only its number in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HttpError):
        return ApiError(error.status, str(error), code=error.code, headers=error.headers)
    if isinstance(error, HTTPException):
        known = {
            404: "There is no such address here.",
            405: "This address is asked in another way: see the header Allow.",
        }
        told = known.get(error.status_code, error.detail)
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        return ApiError(error.status_code, told, code=code, headers=dict(error.headers or {}))
    message = str(error)
    if isinstance(error, ContextTooLongError):
        return ApiError(400, _overflow(error), "messages", "context_length_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, message, code="timeout")
    if isinstance(error, EngineError):
        return ApiError(500, message, code="engine_error")
    if isinstance(error, Qwen35mmError):
        return ApiError(400, message)
    told = english(report_bug(logger, "a request of the API failed", error))
    return ApiError(500, told, code="internal_error")


def _overflow(error: ContextTooLongError) -> str:
    """Begins with words that clients search for, to shorten the conversation and ask again.

    Claude Code and LangChain know "prompt is too long", with the numbers; LiteLLM and pydantic-ai know the second
    sentence.
    """
    num_tokens, limit = error.num_tokens, error.context_length
    if num_tokens is None or limit is None:
        return f"The prompt is too long. {error}"
    known = f"The prompt is too long: {num_tokens} tokens > {limit} maximum."
    return f"{known} This model's maximum context length is {limit} tokens. {error}"


def invalid(error: ValidationError) -> ApiError:
    """Describes the first invalid value of a body."""
    # pydantic formats every error, even a million of them.
    if error.error_count() > _MAX_FAULTS:
        return ApiError(400, f"The body can't be used: {error.error_count():,} of its values aren't as expected.")
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Names in < > are tags of the alternative that pydantic tried, not part of the body.
    place = ".".join(part for part in map(str, first["loc"]) if not part.startswith("<"))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place} isn't a known field. Leave it out.", place, "unknown_field")
    if not place:
        return ApiError(400, f"The body must be a JSON object: {first['msg']}.")
    return ApiError(400, f"{place} can't be used: {first['msg']}.", place)
