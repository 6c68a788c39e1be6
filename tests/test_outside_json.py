"""JSON from outside: refused by what it would be as values, before it is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.outside_json import MAX_DEPTH, MAX_VALUES, JsonLimitError, check_json, load_json, read_json

TEXTS = ["", "a", ",[{", '"', "\\", '\\"', '"]}],[{\\', "é中😀", "\n\t\x00", "\u2022\u2c22"]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind < 5:
        return [None, 1.5, rng.choice(TEXTS), "".join(rng.choices(TEXTS, k=4)), True][kind]
    items = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return items if kind == 5 else {rng.choice(TEXTS) + str(at): item for at, item in enumerate(items)}


def num_values(found: Any) -> int:
    items = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return 1 + sum(map(num_values, items))


def depth_of(found: Any) -> int:
    if not isinstance(found, dict | list):
        return 0
    return 1 + max(map(depth_of, found.values() if isinstance(found, dict) else found), default=0)


# So that quotes and what they escape lie in two pieces.
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1 << 20])
def test_what_is_within_the_limits_is_read_and_nothing_else(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.outside_json._CHUNK_BYTES", chunk_bytes)
    for seed in range(40):
        check_limits(random.Random(seed))


def check_limits(rng: random.Random) -> None:
    found = value(rng, 5)
    text = json.dumps(found, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    # Brackets count as a value, and what stands in them as one more, less one for what is first in them.
    most = 2 * num_values(found)
    for data in (text, text.encode()):
        assert load_json(data, max_values=most, max_depth=depth_of(found)) == found
        if depth_of(found) > 1:
            with pytest.raises(JsonLimitError):
                load_json(data, max_values=most, max_depth=depth_of(found) - 1)
        if num_values(found) > 2:
            with pytest.raises(JsonLimitError):
                load_json(data, max_values=(num_values(found) - 1) // 2, max_depth=100)


@pytest.mark.parametrize(
    "data",
    [
        "[" + "0," * MAX_VALUES + "0]",
        "[" + "[]," * MAX_VALUES + "0]",
        "[" * (MAX_VALUES + 1),
        '{"a":[' + '{"":0},' * MAX_VALUES + "0]}",
        nested(MAX_DEPTH + 1),
        '{"a":' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1),
        "[" * 100_000,
        "]" * (MAX_DEPTH + 1) + nested(MAX_DEPTH + 1),
        "[" * (MAX_DEPTH + 1) + "]" * (4 << 20),
        "[" * MAX_DEPTH + "[]" + "]" * (4 << 20),
        "[]" * (MAX_DEPTH + 1) + "}" * (4 << 20),
    ],
    ids=[
        "numbers",
        "lists",
        "open",
        "objects",
        "depth",
        "objects in objects",
        "unclosed",
        "closed first",
        *("ends", "deep ends", "ends of objects"),
    ],
)
def test_bombs(data: str) -> None:
    with pytest.raises(JsonLimitError, match=r"it (holds more than|is nested more than) [0-9,]+"):
        check_json(data.encode())
    with pytest.raises(ValueError, match="it "):
        load_json(data)


def test_long_texts_are_no_bombs() -> None:
    text = json.dumps(["," * MAX_VALUES, "[" * MAX_VALUES, "\\{" * MAX_VALUES, '"' * MAX_VALUES])
    assert len(load_json(text)) == 4
    assert load_json(nested(MAX_DEPTH)) is not None


@pytest.mark.parametrize("data", [b"", b"{", b"[1,]", b"\xff", '["a"]'.encode("utf-16"), b"1" * 10_000, "\udc80"])
def test_no_json(data: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting|Invalid|decode|Exceeds|delimiter"):
        load_json(data)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(JsonLimitError, match="more than 10 bytes"):
        read_json(path, max_bytes=10)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json")
