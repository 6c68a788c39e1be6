"""A model behind an OpenAI-compatible server, used like one in this process: `stream(request)` yields events.

backend.py      RemoteBackend: turns, attempts, events
pool.py         RemotePool: several servers with the same model as one
attempts.py     when to repeat a request
served.py       the model behind an address: its name, and what is known about it
programs.py     server programs: how to recognize each, and what it can do
texts.py        texts and token ids without a template: continued, scored, embedded
logprobs.py     log probabilities, in either of OpenAI's forms
counting.py     tokens of a conversation, counted by the server or estimated
request.py      the fields of a request
media.py        messages with their media as data: URIs; needs neither torch nor HTTP
connection.py   one request over HTTP
sse.py          reads server-sent events from bytes
reply.py        a streamed answer: chunks for the caller, and a Result
deadline.py     how long a server may take, and be silent
faults.py       what a server can do wrong, and how long to wait before the next attempt
words.py        the messages about that for a person
"""
