"""How messages come from a server, within limits: the SDK's own transports read lines and events of any length."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp.types import JSONRPCMessage, RequestId

from qwen35mm.outside_json import num_values
from qwen35mm.tools.config import ToolServer

logger = logging.getLogger(__name__)

# One message; a picture of 20 MB in base64 fits.
MAX_MESSAGE_BYTES = 32 << 20
# Between two calls or listings.
MAX_TURN_BYTES = 2 * MAX_MESSAGE_BYTES
# Reading one takes 3 us and 4 KB at worst, and stops all other threads.
MAX_TURN_VALUES = 100_000
_LAST_WORDS = 2_000
_PATIENCE_S = 2.0
_CONNECT_S = 30.0


class FloodError(ConnectionError):
    """A server sent more than its limit."""


class Meter:
    """Counts what a server sends between two requests. `said` are the last bytes of its error output."""

    def __init__(self) -> None:
        self.said = b""
        self.restart()

    def restart(self) -> None:
        self._bytes_left = MAX_TURN_BYTES
        self._values_left = MAX_TURN_VALUES

    def take(self, num_bytes: int) -> None:
        """Raises FloodError."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise FloodError(f"more than {MAX_TURN_BYTES:,} bytes")

    def read(self, lines: bytes) -> None:
        """Counts the values of whole lines; no string of JSON goes over a line's end. Raises FloodError."""
        self._values_left -= sum(map(num_values, lines.splitlines()))
        if self._values_left < 0:
            raise FloodError(f"more than {MAX_TURN_VALUES:,} values")


@dataclass
class Asked(ClientMessageMetadata):
    """Goes with a request; `number` is what the SDK calls it, by which it can be cancelled."""

    number: RequestId | None = None


@contextlib.asynccontextmanager
async def connected(server: ToolServer, meter: Meter, ended: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
    """The streams of an MCP session; `ended` is set when the server sends nothing any more.

    Raises:
        OSError: the program can't be started.
    """
    transport = (_http if server.command is None else _child)(server, meter, ended)
    async with transport as (incoming, outgoing):
        yield incoming, _Numbering(outgoing)


@contextlib.asynccontextmanager
async def _http(server: ToolServer, meter: Meter, ended: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
    assert server.url is not None, "a server has a command or an address"
    timeout = httpx.Timeout(_CONNECT_S, read=server.timeout_s)
    # Its redirects lead nowhere else: the transport follows those within the origin only.
    async with (
        httpx.AsyncClient(headers=dict(server.headers), timeout=timeout, transport=_Limited(meter, ended)) as client,
        streamable_http_client(server.url, http_client=client) as (incoming, outgoing, _),
    ):
        yield incoming, outgoing


@contextlib.asynccontextmanager
async def _child(server: ToolServer, meter: Meter, ended: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
    variables = {**get_default_environment(), **server.env}
    command = shutil.which(server.command or "", path=variables.get("PATH")) or server.command
    process = await asyncio.create_subprocess_exec(
        str(command),
        *server.args,
        env=variables,
        cwd=server.cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_MESSAGE_BYTES,
        # It has a group of its own: Ctrl-C reaches only us, and what it started ends with it.
        start_new_session=True,
    )
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    to_session, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with to_session:
                try:
                    # A line over the limit is a ValueError.
                    while line := await stdout.readline():
                        meter.take(len(line))
                        meter.read(line)
                        if line.strip():
                            await to_session.send(_message(line))
                except (ValueError, FloodError) as error:
                    logger.warning("the tool server %s is ended: it sent too much (%s)", server.name, error)
        ended.set()

    async def listen() -> None:
        while words := await stderr.read(1 << 16):
            meter.said = (meter.said + words)[-_LAST_WORDS:]

    async def write() -> None:
        with contextlib.suppress(OSError):
            async with from_session:
                async for each in from_session:
                    stdin.write(each.message.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")
                    await stdin.drain()

    reading, listening, writing = [asyncio.ensure_future(each()) for each in (read, listen, write)]
    try:
        yield incoming, outgoing
    finally:
        reading.cancel()
        writing.cancel()
        # A pipe closes when it is read to its end.
        emptying = asyncio.ensure_future(_empty(stdout))
        try:
            await _end(process)
            await asyncio.wait({listening, emptying}, timeout=_PATIENCE_S)
        finally:
            listening.cancel()
            emptying.cancel()
            # asyncio closes it when the pipes end, which may be later than this loop.
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]


async def _empty(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(JSONRPCMessage.model_validate_json(line))
    except ValueError as error:
        return error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its input, by which a server knows that it is over; then ends it with all that it started.

    Cancelled, it kills at once.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        await _wait(process)
        _signal(process, "SIGTERM")
        await _wait(process)
    finally:
        _signal(process, "SIGKILL")
    await _wait(process)


async def _wait(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), _PATIENCE_S)


def _signal(process: asyncio.subprocess.Process, name: str) -> None:
    # Also where it has ended: its children may live on in its group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.Signals[name])
        elif process.returncode is None:
            process.kill()


class _Numbering:
    """The stream to a server; tells each `Asked` its number."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aenter__(self) -> _Numbering:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()

    async def send(self, item: SessionMessage) -> None:
        if isinstance(item.metadata, Asked):
            item.metadata.number = getattr(item.message.root, "id", None)
        await self._stream.send(item)


class _Limited(httpx.AsyncHTTPTransport):
    """Counts the bytes and the values of responses, and ends one that is too long."""

    def __init__(self, meter: Meter, ended: asyncio.Event) -> None:
        super().__init__()
        self._meter, self._ended = meter, ended

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # Behind us, a packed kilobyte may become a megabyte.
        request.headers["accept-encoding"] = "identity"
        if request.method == "DELETE":
            # The SDK's goodbye.
            request.extensions["timeout"] = httpx.Timeout(_PATIENCE_S).as_dict()
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx.DecodingError("the response is compressed, though that was ruled out", request=request)
        # Without another charset, in which we would count wrongly.
        response.headers["content-type"] = response.headers.get("content-type", "").partition(";")[0]
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Counted(response.stream, self._meter, self._ended)
        return response


class _Counted(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, meter: Meter, ended: asyncio.Event) -> None:
        self._stream = stream
        self._meter, self._ended = meter, ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest = bytearray()
        try:
            async for chunk in self._stream:
                self._meter.take(len(chunk))
                end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
                if end:
                    yield self._counted(bytes(rest + chunk[:end]))
                    rest.clear()
                rest += chunk[end:]
            yield self._counted(bytes(rest))
        except FloodError as error:
            logger.warning("a tool server is ended: it sent too much (%s)", error)
            # The SDK takes an error for a pause.
            self._ended.set()
            raise httpx.ReadError("too much") from None

    def _counted(self, lines: bytes) -> bytes:
        self._meter.read(lines)
        return lines

    async def aclose(self) -> None:
        await self._stream.aclose()
