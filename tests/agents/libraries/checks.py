"""Runs a library's checks against a server, and prints as JSON what each came to: null, or how it failed.

Runs in the library's own environment: it imports nothing of this repository.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import traceback
import zlib
from collections.abc import Callable

BASE = sys.argv[1] if len(sys.argv) > 1 else ""
MODEL = "demo"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": CITY}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = "word " * 40_000


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png() -> str:
    """A red square of 64 pixels, as base64."""
    rows = (b"\0" + b"\xd0\x20\x20" * 64) * 64
    head = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def error_of(call: Callable[[], object]) -> Exception:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("there was no error")


def run(*checks: Callable[[], object]) -> None:
    """Each check takes its turn; one that raises has failed."""
    wanted = sys.argv[2:]
    found: dict[str, str | None] = {}
    for check in checks:
        if wanted and check.__name__ not in wanted:
            continue
        try:
            check()
            found[check.__name__] = None
        except BaseException as error:
            found[check.__name__] = "".join(traceback.format_exception(error))[-3000:]
    print("\n" + json.dumps(found))
