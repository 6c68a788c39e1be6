"""The chat page."""

from qwen35mm.web.serving.quick_import import prepare_gradio_import

prepare_gradio_import()

from qwen35mm.web.serving.app import build_app  # noqa: E402
from qwen35mm.web.serving.security import is_shared  # noqa: E402
from qwen35mm.web.serving.server import Server, launch, serve  # noqa: E402

__all__ = ["Server", "build_app", "is_shared", "launch", "serve"]
