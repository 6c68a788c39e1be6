"""What children of `tests.forked` find imported. Nothing here may start a thread or compute: a fork takes neither."""

import pkgutil

import gradio  # noqa: F401
import transformers  # noqa: F401

import qwen35mm

# The first runs the command line; the other needs an optional library.
_LEFT_OUT = ("qwen35mm.__main__", "qwen35mm.captioning.ray")

for _found in pkgutil.walk_packages(qwen35mm.__path__, "qwen35mm."):
    if not _found.name.startswith(_LEFT_OUT):
        __import__(_found.name)
