"""A client's connection, which ends where nothing comes of it: whoever stalls holds a file descriptor, and a reply."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

# For a request's line and headers, from the connection's begin or the last answer's end.
HEADERS_TIMEOUT_S = 30.0
# For a client to take any of what is sent to it; the system and proxies hold some for it besides.
READING_TIMEOUT_S = 60.0


class Connection(H11Protocol):
    """uvicorn's connection, with limits of time for both directions. Bodies have their own: see `body.py`."""

    _asking: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking = _ended(self._asking)
        self._reading = _ended(self._reading)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = _ended(self._reading) or self.loop.call_later(READING_TIMEOUT_S, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading = _ended(self._reading)

    def _await_request(self) -> None:
        _ended(self._asking)
        self._asking = self.loop.call_later(HEADERS_TIMEOUT_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _reset(self) -> None:
        # Without this the system would go on to offer what it holds, for minutes.
        at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
