"""The Python API for scripts: chats and batches, in programs with and without an event loop.

model.py    ScriptedModel: methods of LocalBackend and RemoteBackend besides `stream`
texts.py    TextModel: texts and token ids without a template; LocalTexts implements it for a model in this process
chat.py     Chat: one conversation, with its messages and media plans
replies.py  answers as they arrive: a ReplyStream's text, and the Results of many prompts
forms.py    turns what a person may write into messages and parameters
loop.py     the event loop for all of it, in its own thread
"""
