"""Serves the page over the fake backend, whose "slow" never ends: `python -m tests.web.endless_child DATA_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35mm.web import launch
from tests.chat.fake_backend import FakeBackend

launch(FakeBackend(), port=0, data_dir=Path(sys.argv[1]))
