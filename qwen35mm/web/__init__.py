"""The chat page."""

from qwen35mm.web.quick_import import prepare_gradio_import

prepare_gradio_import()

from qwen35mm.web.app import build_app  # noqa: E402
from qwen35mm.web.serving import Server, launch, serve  # noqa: E402
from qwen35mm.web.sharing import is_shared  # noqa: E402

__all__ = ["Server", "build_app", "is_shared", "launch", "serve"]
