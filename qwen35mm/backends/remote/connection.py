"""One request to a server over HTTP: how long it may be silent, and a `Fault` for every way to fail."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

import anyio
import httpx

from qwen35mm.backends.remote.faults import Fault, foreign, read_retry_after, read_said, refused
from qwen35mm.backends.remote.wire import DONE, EventReader, Reply
from qwen35mm.engine import Result
from qwen35mm.errors import ConfigError, EngineError, Qwen35mmError, RequestTimeoutError

_MAX_BODY_BYTES = 2**20
# What follows "[DONE]" comes with it, or never.
_END_S = 0.5
# Less than the 5 s after which uvicorn hangs up: a request must not meet a connection that is just being closed.
_KEPT_S = 3.0
_VERSION = re.compile(r"v\d")
# Of a server's own words in a message.
_MAX_SAID = 300


@dataclass(frozen=True)
class RemoteTimeouts:
    """How long a server may be silent.

    Attributes:
        connect_s: until the connection stands.
        first_s: until the first bytes of an answer's text: its line of waiting requests, the media, the prefill.
        silence_s: between two pieces of an answer.
    """

    connect_s: float = 10.0
    first_s: float = 300.0
    silence_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0; got {getattr(self, name)!r}.")


class Connection:
    """The requests that a backend makes of one server. To be used from one event loop.

    Args:
        url: the server's address; one whose path names no version of the API gets `/v1`.
        api_key: sent as a bearer token.
        timeouts: how long it may be silent.

    Attributes:
        base_url: up to and with the API's version, such as `http://localhost:8000/v1`; without credentials.
        host: host and port, for messages.

    Raises:
        ConfigError: not the address of an HTTP server, a key that can't stand in a header, or a second way to be let
            in; the message doesn't hold it.
    """

    def __init__(self, url: str, api_key: str | None, timeouts: RemoteTimeouts) -> None:
        address = _parse(url)
        auth = (address.username, address.password) if address.userinfo else None
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ConfigError("The API key must be one word of ASCII characters, without spaces or line breaks.")
        if api_key is not None and auth is not None:
            raise ConfigError("Give either an API key or a user in the address, not both.")
        self.base_url = str(address.copy_with(userinfo=b""))
        self.host = address.netloc.decode("ascii")
        self._timeouts = timeouts
        self._secrets = [secret for secret in (api_key, auth and auth[1]) if secret]
        self._client = httpx.AsyncClient(
            auth=auth,
            headers={"User-Agent": "qwen35mm"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            # Other waits are bounded here, since they differ before and amid an answer. Turns bound the connections.
            timeout=httpx.Timeout(None, connect=timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S),
        )
        self._is_closed = False

    async def list_models(self) -> list[str]:
        """The names of the models that the server has.

        Raises:
            Fault: it failed, or this connection was closed.
        """
        async with self._exchange("GET", "/models") as (response, silence):
            body = await self._read_success(response, silence, ())
            try:
                return [str(model["id"]) for model in json.loads(body)["data"]]
            except (ValueError, RecursionError, KeyError, TypeError):
                raise foreign(response.status_code, _content_type(response)) from None

    async def chat(self, body: bytes, reply: Reply) -> Result:
        """Asks once, and gathers the streamed answer in `reply`.

        Args:
            body: the request, JSON.

        Raises:
            Fault: it failed, at once or amid its answer, or this connection was closed.
        """
        async with self._exchange("POST", "/chat/completions", body) as (response, silence):
            if not response.is_success or _content_type(response) != "text/event-stream":
                await self._read_success(response, silence, reply.sent)
                raise foreign(response.status_code, _content_type(response))
            reader, chunks = EventReader(), response.aiter_bytes()
            while True:
                chunk = await anext(chunks, b"")
                for data in reader.feed(chunk):
                    if data.strip() == DONE:
                        # Only one that was read to its end leaves a connection that can be used again.
                        silence.restart(math.inf)
                        with anyio.move_on_after(_END_S), contextlib.suppress(httpx.HTTPError):
                            while await anext(chunks, b""):
                                pass
                        return reply.result()
                    silence.is_amid = True
                    reply.add(data)
                if not chunk:
                    return reply.result()
                # A server that sends comments is alive, however long its prefill takes.
                silence.restart(self._timeouts.silence_s if silence.is_amid else self._timeouts.first_s)

    def error_of(self, fault: Fault) -> Qwen35mmError:
        """What a fault becomes for a person."""
        said = self.safe(fault.said)
        words = fault.words.format(said=said, quoted=f': "{said}".' if said else ".")
        return fault.kind(f"The server at {self.host} {words}")

    def safe(self, text: str) -> str:
        """A server's words as one short line without control characters and secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = "".join(char if char.isprintable() else " " for char in text)
        text = " ".join(text.split())
        return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."

    def check_open(self) -> None:
        """Raises EngineError after `aclose`."""
        if self._is_closed:
            raise EngineError(
                "The connection to the server was closed before it answered. Make a new one and ask again."
            )

    async def aclose(self) -> None:
        """Closes all connections; who waits for an answer gets an error."""
        self._is_closed = True
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[tuple[httpx.Response, _Silence]]:
        """An answer whose text is still to be read, and what ends this where the server is silent for too long."""
        self.check_open()
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = f"{self.base_url}{path}"
        silence = _Silence(self._timeouts.first_s)
        try:
            with silence.scope:
                async with self._client.stream(method, url, content=body, headers=headers) as response:
                    yield response, silence
        except httpx.ConnectTimeout:
            self.check_open()
            what = "didn't take the connection in time. Check that it runs, and its address."
            raise Fault(RequestTimeoutError, what, is_passing=True) from None
        except httpx.HTTPError as error:
            self.check_open()
            if isinstance(error, httpx.ConnectError | httpx.ProxyError):
                what = "can't be reached. Check that it runs, its address, its certificate and the network."
            else:
                what = "broke off the connection. Look at its log; it may have run out of memory or been restarted."
            raise Fault(EngineError, what, is_passing=True) from None
        if silence.scope.cancelled_caught:
            limit = f"{silence.limit_s:g} s"
            what = f"fell silent for {limit} amid its answer" if silence.is_amid else f"sent nothing for {limit}"
            words = f"{what}. Look at its log, or send it fewer requests at a time."
            raise Fault(RequestTimeoutError, words, is_passing=True)

    async def _read_success(self, response: httpx.Response, silence: _Silence, sent: Collection[str]) -> bytes:
        """The text of an answer, as far as it is of use. Raises Fault where it is none of success."""
        body = b""
        async for chunk in response.aiter_bytes():
            silence.restart(self._timeouts.silence_s)
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                break
        if not response.is_success:
            retry_after_s = read_retry_after(response.headers.get("retry-after"), time.time())
            raise refused(response.status_code, read_said(body), sent, retry_after_s)
        return body


class _Silence:
    """How long a server may say nothing from now on: `scope` ends then.

    Attributes:
        is_amid: whether it has begun to answer.
    """

    def __init__(self, limit_s: float) -> None:
        self.scope = anyio.CancelScope()
        self.is_amid = False
        self.restart(limit_s)

    def restart(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.scope.deadline = anyio.current_time() + limit_s


def _parse(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url.strip())
    except (httpx.InvalidURL, TypeError, AttributeError):
        address = None
    if address is None or address.scheme not in ("http", "https") or not address.host:
        raise ConfigError("A server's address must begin with http:// or https://, as http://localhost:8000/v1.")
    if address.query or address.fragment:
        raise ConfigError(
            "A server's address ends with its path, as in http://localhost:8000/v1: leave out what follows ? or #."
        )
    path = address.path.rstrip("/")
    has_version = any(_VERSION.match(part) for part in path.split("/"))
    return address.copy_with(path=path if has_version else f"{path}/v1")


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()
