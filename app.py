"""Starts the chat page from a checkout, installed or not: `python app.py`; a Hugging Face Space's entry point.

It is `qwen35mm chat` with all settings from the environment: qwen35mm/settings.py lists the variables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# After the script's own folder, before everything installed.
sys.path[1:1] = [str(Path(__file__).resolve().parent / name) for name in ("kernels", "preprocess")]


def _arguments() -> list[str]:
    """The address, from the Gradio variables that a Space sets; the other settings have our own variables."""
    said = {"--host": os.environ.get("GRADIO_SERVER_NAME"), "--port": os.environ.get("GRADIO_SERVER_PORT")}
    return [word for option, value in said.items() if value for word in (option, value)]


def _build_for_a_space() -> None:
    """Compiles the CPU operations on a Hugging Face Space, which installs packages but not this project."""
    if "SPACE_ID" not in os.environ or any(Path(__file__).parent.rglob("native/*.so")):
        return
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=Path(__file__).parent, check=False).returncode:
        print("The operations for processors couldn't be built: PyTorch does their work, slowly.", file=sys.stderr)


if __name__ == "__main__":
    from qwen35mm.cli import main

    _build_for_a_space()
    main(["chat", *_arguments()])
