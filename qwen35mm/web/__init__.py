"""The chat page, with the libraries of the extra `chat`."""

import inspect
import sys
from typing import Any

from qwen35mm.errors import MissingExtraError


def _import_gradio() -> None:
    """In about half its time.

    While Gradio is imported, it parses and writes type stubs for each of its components again (`create_or_modify_pyi`
    in gradio/component_meta.py, 6.31): of use to editors only. It has no switch for that, but leaves classes alone
    that are of no file.
    """
    file_of = inspect.getfile

    def of_no_file(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError
        return file_of(thing)

    inspect.getfile = of_no_file
    try:
        import gradio  # noqa: F401
    finally:
        inspect.getfile = file_of


try:
    if "gradio" not in sys.modules:
        _import_gradio()
    from qwen35mm.web.serving.app import build_app
    from qwen35mm.web.serving.security import is_shared
    from qwen35mm.web.serving.server import Server, launch, serve
except ModuleNotFoundError as error:
    raise MissingExtraError("The chat page", "chat") from error

__all__ = ["Server", "build_app", "is_shared", "launch", "serve"]
