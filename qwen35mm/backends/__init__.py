"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`.

model_backend.py  from messages to what an engine is asked; what the next two share
local.py          LocalBackend: a model in this process
zero_gpu/         ZeroGpuBackend: replies that are GPU calls of their own
remote/           RemoteBackend: a model behind an OpenAI-compatible server

A surface imports the one that it uses: the others' libraries stay unloaded.
"""
