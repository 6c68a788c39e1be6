"""How messages come from a server, within limits: the SDK's own transports read lines and events of any length."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import httpx
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCMessage

from qwen35mm.tools.config import ToolServer

# One message; a picture of 20 MB in base64 fits.
MAX_MESSAGE_BYTES = 32 << 20
# Between two calls or listings.
MAX_TURN_BYTES = 2 * MAX_MESSAGE_BYTES
_LAST_WORDS = 2_000
_PATIENCE_S = 2.0
_CONNECT_S = 30.0


class FloodError(ConnectionError):
    """A server sent more than its limit."""


class Meter:
    """Counts what a server sends between two requests. `said` are the last bytes of its error output."""

    def __init__(self) -> None:
        self._left = MAX_TURN_BYTES
        self.said = b""

    def restart(self) -> None:
        self._left = MAX_TURN_BYTES

    def take(self, num_bytes: int) -> None:
        """Raises FloodError."""
        self._left -= num_bytes
        if self._left < 0:
            raise FloodError


@contextlib.asynccontextmanager
async def connected(server: ToolServer, meter: Meter, ended: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
    """The streams of an MCP session; `ended` is set when the server sends nothing any more.

    Raises:
        OSError: the program can't be started.
    """
    if server.command is not None:
        async with _child(server, meter, ended) as streams:
            yield streams
        return
    assert server.url is not None, "a server has a command or an address"
    timeout = httpx.Timeout(_CONNECT_S, read=server.timeout_s)
    # Its redirects lead nowhere else: the transport follows those within the origin only.
    async with (
        httpx.AsyncClient(headers=dict(server.headers), timeout=timeout, transport=_Limited(meter)) as client,
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
        with contextlib.suppress(ValueError, FloodError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with to_session:
                # A line over the limit is a ValueError.
                while line := await stdout.readline():
                    meter.take(len(line))
                    if line.strip():
                        await to_session.send(_message(line))
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

    tasks = [asyncio.ensure_future(each()) for each in (read, listen, write)]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(_end(process))


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(JSONRPCMessage.model_validate_json(line))
    except ValueError as error:
        return error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its input, by which a server knows that it is over; then ends it with all that it started."""
    if process.stdin is not None:
        process.stdin.close()
    for ending in ("", "SIGTERM", "SIGKILL"):
        # Also where it has ended: its children may live on in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if ending and hasattr(os, "killpg"):
                os.killpg(process.pid, signal.Signals[ending])
            elif ending and process.returncode is None:
                process.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _PATIENCE_S)


class _Limited(httpx.AsyncHTTPTransport):
    """Counts the bytes of responses, and ends one that is too long."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Counted(response.stream, self._meter)
        return response


class _Counted(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, meter: Meter) -> None:
        self._stream = stream
        self._meter = meter

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            try:
                self._meter.take(len(chunk))
            except FloodError:
                raise httpx.ReadError("more than the limit") from None
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
