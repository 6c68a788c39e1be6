"""The chat page, with the libraries of the extra `chat`."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from qwen35mm.errors import MissingExtraError


def _import_gradio() -> None:
    """In about a third of its time.

    While Gradio is imported, it parses and writes type stubs for each of its components again (`create_or_modify_pyi`
    in gradio/component_meta.py, 6.31): of use to editors only. It has no switch for that, but leaves classes alone
    that are of no file. And it imports pandas, which hashes what an app has cached; we have it cache nothing.
    """
    file_of = inspect.getfile

    def of_no_file(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError
        return file_of(thing)

    inspect.getfile = of_no_file
    pandas = sys.modules.setdefault("pandas", _WhenUsed("pandas"))
    try:
        import gradio  # noqa: F401
    finally:
        inspect.getfile = file_of
        if isinstance(pandas, _WhenUsed):
            # Whoever imports it from now on gets the real one.
            del sys.modules["pandas"]


class _WhenUsed(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


try:
    if "gradio" not in sys.modules:
        _import_gradio()
    from qwen35mm.web.serving.app import build_app
    from qwen35mm.web.serving.server import Server, launch, serve
except ModuleNotFoundError as error:
    raise MissingExtraError("The chat page", "chat") from error

__all__ = ["Server", "build_app", "launch", "serve"]
