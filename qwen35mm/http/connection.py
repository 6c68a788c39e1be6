"""A client's connection, which ends when it stalls: a stalled one holds a file descriptor and a reply."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen35mm.http.addresses import network_of

# Seconds for a request's line and headers, from the connection's start or the last response's end.
HEADERS_TIMEOUT_S = 30.0
# A client must send so many bytes of a body in so many seconds: a thousand a second. Bodies that are read whole have a
# shorter limit, which answers with an error.
SENDING_TIMEOUT_S, SENT_BYTES = 130.0, 130_000
# Seconds in which a client must read something. The system and proxies buffer some data besides.
READING_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 1000
# A browser opens six per host; an office may share one address.
MAX_OF_ADDRESS = 200
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# For files, databases and the model.
_RESERVED = 256


class Places:
    """The places for connections of one server. A new connection may replace the one that was silent longest.

    Args:
        most: of all.
        most_of_address: of one address on another machine.
        many: networks that many people share; only `most` limits them.
    """

    def __init__(
        self, most: int = MAX_CONNECTIONS, most_of_address: int = MAX_OF_ADDRESS, many: Iterable[Network] = ()
    ) -> None:
        self._most = most
        self._many = tuple(many)
        self._most_of_address = most_of_address
        self._of_address: Counter[str] = Counter()
        # Connections without a request, the longest silent first.
        self._silent: dict[Connection, str] = {}
        self._num_taken = 0

    @classmethod
    def of_this_process(cls, many: Iterable[Network] = ()) -> Places:
        """As many places as the process may have files."""
        try:
            import resource
        except ImportError:  # Windows has no such limit
            return cls(many=many)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_CONNECTIONS + _RESERVED
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(soft - _RESERVED, MAX_CONNECTIONS), 16)
        return cls(most, many=many)

    def enter(self, connection: Connection, address: str) -> bool:
        """Whether there is a place for a connection. May end a silent one."""
        if self._of_address[address] >= self._most_of_address and not self._are_many(address):
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

    def _are_many(self, address: str) -> bool:
        try:
            found = ipaddress.ip_network(address)
        except ValueError:
            return False
        # On a Space everybody comes through its proxy.
        if found.is_loopback or os.environ.get("SPACE_ID"):
            return True
        return any(found.version == each.version and found.subnet_of(each) for each in self._many)  # pyright: ignore

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
    """uvicorn's connection with limits on the number of connections and on the time of both directions."""

    places: ClassVar[Places]
    _address: str | None = None
    _asking: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _num_received = 0
    _reading: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, places: Places) -> type[Connection]:
        """A class for the connections of one server."""
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
        self._num_received += len(data)
        self._await_body()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()
        # The next request may be here already.
        self._await_body()

    def _await_body(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            return
        self.places.asks(self)
        if self._sending is None and self.conn.their_state is h11.SEND_BODY:
            self._num_received = 0
            self._sending = self.loop.call_later(SENDING_TIMEOUT_S, self._end_if_stalled)

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application still answers the request before the broken bytes, which nobody reads any more.
            cycle.disconnected = True
            cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # The response has begun, or the request was HEAD, which has no response body.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = _ended(self._reading) or self.loop.call_later(READING_TIMEOUT_S, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading = _ended(self._reading)

    def end(self) -> None:
        """Ends the connection, for another to take its place."""
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
        self._sending = None
        # With reading paused, nothing arrives: then the client doesn't stall.
        is_stalled = self._num_received < SENT_BYTES and not self.flow.read_paused
        if is_stalled and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()
        else:
            self._await_body()

    def _reset(self) -> None:
        # Otherwise the system would try for minutes to send what it buffers.
        at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
