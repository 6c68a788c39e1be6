"""The chat page from a checkout, installed or not: `python app.py`, and a Hugging Face Space's entry point.

Everything is set by environment variables; `qwen35mm.space.SpaceSettings` lists them. On ZeroGPU each reply is a GPU
call of its own, elsewhere the model computes in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Behind the script's own folder, in front of everything that is installed.
sys.path[1:1] = [str(Path(__file__).resolve().parent / name) for name in ("kernels", "preprocess")]


def main() -> None:
    from qwen35mm.errors import MediaError, Qwen35mmError
    from qwen35mm.space import zero_gpu

    try:
        # `spaces` comes before everything that might touch CUDA.
        gpu = zero_gpu(os.environ)
        from qwen35mm.web import launch

        with _open_backend(gpu) as (backend, options):
            launch(backend, **options)
    except (Qwen35mmError, MediaError) as error:
        sys.exit(f"qwen35mm: {error}")


@contextlib.contextmanager
def _open_backend(gpu: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    from qwen35mm.cli.folders import user_cache_folder
    from qwen35mm.space import SpaceSettings, open_backend
    from qwen35mm.web import is_shared

    settings = SpaceSettings.from_environment(os.environ, is_shared=is_shared)
    with open_backend(settings, gpu, user_cache_dir=user_cache_folder()) as backend:
        yield backend, settings.page_options()


def __getattr__(name: str) -> Any:
    """`demo`, for what imports this file to find its Blocks: the model is loaded, and they are served, when it asks."""
    if name != "demo":
        raise AttributeError(f"module 'app' has no attribute {name!r}")
    from qwen35mm.space import zero_gpu

    gpu = zero_gpu(os.environ)
    from qwen35mm.web import serve

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    backend, options = stack.enter_context(_open_backend(gpu))
    server = serve(backend, **options)
    stack.callback(server.close)
    globals()["demo"] = server.app
    return server.app


if __name__ == "__main__":
    main()
