"""The Python API for scripts: a chat in a line, many answers in one, in programs with an event loop and without.

model.py    ScriptedModel: what LocalBackend and RemoteBackend offer besides `stream`
texts.py    TextModel: what backends do with texts and token ids, without a template; LocalTexts does it here
chat.py     Chat: one conversation, which keeps its messages and how its media were read
replies.py  answers while they come: a ReplyStream's text, and the Results of many prompts
forms.py    what a person may write, as messages and parameters
loop.py     the event loop, in a thread of its own, that all of it runs on
"""
