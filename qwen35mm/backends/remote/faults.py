"""What a server can do wrong: which error it is, in words for a person, and whether and when asking again can help."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from datetime import timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RefusedError, RequestError, RequestTimeoutError

# Waits double from the first up to the longest, so that a server that is down isn't pressed.
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A server that is loading a model or hands out turns by the minute is waited for; one that says "tomorrow" is not.
MAX_RETRY_AFTER_S = 120.0

# JSON may be nested deeper than Python can follow.
_MAX_DEPTH = 8
_UNKNOWN = re.compile(r"unexpected|unknown|unrecogni[sz]ed|(not |un)supported|extra|not permitted", re.IGNORECASE)
_PASSING = frozenset({408, 409, 425, 429})
# What a server says of one request and not of whoever asks.
_OF_THIS_REQUEST = frozenset({400, 415, 422, 451})
_NO_ACCESS = (RequestError, "refused access with {status}{quoted} Check the API key.")
_OF_STATUS: dict[int, tuple[type[Qwen35mmError], str]] = {
    401: _NO_ACCESS,
    403: _NO_ACCESS,
    404: (
        RequestError,
        "answered {status}{quoted} Check the address, which usually ends in /v1, and the model's name.",
    ),
    408: (RequestTimeoutError, "gave up waiting{quoted} Send it fewer requests at a time."),
    413: (RefusedError, "refused the request as too large{quoted} Send smaller or fewer media."),
    429: (QueueFullError, "has too many requests already{quoted} Send it fewer at a time."),
}


class Fault(Exception):
    """What went wrong with a request, without the server's name.

    Attributes:
        kind: the class of the error that it becomes if it isn't tried again.
        words: what follows the server's name; `{said}` stands for the server's own words, `{quoted}` for a colon and
            them in quotes, or nothing, and a full stop.
        said: the server's own words, as they came: not fit to be shown before `Connection.error_of` has been over them.
        is_passing: whether another attempt can go better.
        status: the answer's status; None where none came.
        retry_after_s: how long the server asked to be left alone.
    """

    def __init__(
        self,
        kind: type[Qwen35mmError],
        words: str,
        *,
        said: str = "",
        is_passing: bool = False,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(words)
        self.kind = kind
        self.words = words
        self.said = said
        self.is_passing = is_passing
        self.status = status
        self.retry_after_s = retry_after_s


def damaged(what: str) -> Fault:
    """An answer that isn't what an OpenAI-compatible server sends."""
    return Fault(EngineError, "sent a damaged answer: {said}. Look at its log.", said=what, is_passing=True)


def foreign(status: int, content_type: str) -> Fault:
    """Something else answers at that address."""
    what = f"doesn't speak OpenAI's API at this address: it answered {_words(status)} with {{said}}."
    return Fault(
        RequestError, f"{what} Check the address; it usually ends in /v1.", said=content_type or "no content type"
    )


def refused(status: int, said: str, sent: Collection[str], retry_after_s: float | None = None) -> Fault:
    """An answer that isn't a success.

    Args:
        said: the server's own words.
        sent: names of the parameters that the request had and that a server may not know.
    """
    is_passing = status in _PASSING or status >= 500
    if status in _OF_STATUS:
        kind, words = _OF_STATUS[status]
    elif is_passing:
        kind, words = EngineError, "failed with {status}{quoted} Look at its log."
    elif 300 <= status < 400:
        kind, words = RequestError, "points to another address ({status}). Give that one instead."
    elif names := _unknown(sent, said):
        kind = RequestError
        words = f"doesn't know {' and '.join(names)}"
        words += "{quoted} Leave that setting at its default, or use a server that knows it."
    else:
        kind = RefusedError if status in _OF_THIS_REQUEST else RequestError
        words = "refused the request with {status}{quoted}"
    words = words.replace("{status}", _words(status))
    return Fault(kind, words, said=said, is_passing=is_passing, status=status, retry_after_s=retry_after_s)


def stream_error(error: Any, sent: Collection[str]) -> Fault:
    """An error object in the middle of a stream; a code in it counts as the status it would have been."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return refused(status, "; ".join(_texts(error)), sent)


def read_said(body: bytes) -> str:
    """The server's own words, in any of the forms that servers use; none of an HTML page."""
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
        retry_after_s: what the server asked for; never less than that is waited, up to MAX_RETRY_AFTER_S.
    """
    longest = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failed - 1, 64))
    return max(longest * (0.5 + 0.5 * jitter), min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def read_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date); None if it can't be read.

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
    """The parameters that a server says it doesn't know; one that it only mentions may be too large or too small."""
    if not _UNKNOWN.search(message):
        return []
    return [name for name in sent if re.search(rf"\b{re.escape(name)}\b", message)]


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
