"""A model behind an OpenAI-compatible server, asked as one in this process is: `stream(messages, params)` -> events.

backend.py      RemoteBackend: turns, attempts, deadlines
connection.py   one request over HTTP
wire.py         a request's parameters, and a streamed answer gathered into a Result
media.py        messages with their media as data: URIs; needs neither torch nor HTTP
faults.py       what a server can do wrong, in words for a person, and how long to wait before it is asked again
"""
