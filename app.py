"""The chat page from a checkout, installed or not: `python app.py`, and a Hugging Face Space's entry point.

QWEN35MM_MODEL names the model (a folder or a Hub id); without it the bundled demo answers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Behind the script's own folder, in front of everything that is installed.
sys.path[1:1] = [str(Path(__file__).resolve().parent / name) for name in ("kernels", "preprocess")]


def main() -> None:
    from qwen35mm.assets import demo_model_path
    from qwen35mm.backends import LocalBackend
    from qwen35mm.errors import Qwen35mmError
    from qwen35mm.ui import launch

    try:
        backend = LocalBackend.load(os.environ.get("QWEN35MM_MODEL") or demo_model_path())
        try:
            launch(
                backend,
                host=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"),
                port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")),
            )
        finally:
            backend.close()
    except Qwen35mmError as error:
        sys.exit(f"qwen35mm: {error}")


if __name__ == "__main__":
    main()
