"""JSON from outside, within limits of bytes, values and depth.

A value of three bytes takes sixty in Python, so a small file could fill the memory; nested lists exhaust the recursion.
We count both in the text before parsing it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
MAX_VALUES = 1_000_000
# Far below the limits of Python's parser and pydantic (200), and above all that people write.
MAX_DEPTH = 100

_CHUNK_BYTES = 1 << 20
# How a bracket changes the depth, as a signed byte.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class JsonLimitError(ValueError):
    """A text with too many values or bytes."""


class JsonDepthError(JsonLimitError):
    """A text whose values are nested too deeply."""


def load_json(
    data: bytes | bytearray | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """Parses UTF-8 JSON.

    Raises:
        JsonLimitError: see `check_json`; or it has more bytes than `max_bytes`.
        ValueError: it isn't JSON.
    """
    if len(data) > max_bytes:
        raise JsonLimitError(f"it has more than {max_bytes:,} bytes.")
    check_json(data, max_values=max_values, max_depth=max_depth)
    # We decode UTF-8 ourselves: json.loads accepts UTF-16 bytes too, whose characters we haven't counted.
    return json.loads(data if isinstance(data, str) else data.decode("utf-8-sig"))


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> Any:
    """Parses a JSON file.

    Raises:
        OSError: it can't be read.
        ValueError: as for `load_json`.
    """
    with path.open("rb") as file:
        return load_json(file.read(max_bytes + 1), max_bytes=max_bytes, max_values=max_values)


def check_json(data: bytes | bytearray | str, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Refuses a text with too many or too deeply nested values; ignores the contents of strings.

    It doesn't check that the text is JSON.

    Raises:
        JsonLimitError: with the exceeded limit.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    # Each value but the first follows a comma or a bracket. Many texts stay below the limit even counting strings.
    num_brackets = text.count(b"[") + text.count(b"{")
    if num_brackets <= max_depth and num_brackets + text.count(b",") <= max_values:
        return
    num_marks = depth = 0
    for piece in _outside_strings(text):
        steps = piece.translate(_STEPS, _NO_BRACKETS)
        num_marks += piece.count(b",") + steps.count(1)
        if num_marks > max_values:
            raise JsonLimitError(f"it holds more than {max_values:,} values.")
        depths = list(itertools.accumulate(memoryview(steps).cast("b"), initial=depth))
        if min(depths) < 0 or max(depths) > max_depth:
            raise JsonDepthError(f"it is nested more than {max_depth} deep, or closes what isn't open.")
        depth = depths[-1]


def num_values(text: bytes) -> int:
    """About how many values a text has, as `check_json` counts them."""
    return sum(piece.count(b",") + piece.count(b"[") + piece.count(b"{") for piece in _outside_strings(text))


def num_objects(text: bytes | bytearray) -> int:
    """How many objects a text has."""
    return sum(piece.count(b"{") for piece in _outside_strings(text))


def _outside_strings(text: bytes | bytearray) -> Iterator[bytes]:
    """The text without its quoted strings, a chunk at a time."""
    is_inside, carried = False, b""
    for start in range(0, len(text), _CHUNK_BYTES):
        piece = (carried + text[start : start + _CHUNK_BYTES]).replace(b"\\\\", b"")
        # A trailing backslash escapes a character of the next chunk.
        carried = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
