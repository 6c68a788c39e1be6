"""One request to a server over HTTP: limits on its silence, and a `Fault` for every failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any

import anyio
import httpx

from qwen35mm.backends.remote import words
from qwen35mm.backends.remote.deadline import Deadline, Patience, RemoteTimeouts
from qwen35mm.backends.remote.faults import Fault, foreign, read_retry_after, read_said, refused
from qwen35mm.backends.remote.reply import DONE, Piece, Reply
from qwen35mm.backends.remote.sse import EventReader
from qwen35mm.errors import ConfigError, EngineError, Qwen35mmError, RequestError, RequestTimeoutError
from qwen35mm.outside_json import MAX_BYTES
from qwen35mm_preprocess.say import say

# What a refusal says, and an answer that isn't streamed: the scores of a long text are large.
_MAX_REFUSAL_BYTES = 2**20
_MAX_ANSWER_BYTES = MAX_BYTES
# Anything after "[DONE]" arrives with it, or never.
_END_S = 0.5
# Below uvicorn's 5 s, so that no request meets a connection that is closing.
_KEPT_S = 3.0
_EXAMPLE = "http://localhost:8000/v1"
_VERSION = re.compile(r"v\d")
# Most characters of a server's own words in a message.
_MAX_SAID = 300


class Connection:
    """A backend's requests to one server. Use it from one event loop at a time.

    Args:
        url: the server's address; one without a version of the API in its path gets `/v1`.
        api_key: sent as a bearer token.
        timeouts: how long the server may be silent.

    Attributes:
        base_url: the address including the API's version, such as `http://localhost:8000/v1`; without credentials.
        root: the address before the version, for routes outside OpenAI's API.
        host: host and port, for messages.

    Raises:
        ConfigError: not an HTTP address, a key that no header can hold, or two kinds of credentials; the message
            doesn't contain them.
    """

    def __init__(self, url: str, api_key: str | None, timeouts: RemoteTimeouts) -> None:
        address = _parse(url)
        auth = (address.username, address.password) if address.userinfo else None
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ConfigError(say("The API key must be one word of ASCII characters, without spaces or line breaks."))
        if api_key is not None and auth is not None:
            raise ConfigError(say("Give either an API key or a user in the address, not both."))
        self.base_url = str(address.copy_with(userinfo=b""))
        self.root = self.base_url.removesuffix("/v1")
        self.host = address.netloc.decode("ascii")
        self._timeouts = timeouts
        self._secrets = [secret for secret in (api_key, auth and auth[1]) if secret]
        self._access: dict[str, Any] = {
            "auth": auth,
            "headers": {"User-Agent": "qwen35mm"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._used: httpx.AsyncClient | None = None
        self._is_closed = False

    @property
    def _client(self) -> httpx.AsyncClient:
        """The client of the running event loop; another loop's connections can't be used."""
        loop = asyncio.get_running_loop()
        if self._used is None or self._loop is not loop:
            self._loop = loop
            self._used = httpx.AsyncClient(
                **self._access,
                # `Patience` bounds other waits: they differ before and amid an answer. Turns bound connections.
                timeout=httpx.Timeout(None, connect=self._timeouts.connect_s),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S),
            )
        return self._used

    def blocking_client(self) -> httpx.Client:
        """A client for requests to the server's root from any thread."""
        return httpx.Client(base_url=self.root, **self._access)

    async def list_models(self) -> dict[str, Any]:
        """The server's models: its description of each, by name.

        Raises:
            Fault: the request failed, or this connection was closed.
        """
        models = await self.get_json(f"{self.base_url}/models")
        try:
            return {str(model["id"]): model for model in models["data"]}
        except (KeyError, TypeError):
            raise foreign(200, "application/json") from None

    async def get_json(self, url: str) -> Any:
        """The JSON at an address of the server.

        Raises:
            Fault: the request failed, the answer isn't JSON, or this connection was closed.
        """
        patience = Patience(self._timeouts, Deadline.after(math.inf))
        async with self._exchange("GET", url, patience) as response:
            body = await self._read_success(response, patience, ())
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                raise foreign(response.status_code, _content_type(response)) from None

    async def post_json(self, path: str, body: bytes, sent: Collection[str], deadline: Deadline) -> Any:
        """The JSON answer to a request that isn't streamed; arguments as in `ask`.

        Raises:
            Fault: the request failed, the answer isn't JSON, or this connection was closed.
        """
        patience = Patience(self._timeouts, deadline)
        async with self._exchange("POST", f"{self.base_url}/{path}", patience, body) as response:
            found = await self._read_success(response, patience, sent)
            try:
                return json.loads(found)
            except (ValueError, RecursionError):
                raise foreign(response.status_code, _content_type(response)) from None

    async def ask(self, path: str, body: bytes, reply: Reply, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        """Asks once, and yields the chunks that `reply` makes of the stream. Leaving the iterator disconnects.

        Args:
            path: below `/v1`.
            body: the request, JSON.

        Raises:
            Fault: the request failed, at once or amid its answer, or this connection was closed.
        """
        patience = Patience(self._timeouts, deadline)
        async with self._exchange("POST", f"{self.base_url}/{path}", patience, body) as response:
            if not response.is_success or _content_type(response) != "text/event-stream":
                await self._read_success(response, patience, reply.sent)
                raise foreign(response.status_code, _content_type(response))
            reader, chunks = EventReader(), response.aiter_bytes()
            while chunk := await patience.wait(anext(chunks, b"")):
                for data in reader.feed(chunk):
                    if data.strip() == DONE:
                        # Only a response read to its end leaves a reusable connection.
                        with anyio.move_on_after(_END_S), contextlib.suppress(httpx.HTTPError):
                            while await anext(chunks, b""):
                                pass
                        return
                    patience.is_amid = True
                    for piece in reply.add(data):
                        yield piece
                patience.restart()
            for data in reader.feed(b""):
                for piece in reply.add(data) if data.strip() != DONE else ():
                    yield piece

    def error_of(self, fault: Fault) -> Qwen35mmError:
        """A fault as an error for a person."""
        return fault.kind(fault.saying(self.host, self.safe(fault.said)))

    def safe(self, text: str) -> str:
        """A server's words as one short line, without control characters and secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = "".join(char if char.isprintable() else " " for char in text)
        text = " ".join(text.split())
        return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."

    def check_open(self) -> None:
        """Raises EngineError after `aclose`."""
        if self._is_closed:
            raise EngineError(
                say("The connection to the server was closed before it answered. Make a new one and ask again.")
            )

    async def aclose(self) -> None:
        """Closes all connections; running requests end with an error."""
        self._is_closed = True
        if self._used is not None and self._loop is asyncio.get_running_loop():
            await self._used.aclose()
        else:
            self.close()

    def close(self) -> None:
        """Does the same from any thread, without waiting."""
        self._is_closed = True
        if self._used is not None and self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._used.aclose(), self._loop)

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, url: str, patience: Patience, body: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A response whose body is still unread."""
        self.check_open()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            client = self._client
            request = client.build_request(method, url, content=body, headers=headers)
            response = await patience.wait(client.send(request, stream=True))
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.ConnectTimeout:
            self.check_open()
            raise Fault(RequestTimeoutError, words.slow_to_connect, is_passing=True) from None
        except httpx.HTTPError as error:
            self.check_open()
            unreached = isinstance(error, httpx.ConnectError | httpx.ProxyError)
            raise Fault(EngineError, words.unreachable if unreached else words.broken_off, is_passing=True) from None

    async def _read_success(self, response: httpx.Response, patience: Patience, sent: Collection[str]) -> bytes:
        """The body of a response. Raises Fault unless it is a success, and within a limit."""
        body, chunks = bytearray(), response.aiter_bytes()
        most = _MAX_ANSWER_BYTES if response.is_success else _MAX_REFUSAL_BYTES
        while len(body) <= most and (chunk := await patience.wait(anext(chunks, b""))):
            patience.restart()
            body += chunk
        if not response.is_success:
            retry_after_s = read_retry_after(response.headers.get("retry-after"), time.time())
            raise refused(response.status_code, read_said(bytes(body)), sent, retry_after_s)
        if len(body) > most:
            raise Fault(RequestError, words.too_long(most >> 20), status=response.status_code)
        return bytes(body)


def _parse(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url.strip())
    except (httpx.InvalidURL, TypeError, AttributeError):
        address = None
    if address is None or address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(
            say("A server's address must begin with http:// or https://, as {example}.", example=_EXAMPLE)
        )
    if address.query or address.fragment:
        raise ConfigError(
            say(
                "A server's address ends with its path, as in {example}: leave out what follows ? or #.",
                example=_EXAMPLE,
            )
        )
    path = address.path.rstrip("/")
    has_version = any(_VERSION.match(part) for part in path.split("/"))
    return address.copy_with(path=path if has_version else f"{path}/v1")


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()
