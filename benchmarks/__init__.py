"""Measure speed and memory, of ours and of others in one run: `python -m benchmarks.NAME` from a checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For a checkout that isn't installed.
sys.path[1:1] = [str(ROOT / "kernels"), str(ROOT / "preprocess")]
