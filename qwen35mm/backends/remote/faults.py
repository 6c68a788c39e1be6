"""Failures of a server: the error and words for a person, and whether and when to try again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from datetime import timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from qwen35mm.backends.remote import words
from qwen35mm.backends.remote.words import Where, Words
from qwen35mm.errors import (
    ContextTooLongError,
    EngineError,
    QueueFullError,
    Qwen35mmError,
    RefusedError,
    RequestError,
    RequestTimeoutError,
)
from qwen35mm_preprocess.say import Saying

# Waits double from the first to the longest, to spare a server that is down.
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# Long enough for a server that loads a model or limits requests per minute, but not for one that says "tomorrow".
MAX_RETRY_AFTER_S = 120.0

# JSON may be nested too deeply for Python.
_MAX_DEPTH = 8
_UNKNOWN = re.compile(r"unexpected|unknown|unrecogni[sz]ed|(not |un)supported|extra|not permitted", re.IGNORECASE)
_LACKING = re.compile(
    r"not? (be )?(support|multi-?modal|enabled)|unsupported|at most 0|requires? -|doesn't", re.IGNORECASE
)
_TOO_LONG = re.compile(
    r"context (length|size|window)|(exceed|longer|maximum)[^.]* context|max_model_len", re.IGNORECASE
)
# Abilities that a server may lack, by the field of `ModelInfo`: the request's field that needs it, the server's words
# for it, and ours.
_ABILITIES = {
    "images": ("images", re.compile(r"image|vision|multi-?modal|mmproj|media", re.IGNORECASE), words.no_pictures),
    "tools": ("tools", re.compile(r"\btools?\b|tool[_ -](choice|call)|jinja", re.IGNORECASE), words.no_tools),
    "schemas": (
        "response_format",
        re.compile(r"response_format|json_schema|structured|guided|grammar", re.IGNORECASE),
        words.no_schemas,
    ),
}
_PASSING = frozenset({408, 409, 425, 429})
# Statuses about the request, not about the sender.
_OF_THIS_REQUEST = frozenset({400, 415, 422, 451})
_OF_STATUS: dict[int, tuple[type[Qwen35mmError], Words]] = {
    401: (RequestError, words.no_access),
    403: (RequestError, words.no_access),
    404: (RequestError, words.not_there),
    408: (RequestTimeoutError, words.gave_up),
    413: (RefusedError, words.too_large),
    429: (QueueFullError, words.busy),
}


class Fault(Exception):
    """What went wrong with a request, without the server's name.

    Attributes:
        kind: the error's class, if the request isn't repeated.
        words: makes the message from a Where.
        said: the server's own words, unchanged: pass them through `Connection.error_of` before showing them.
        is_passing: whether another attempt may succeed.
        status: the response's status; None without a response.
        retry_after_s: how long the server asked us to wait.
        lacks: the ability that the server turned out to lack, a field of `ModelInfo`.
        unknown: parameters of the request that it doesn't know.
        num_attempts: how many attempts failed; None if the fault isn't one to retry.
        was_begun: whether part of the answer was already yielded.
    """

    def __init__(
        self,
        kind: type[Qwen35mmError],
        words: Words,
        *,
        said: str = "",
        is_passing: bool = False,
        status: int | None = None,
        retry_after_s: float | None = None,
        lacks: str | None = None,
        unknown: tuple[str, ...] = (),
    ) -> None:
        super().__init__(kind.__name__)
        self.kind = kind
        self.words = words
        self.said = said
        self.is_passing = is_passing
        self.status = status
        self.retry_after_s = retry_after_s
        self.lacks = lacks
        self.unknown = unknown
        self.num_attempts: int | None = None
        self.was_begun = False

    def saying(self, host: str, said: str) -> Saying:
        """The message for a person.

        Args:
            said: the server's own words, made safe.
        """
        status = "" if self.status is None else _words(self.status)
        told = self.words(Where(host, status, said, f': "{said}".' if said else "."))
        if self.was_begun:
            return words.kept(told)
        return told if self.num_attempts is None else words.tried(told, self.num_attempts)


def damaged(what: str) -> Fault:
    """The fault of an answer that isn't in OpenAI's form."""
    return Fault(EngineError, words.damaged, said=what, is_passing=True)


def foreign(status: int, content_type: str) -> Fault:
    """The fault of an address where something else answers."""
    return Fault(RequestError, words.foreign, said=content_type or "no content type", status=status)


def refused(status: int, said: str, sent: Collection[str], retry_after_s: float | None = None) -> Fault:
    """The fault of an unsuccessful response.

    Args:
        said: the server's own words.
        sent: names of the request's parameters that a server may not know; "images" if it had some.
    """
    is_passing = status in _PASSING or status >= 500
    lacks = None if status in _OF_STATUS else _lacking(sent, said)
    names: list[str] = []
    if status in _OF_STATUS:
        kind, told = _OF_STATUS[status]
    elif 300 <= status < 400:
        kind, told = RequestError, words.elsewhere
    elif lacks is not None:
        # llama-server fails with 500 on a picture that its model can't see.
        kind, told, is_passing = RequestError, _ABILITIES[lacks][2], False
    elif is_passing:
        kind, told = EngineError, words.failed
    elif names := _unknown(sent, said):
        kind, told = RequestError, words.unknown(" and ".join(names))
    elif _TOO_LONG.search(said):
        kind, told = ContextTooLongError, words.refused
    else:
        kind, told = (RefusedError if status in _OF_THIS_REQUEST else RequestError), words.refused
    return Fault(
        kind,
        told,
        said=said,
        is_passing=is_passing,
        status=status,
        retry_after_s=retry_after_s,
        lacks=lacks,
        unknown=tuple(names),
    )


def stream_error(error: Any, sent: Collection[str]) -> Fault:
    """The fault of an error object in a stream; its code counts as the status."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return refused(status, "; ".join(_texts(error)), sent)


