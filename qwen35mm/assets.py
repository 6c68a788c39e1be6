"""Where the bundled files are: in the checkout's folders, or in an installed wheel's share/qwen35mm."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35mm.errors import ConfigError


def asset_path(name: str) -> Path:
    """The absolute path of a bundled file or folder, such as `demo`, `samples` or `web`.

    Raises:
        ConfigError: the installation lacks it.
    """
    return _find(f"assets/{name}", name)


def example_path(name: str) -> Path:
    """The absolute path of an example, such as `gradio_chat.py`. Raises ConfigError like `asset_path`."""
    return _find(f"examples/{name}", f"examples/{name}")


def demo_model_path() -> Path:
    """The folder of the bundled demo checkpoint."""
    return asset_path("demo")


def _find(in_checkout: str, name: str) -> Path:
    checkout = Path(__file__).resolve().parent.parent / in_checkout
    installed = Path(sys.prefix) / "share" / "qwen35mm" / name
    for path in (checkout, installed):
        if path.exists():
            return path
    raise ConfigError(f"The bundled '{name}' is missing from this installation. Install qwen35mm again.")
