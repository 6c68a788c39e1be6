"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`.

requests.py   from messages to what an engine is asked; knows no engine
local.py      LocalBackend: a model in this process
remote/       RemoteBackend: a model behind an OpenAI-compatible server
zero_gpu/     ZeroGpuBackend: replies that are GPU calls of their own

A surface imports the one that it uses: the others' libraries stay unloaded.
"""