def read_said(body: bytes) -> str:
    """The server's own words, in any of the forms that servers use; nothing from an HTML page."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        return "" if text.startswith("<") else text
    return "; ".join(_texts(values))


def delay_s(num_failed: int, jitter: float, retry_after_s: float | None = None) -> float:
    """Seconds to wait after the `num_failed`-th failure (1, 2, ...).

    Args:
        jitter: 0 to 1; spreads requests that failed together over the upper half of the wait.
        retry_after_s: what the server asked for; the wait is never shorter, up to MAX_RETRY_AFTER_S.
    """
    longest = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failed - 1, 64))
    return max(longest * (0.5 + 0.5 * jitter), min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def read_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date); None if unreadable.

    Args:
        now_s: seconds since 1970.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        # A date without a zone is in GMT.
        date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
        seconds = date.timestamp() - now_s
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _unknown(sent: Collection[str], message: str) -> list[str]:
    """The parameters that the server doesn't know. A message without words for that may only be about their values."""
    if not _UNKNOWN.search(message):
        return []
    return [name for name in sent if re.search(rf"\b{re.escape(name)}\b", message)]


def _lacking(sent: Collection[str], message: str) -> str | None:
    """The requested ability that the server or its model lacks, by the server's words."""
    if not _LACKING.search(message):
        return None
    return next((lacks for lacks, (name, said, _) in _ABILITIES.items() if name in sent and said.search(message)), None)


def _words(status: int) -> str:
    try:
        return f"{status} ({HTTPStatus(status).phrase})"
    except ValueError:
        return str(status)


def _texts(values: Any, depth: int = 0) -> Iterator[str]:
    """OpenAI's and vLLM's {"error": {"message"}}, SGLang's {"message"}, FastAPI's {"detail"}, or plain text."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(values, str):
        yield values
    elif isinstance(values, list):
        for value in values[:4]:
            yield from _texts(value, depth + 1)
    elif isinstance(values, dict):
        if isinstance(values.get("msg"), str):
            where = values.get("loc")
            yield f"{'.'.join(map(str, where))}: {values['msg']}" if isinstance(where, list) else values["msg"]
            return
        for key in ("error", "message", "detail"):
            if values.get(key):
                yield from _texts(values[key], depth + 1)
                return
