"""The chat page."""

from qwen35mm.ui.quick_import import prepare_gradio_import

prepare_gradio_import()

from qwen35mm.ui.app import build_app  # noqa: E402
from qwen35mm.ui.serving import Server, launch, serve  # noqa: E402
from qwen35mm.ui.sharing import is_shared  # noqa: E402

__all__ = ["Server", "build_app", "is_shared", "launch", "serve"]
