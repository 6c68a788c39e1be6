"""A server of this machine that nobody has any business to ask: it remembers who did."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SECRET = b"a secret of this machine"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"


@dataclass
class Canary:
    """A port, and the first bytes of every connection to it."""

    port: int
    asked: list[bytes] = field(default_factory=list)


@contextmanager
def canary() -> Iterator[Canary]:
    """Listens on all of this machine's own addresses that lead to one port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Canary(listener.getsockname()[1])

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(1)
                    try:
                        found.asked.append(connection.recv(2**16))
                        connection.sendall(_ANSWER % (len(SECRET), SECRET))
                    except OSError:
                        found.asked.append(b"somebody")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
