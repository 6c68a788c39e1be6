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

import httpx

from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RefusedError, RequestError, RequestTimeoutError

# Waits double from the first up to the longest, so that a server that is down isn't pressed.
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A server that is loading a model or hands out turns by the minute is waited for; one that says "tomorrow" is not.
MAX_RETRY_AFTER_S = 120.0

_MAX_MESSAGE = 300
# JSON may be nested deeper than Python can follow.
_MAX_DEPTH = 8
_UNKNOWN = re.compile(r"unexpected|unknown|unrecogni[sz]ed|(not |un)supported|extra|not permitted", re.IGNORECASE)
_PASSING = frozenset({408, 409, 425, 429})
# What a server says of one request and not of whoever asks.
_OF_THIS_REQUEST = frozenset({400, 415, 422, 451})
_NO_ACCESS = (RequestError, "refused access with {status}{said} Check the API key.")
_OF_STATUS: dict[int, tuple[type[Qwen35mmError], str]] = {
    401: _NO_ACCESS,
    403: _NO_ACCESS,
    404: (
        RequestError,
        "answered {status}{said} Check the address, which usually ends in /v1, and the model's name.",
    ),
    408: (RequestTimeoutError, "gave up waiting{said} Send it fewer requests at a time."),
    413: (RefusedError, "refused the request as too large{said} Send smaller or fewer media."),
    429: (QueueFullError, "has too many requests already{said} Send it fewer at a time."),
}


class Fault(Exception):
    """An attempt that failed.

    Attributes:
        error: what is raised if it was the last attempt.
        is_passing: whether another attempt can go better.
        status: the answer's status; None where none came.
        retry_after_s: how long the server asked to be left alone.
    """

    def __init__(
        self,
        error: Qwen35mmError,
        *,
        is_passing: bool,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_passing = is_passing
        self.status = status
        self.retry_after_s = retry_after_s


class FaultWriter:
    """Writes the errors about one server.

    Args:
        host: its name for a person, without credentials.
        secrets: what no message may hold, whatever the server repeats.
    """

    def __init__(self, host: str, secrets: Collection[str]) -> None:
        self._who = f"The server at {host}"
        self._secrets = [secret for secret in secrets if secret]

    def of_transport(self, error: httpx.HTTPError) -> Fault:
        """The connection: not made, or broken."""
        if isinstance(error, httpx.ConnectTimeout):
            what = "didn't take the connection in time. Check that it runs, and its address."
            return self._passing(RequestTimeoutError, what)
        if isinstance(error, httpx.ConnectError | httpx.ProxyError):
            what = "can't be reached. Check that it runs, its address, its certificate and the network."
        else:
            what = "broke off the connection. Look at its log; it may have run out of memory or been restarted."
        return self._passing(EngineError, what)

    def of_silence(self, limit_s: float, *, has_begun: bool) -> Fault:
        """No byte for `limit_s` seconds."""
        what = f"fell silent for {limit_s:g} s amid its answer" if has_begun else f"sent nothing for {limit_s:g} s"
        return self._passing(RequestTimeoutError, f"{what}. Look at its log, or send it fewer requests at a time.")

    def of_deadline(self, timeout_s: float) -> RequestTimeoutError:
        """The request's whole time is over."""
        return RequestTimeoutError(
            f"{self._who} gave no whole answer within {timeout_s:g} s. Allow more time, or send it fewer requests at a "
            f"time."
        )

    def of_closing(self) -> EngineError:
        """We hung up ourselves."""
        return EngineError("The connection to the server was closed before it answered. Make a new one and ask again.")

    def of_damage(self, what: str) -> Fault:
        """An answer that isn't what an OpenAI-compatible server sends."""
        return self._passing(EngineError, f"sent a damaged answer: {self.safe(what)}. Look at its log.")

    def of_foreign(self, status: int, content_type: str) -> Fault:
        """Something else answers at that address."""
        kind = self.safe(content_type) or "no content type"
        what = f"doesn't speak OpenAI's API at this address: it answered {_words(status)} with {kind}."
        return Fault(RequestError(f"{self._who} {what} Check the address; it usually ends in /v1."), is_passing=False)

    def of_withheld(self) -> Fault:
        """finish_reason content_filter."""
        return Fault(RefusedError(f"{self._who} withheld its answer: its content filter stepped in."), is_passing=False)

    def of_status(self, status: int, body: bytes, sent: Collection[str], retry_after_s: float | None = None) -> Fault:
        """An answer that isn't a success.

        Args:
            sent: names of the parameters that the request had and that a server may not know.
        """
        return self._of_refusal(status, _message(body), sent, retry_after_s)

    def of_stream_error(self, error: Any, sent: Collection[str]) -> Fault:
        """An error object in the middle of a stream; a code in it counts as the status it would have been."""
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return self._of_refusal(status, "; ".join(_texts(error)), sent, None)

    def _of_refusal(self, status: int, message: str, sent: Collection[str], retry_after_s: float | None) -> Fault:
        is_passing = status in _PASSING or status >= 500
        if status in _OF_STATUS:
            kind, words = _OF_STATUS[status]
        elif is_passing:
            kind, words = EngineError, "failed with {status}{said} Look at its log."
        elif 300 <= status < 400:
            kind, words = RequestError, "points to another address ({status}). Give that one instead."
        elif names := _unknown(sent, message):
            kind, words = (
                RequestError,
                f"doesn't know {' and '.join(names)}"
                + ("{said} Leave that setting at its default, or use a server that knows it."),
            )
        else:
            kind = RefusedError if status in _OF_THIS_REQUEST else RequestError
            words = "refused the request with {status}{said}"
        message = self.safe(message)
        words = words.format(status=_words(status), said=f': "{message}".' if message else ".")
        error = kind(f"{self._who} {words}")
        return Fault(error, is_passing=is_passing, status=status, retry_after_s=retry_after_s)

    def _passing(self, kind: type[Qwen35mmError], what: str) -> Fault:
        return Fault(kind(f"{self._who} {what}"), is_passing=True)

    def safe(self, text: str) -> str:
        """A server's words as one short line without control characters and secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = "".join(char if char.isprintable() else " " for char in text)
        text = " ".join(text.split())
        return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


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


def _message(body: bytes) -> str:
    """The server's own words, in any of the forms that servers use; none of an HTML page."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        return "" if text.startswith("<") else text
    return "; ".join(_texts(values))


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
