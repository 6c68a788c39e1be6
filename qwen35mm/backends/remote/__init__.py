"""A model behind an OpenAI-compatible server, asked as one in this process is: `stream(messages, params)` -> events.

backend.py      RemoteBackend: turns, attempts, deadlines
line.py         whose turn it is
connection.py   one request over HTTP
reply.py        a streamed answer gathered into a Result
media.py        messages with their media as data: URIs
wire.py         a request's parameters, and the events of a streamed answer
faults.py       what a server can do wrong, in words for a person
retries.py      how long to wait before the next attempt
address.py      a server's address
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35mm.backends.remote.backend import RemoteBackend
    from qwen35mm.backends.remote.connection import RemoteTimeouts
    from qwen35mm.backends.remote.media import VideoMode

__all__ = ["RemoteBackend", "RemoteTimeouts", "VideoMode"]

# Imported when asked for: a process that only encodes media needs neither torch nor HTTP.
_HOMES = {"RemoteBackend": "backend", "RemoteTimeouts": "connection", "VideoMode": "media"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qwen35mm.backends.remote' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qwen35mm.backends.remote.{_HOMES[name]}"), name)
