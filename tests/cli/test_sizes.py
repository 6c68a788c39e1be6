from __future__ import annotations

import pytest
import typer

from qwen35mm.cli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("12B", 12),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("8GB", 8_000_000_000),
        ("512k", 512 << 10),
        ("1.5MiB", 3 << 19),
        ("0.001kB", 1),
        (" 2TiB ", 2 << 40),
    ],
)
def test_a_size(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "nan", "8 Gibi", "8GiBs", "1,5GB", "٣GB", "1.GB", "1.2345GB", "9" * 13]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 8GiB"):
        parse_size(text)
