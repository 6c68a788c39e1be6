"""A model behind an OpenAI-compatible server, asked as one in this process is: `stream(messages, params)` -> events.

backend.py      RemoteBackend: turns, attempts, events
attempts.py     when a request is made again
served.py       the model behind an address: its name, and what is known of it
programs.py     what servers tell of themselves, and what can be asked of each kind
texts.py        texts and token ids without a template: gone on with, scored, embedded
logprobs.py     how likely tokens are, in either of OpenAI's forms
counting.py     tokens of a conversation, counted by the server or estimated
request.py      what goes out: the fields of a request
media.py        messages with their media as data: URIs; needs neither torch nor HTTP
connection.py   one request over HTTP
sse.py          server-sent events out of bytes
reply.py        a streamed answer: pieces for whoever waits, and a Result
deadline.py     how long a server may take, and be silent
faults.py       what a server can do wrong, and how long to wait before it is asked again
words.py        what a person is told of that
"""
