"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`.

model_backend.py  from messages to what an engine is asked; what local.py and zero_gpu share
plain.py          the same from texts and token ids, and what is read of prompts
options.py        what they are made with, checked by its kind
turn.py           a conversation with its reply
local.py          LocalBackend: a model in this process
zero_gpu/         ZeroGpuBackend: replies that are GPU calls of their own
remote/           RemoteBackend: a model behind an OpenAI-compatible server
scripting/        what LocalBackend and RemoteBackend offer to scripts

A surface imports the one that it uses: the others' libraries stay unloaded.
"""
