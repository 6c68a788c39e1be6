"""What children of `tests.forked` find imported. Nothing here may start a thread or compute: a fork takes neither."""

import gc
import pkgutil

import qwen35mm

# The first runs the command line; the other needs an optional library.
_LEFT_OUT = ("qwen35mm.__main__", "qwen35mm.captioning.ray", "qwen35mm.ray_cluster", "qwen35mm.server.cluster.replicas")

# What is imported stays: nobody needs to look for garbage in it, and no child at all.
gc.disable()
for _name in ("gradio", "transformers", *(each.name for each in pkgutil.walk_packages(qwen35mm.__path__, "qwen35mm."))):
    if not _name.startswith(_LEFT_OUT):
        __import__(_name)
gc.freeze()
gc.enable()
