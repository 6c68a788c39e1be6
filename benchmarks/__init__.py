"""Speed, ours and others' in one run: `python -m benchmarks.NAME`, from a checkout, installed or not."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Behind the checkout itself, which is the first.
sys.path[1:1] = [str(ROOT / "kernels"), str(ROOT / "preprocess")]
