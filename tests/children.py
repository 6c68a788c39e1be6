"""The surroundings of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with the packages of this repository, whatever is installed; `more` replaces some."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "preprocess"))
    return {**os.environ, "PYTHONPATH": path, **more}
