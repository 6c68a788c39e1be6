"""Decoders for tests, and a program for them that does what a hostile file could have it do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from qwen35mm.decoding import Decoders


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    with closing(Decoders()) as made:
        yield made
