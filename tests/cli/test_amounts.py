"""Numbers of things, in words."""

from __future__ import annotations

from qwen35mm.cli.amounts import amount


def test_one_is_singular() -> None:
    assert [amount(number, "file") for number in (0, 1, 2, 1000)] == ["0 files", "1 file", "2 files", "1,000 files"]
