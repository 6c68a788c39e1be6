"""A client's connection, which ends where nothing comes of it: whoever stalls holds a file descriptor, and a reply."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen35mm.http.addresses import network_of

# For a request's line and headers, from the connection's begin or the last answer's end.
HEADERS_TIMEOUT_S = 30.0
# For a client to send any more of a body.
SENDING_TIMEOUT_S = 60.0
# For a client to take any of what is sent to it; the system and proxies hold some for it besides.
READING_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 1000
# A browser has six for each of its pages' hosts; behind one address there may be an office.
MAX_OF_ADDRESS = 200
# Files, databases and the model's own descriptors.
_RESERVED = 256


class Places:
    """The places for connections of one server. One connection too many takes the place of the longest silent one.

    Args:
        most: of all.
        most_of_address: of one address, on another machine.
    """

    def __init__(self, most: int = MAX_CONNECTIONS, most_of_address: int = MAX_OF_ADDRESS) -> None:
        self._most = most
        self._most_of_address = most_of_address
        self._of_address: Counter[str] = Counter()
        # Those that ask for nothing, the longest silent first.
        self._silent: dict[Connection, str] = {}
        self._num_taken = 0

    @classmethod
    def of_this_process(cls) -> Places:
        """As many as the process may have files for."""
        try:
            import resource
        except ImportError:  # Windows has no such limit
            return cls()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_CONNECTIONS + _RESERVED
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(
            MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(soft - _RESERVED, MAX_CONNECTIONS), 16)
        )

    def enter(self, connection: Connection, address: str) -> bool:
        """Whether there is a place for it."""
        if self._of_address[address] >= self._most_of_address and not address.startswith("127."):
            leaves = next((each for each, other in self._silent.items() if other == address), None)
        elif self._num_taken >= self._most:
            leaves = next(iter(self._silent), None)
        else:
            leaves = connection
        if leaves is None:
            return False
        self._num_taken += 1
        self._of_address[address] += 1
        if leaves is not connection:
            leaves.end()
        return True

    def fell_silent(self, connection: Connection, address: str) -> None:
        self._silent[connection] = address

    def asks(self, connection: Connection) -> None:
        self._silent.pop(connection, None)

    def leave(self, connection: Connection, address: str) -> None:
        self._silent.pop(connection, None)
        self._num_taken -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class Connection(H11Protocol):
    """uvicorn's connection, with limits of their number, and of time for both directions."""

    places: ClassVar[Places]
    _address: str | None = None
    _asking: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, places: Places) -> type[Connection]:
        """The connections of one server."""
        return type(cls.__name__, (cls,), {"places": places})

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        address = network_of((transport.get_extra_info("peername") or ("",))[0])
        if not self.places.enter(self, address):
            self.transport.abort()
            return
        self._address = address
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking = _ended(self._asking)
        self._sending = _ended(self._sending)
        self._reading = _ended(self._reading)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            return
        self.places.asks(self)
        self._sending = _ended(self._sending)
        if self.conn.their_state is h11.SEND_BODY:
            self._sending = self.loop.call_later(SENDING_TIMEOUT_S, self._end_if_stalled)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application still answers what came before the broken bytes: nobody reads that any more.
            cycle.disconnected = True
            cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # An answer has begun, or HEAD asked, whose answer has no body.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = _ended(self._reading) or self.loop.call_later(READING_TIMEOUT_S, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading = _ended(self._reading)

    def end(self) -> None:
        """Gives its place to another one."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        if self._address is not None:
            self.places.leave(self, self._address)
            self._address = None

    def _await_request(self) -> None:
        _ended(self._asking)
        self._asking = self.loop.call_later(HEADERS_TIMEOUT_S, self._end_if_silent)
        if self._address is not None and (self.cycle is None or self.cycle.response_complete):
            self.places.fell_silent(self, self._address)

    def _end_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _end_if_stalled(self) -> None:
        # What isn't read here doesn't come: then it isn't the client that stalls.
        if self.flow.read_paused:
            self._sending = self.loop.call_later(SENDING_TIMEOUT_S, self._end_if_stalled)
        elif self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _reset(self) -> None:
        # Without this the system would go on to offer what it holds, for minutes.
        at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
