"""Where the bundled files are: in the checkout's assets/ folder, or in share/qwen35mm of an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35mm.errors import ConfigError


def asset_path(name: str) -> Path:
    """The absolute path of a bundled file or folder, such as `demo`, `samples` or `web`.

    Raises:
        ConfigError: the installation lacks it.
    """
    checkout = Path(__file__).resolve().parent.parent / "assets" / name
    installed = Path(sys.prefix) / "share" / "qwen35mm" / name
    for path in (checkout, installed):
        if path.exists():
            return path
    raise ConfigError(f"The bundled '{name}' is missing from this installation. Install qwen35mm again.")


def demo_model_path() -> Path:
    """The folder of the bundled demo checkpoint."""
    return asset_path("demo")
