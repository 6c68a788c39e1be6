"""One request to a server over HTTP, with every wait bounded; every failure is a `Fault` with its words."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import httpx

from qwen35mm.backends.remote.faults import FaultWriter, read_retry_after
from qwen35mm.backends.remote.wire import DONE, DamageError, Delta, EventReader, read_chunk, read_models
from qwen35mm.errors import ConfigError

_MAX_BODY_BYTES = 2**20
# What follows "[DONE]" comes with it, or never.
_END_S = 0.5
# Less than the 5 s after which uvicorn hangs up: a request must not meet a connection that is just being closed.
_KEPT_S = 3.0
_VERSION = re.compile(r"v\d")
_T = TypeVar("_T")


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


@dataclass(frozen=True)
class Deadline:
    """When a request's whole time is over, by `time.monotonic`, and how long that time was."""

    at_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def left_s(self) -> float:
        return self.at_s - time.monotonic()

    def or_sooner(self, other: Deadline | None) -> Deadline:
        """The one of both that is over first; None never is."""
        return other if other is not None and other.at_s <= self.at_s else self


@dataclass(frozen=True)
class Address:
    """Where a server is, and what it is shown to let us in.

    Attributes:
        base_url: up to and with the API's version, such as `http://localhost:8000/v1`; without credentials.
        host: host and port, for messages.
        auth: user and password that stood in the address.
    """

    base_url: str
    host: str
    auth: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads an address; one whose path names no version of the API gets `/v1`.

        Raises:
            ConfigError: not the address of an HTTP server.
        """
        try:
            parsed = httpx.URL(url.strip())
        except (httpx.InvalidURL, TypeError, AttributeError):
            parsed = None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError("A server's address must begin with http:// or https://, as http://localhost:8000/v1.")
        if parsed.query or parsed.fragment:
            raise ConfigError(
                "A server's address ends with its path, as in http://localhost:8000/v1: leave out what follows ? or #."
            )
        path = parsed.path.rstrip("/")
        if not any(_VERSION.match(part) for part in path.split("/")):
            path += "/v1"
        auth = (parsed.username, parsed.password) if parsed.userinfo else None
        return cls(str(parsed.copy_with(path=path, userinfo=b"")), parsed.netloc.decode("ascii"), auth)


class Connection:
    """The requests that a backend makes of one server. To be used from one event loop.

    Args:
        address: the server's.
        api_key: sent as a bearer token.
        timeouts: how long it may be silent.

    Raises:
        ConfigError: a key that can't stand in a header, or a second way to be let in; the message doesn't hold it.
    """

    def __init__(self, address: Address, api_key: str | None, timeouts: RemoteTimeouts) -> None:
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ConfigError("The API key must be one word of ASCII characters, without spaces or line breaks.")
        if api_key is not None and address.auth is not None:
            raise ConfigError("Give either an API key or a user in the address, not both.")
        self._address = address
        self._timeouts = timeouts
        self.faults = FaultWriter(address.host, [api_key or "", address.auth[1] if address.auth else ""])
        self._client = httpx.AsyncClient(
            auth=address.auth,
            headers={"User-Agent": "qwen35mm"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            # Other waits are bounded here, since they differ before and amid an answer. Turns bound the connections.
            timeout=httpx.Timeout(None, connect=timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S),
        )
        self._is_closed = False

    async def list_models(self, deadline: Deadline) -> list[str]:
        """The names of the models that the server has.

        Raises:
            Fault: it failed.
            RequestTimeoutError: the deadline has passed.
            EngineError: this connection was closed.
        """
        async with self._opened("GET", "/models", self._first(), deadline) as response:
            body = await self._read_body(response, deadline)
            self._check_status(response, body, ())
            try:
                return read_models(body)
            except DamageError:
                raise self.faults.of_foreign(response.status_code, _content_type(response)) from None

    async def chat(self, body: bytes, sent: Collection[str], deadline: Deadline) -> AsyncGenerator[Delta, None]:
        """The chunks of one streamed answer. Leaving the iterator closes the connection.

        Args:
            body: the request, JSON.
            sent: names of its parameters that a server may not know.

        Raises:
            Fault: it failed, at once or amid its answer.
            DamageError: what came is no stream of chunks.
            RequestTimeoutError: the deadline has passed.
            EngineError: this connection was closed.
        """
        first = self._first()
        async with self._opened("POST", "/chat/completions", first, deadline, body) as response:
            if not response.is_success or _content_type(response) != "text/event-stream":
                self._check_status(response, await self._read_body(response, deadline), sent)
                raise self.faults.of_foreign(response.status_code, _content_type(response))
            async with contextlib.aclosing(self._events(response, first, deadline)) as events:
                async for data in events:
                    delta = read_chunk(data)
                    if delta.error is not None:
                        raise self.faults.of_stream_error(delta.error, sent)
                    yield delta

    async def within(self, waiting: Awaitable[_T], deadline: Deadline | None) -> _T:
        """Waits, but not beyond the deadline. Raises RequestTimeoutError."""
        return await waiting if deadline is None else await self._heard(waiting, deadline, deadline)

    def check_open(self) -> None:
        """Raises EngineError after `aclose`."""
        if self._is_closed:
            raise self.faults.of_closing()

    async def aclose(self) -> None:
        """Closes all connections; who waits for an answer gets an error."""
        self._is_closed = True
        await self._client.aclose()

    def _first(self) -> Deadline:
        return Deadline.after(self._timeouts.first_s)

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: str, path: str, first: Deadline, deadline: Deadline, body: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        self.check_open()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = self._client.build_request(method, f"{self._address.base_url}{path}", content=body, headers=headers)
        response = await self._heard(self._client.send(request, stream=True), first, deadline)
        try:
            yield response
        finally:
            await response.aclose()

    async def _events(self, response: httpx.Response, first: Deadline, deadline: Deadline) -> AsyncGenerator[str, None]:
        """The data of an answer's events, up to the one that says that it is done."""
        reader, chunks = EventReader(), response.aiter_bytes()
        silence, has_begun = first, False
        chunk = b"there is one"
        while chunk:
            chunk = await self._heard(anext(chunks, b""), silence, deadline, has_begun=has_begun)
            for data in reader.feed(chunk):
                if data.strip() == DONE:
                    # Only one that was read to its end leaves a connection that can be used again.
                    with anyio.move_on_after(_END_S), contextlib.suppress(httpx.HTTPError):
                        while await anext(chunks, b""):
                            pass
                    return
                has_begun = True
                yield data
            # A server that sends comments is alive, however long its prefill takes.
            silence = Deadline.after(self._timeouts.silence_s) if has_begun else self._first()

    async def _read_body(self, response: httpx.Response, deadline: Deadline) -> bytes:
        body, chunks = b"", response.aiter_bytes()
        silence_s = self._timeouts.silence_s
        while chunk := await self._heard(anext(chunks, b""), Deadline.after(silence_s), deadline):
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                break
        return body

    async def _heard(
        self, waiting: Awaitable[_T], silence: Deadline, deadline: Deadline, *, has_begun: bool = False
    ) -> _T:
        """Waits for the server: as long as it may be silent, and not beyond the request's whole time."""
        sooner = silence.or_sooner(deadline)
        try:
            # Not asyncio's wait_for, which up to Python 3.11 loses a cancellation that comes with the result.
            with anyio.fail_after(max(sooner.left_s(), 0)):
                return await waiting
        except TimeoutError:
            if sooner is deadline:
                raise self.faults.of_deadline(deadline.timeout_s) from None
            raise self.faults.of_silence(silence.timeout_s, has_begun=has_begun) from None
        except httpx.HTTPError as error:
            self.check_open()
            raise self.faults.of_transport(error) from None

    def _check_status(self, response: httpx.Response, body: bytes, sent: Collection[str]) -> None:
        if not response.is_success:
            retry_after_s = read_retry_after(response.headers.get("retry-after"), time.time())
            raise self.faults.of_status(response.status_code, body, sent, retry_after_s)


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()
