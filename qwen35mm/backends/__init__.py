"""Backends: `stream(request)` yields events up to `Finished`, whatever computes the answer.

model_backend.py  from messages to an engine's request; shared by local.py and zero_gpu
plain.py          the same for texts and token ids; also scores and embeddings
options.py        checks the constructors' options
history.py        a conversation with its new reply
engine_pool.py    several engines as one: least busy first, and elsewhere if one dies
local.py          LocalBackend: a model in this process; its texts in local_texts.py
shelf.py          several models of this process: loaded on demand, lent to requests, unloaded for others
zero_gpu/         ZeroGpuBackend: each reply is a GPU call
remote/           RemoteBackend: a model behind an OpenAI-compatible server
scripting/        methods of LocalBackend and RemoteBackend for scripts

Import only the backend that you use: the libraries of the others stay unloaded.
"""
