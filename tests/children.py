"""The surroundings of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with the packages of this repository, whatever is installed; `more` replaces some."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "preprocess"))
    # A model this small gains nothing from threads, and on a busy machine they wait for each other.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
