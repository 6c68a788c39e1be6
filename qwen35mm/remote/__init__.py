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

from qwen35mm.remote.backend import RemoteBackend
from qwen35mm.remote.connection import RemoteTimeouts
from qwen35mm.remote.media import VideoMode

__all__ = ["RemoteBackend", "RemoteTimeouts", "VideoMode"]
