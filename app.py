"""The chat page from a checkout, installed or not: `python app.py`, and a Hugging Face Space's entry point.

QWEN35MM_MODEL names the model (a folder or a Hub id); without it the bundled demo answers. QWEN35MM_CACHE_DIR names the
folder of the disk cache; without it that is the user's cache folder, and none at all where people share the page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Behind the script's own folder, in front of everything that is installed.
sys.path[1:1] = [str(Path(__file__).resolve().parent / name) for name in ("kernels", "preprocess")]


def main() -> None:
    from qwen35mm.cli.folders import user_cache_folder
    from qwen35mm.cli.options import ModelOptions
    from qwen35mm.errors import Qwen35mmError
    from qwen35mm.ui import is_shared, launch

    host = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    cache_dir = os.environ.get("QWEN35MM_CACHE_DIR")
    options = ModelOptions(
        model=os.environ.get("QWEN35MM_MODEL") or None, cache_dir=Path(cache_dir) if cache_dir else None
    )
    try:
        # What strangers say is nobody's to keep, and their caches can't be found again once their pages are gone.
        backend = options.load(default_cache_dir=None if is_shared(host) else user_cache_folder())
        try:
            launch(backend, host=host, port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")))
        finally:
            backend.close()
    except Qwen35mmError as error:
        sys.exit(f"qwen35mm: {error}")


if __name__ == "__main__":
    main()
