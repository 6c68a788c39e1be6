"""The chat page, with the libraries of the extra `chat`."""

from importlib.util import find_spec

from qwen35mm.errors import MissingExtraError
from qwen35mm.web.serving.quick_import import prepare_gradio_import

if find_spec("gradio") is None:
    raise MissingExtraError("The chat page", "chat")
prepare_gradio_import()

from qwen35mm.web.serving.app import build_app  # noqa: E402
from qwen35mm.web.serving.security import is_shared  # noqa: E402
from qwen35mm.web.serving.server import Server, launch, serve  # noqa: E402

__all__ = ["Server", "build_app", "is_shared", "launch", "serve"]
