"""Names for outputs: short enough, inside, and fit for every system."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis.strategies import binary, sampled_from, text

from qwen35mm.captioning.outputs.file_names import fit, fold, parts_inside, portable


@pytest.mark.parametrize("letter", ["x", "é", "猫", "🐈"])
def test_a_long_name_is_cut_between_letters(letter: str) -> None:
    for count in range(60, 260):
        name = fit(letter * count, ".txt")
        assert len(name.encode()) <= 255, "and it can be encoded"
        assert name.endswith(".txt")
        assert (name == letter * count + ".txt") == (len(letter.encode()) * count <= 251)


def test_long_names_stay_apart() -> None:
    assert fit("x" * 300 + "a", ".txt") != fit("x" * 300 + "b", ".txt")


@given(binary(max_size=400).map(os.fsdecode), sampled_from([".txt", ".caption"]))
def test_any_bytes_fit(stem: str, suffix: str) -> None:
    name = fit(stem, suffix)
    assert len(os.fsencode(name)) <= 255
    assert name.endswith(suffix)


@given(text(alphabet="a./\\\x00\n", max_size=30))
def test_no_part_leads_out(name: str) -> None:
    parts = parts_inside(name)
    assert parts
    assert all(part not in ("", ".", "..") and "/" not in part and "\x00" not in part for part in parts)


@given(binary(max_size=60).map(os.fsdecode))
def test_portable_names(name: str) -> None:
    part = portable(name)
    assert part
    assert part.isprintable()
    assert not set(part) & set('<>:"\\|?*\x00')
    assert not part.startswith(".")
    assert not part.endswith((".", " "))


@pytest.mark.parametrize(("one", "other"), [("A.TXT", "a.txt"), ("\u00e9", "e\u0301"), ("STRASSE", "straße")])
def test_folded_names_are_one(one: str, other: str) -> None:
    assert fold(one) == fold(other)


@pytest.mark.parametrize("name", ["con", "NUL.txt", "com1.a.b"])
def test_reserved_names_are_changed(name: str) -> None:
    assert portable(name) == f"_{name}"
