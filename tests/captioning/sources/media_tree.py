"""Trees of small media for the scan's tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from tests.preprocess.media_files import encode_image

ALL = ScanOptions()
PNG = encode_image(Image.new("RGB", (4, 4), (200, 10, 10)), "PNG")
JPEG = encode_image(Image.new("RGB", (4, 4), (10, 200, 10)), "JPEG")
GIF = encode_image(Image.new("P", (4, 4), 3), "GIF")
MOVING_GIF = encode_image(
    Image.new("RGB", (4, 4), (9, 9, 9)),
    "GIF",
    save_all=True,
    append_images=[Image.new("RGB", (4, 4), (200, 9, 9))],
    duration=100,
)
# Its first bytes are an MP4's; nothing more of it is read here.
MP4 = b"\0\0\0\x18ftypisom\0\0\0\0isommp42"
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
PSD = b"8BPS\0\1"


def write(root: Path, *names: str, data: bytes = PNG) -> None:
    """Files with the same bytes."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def lock(monkeypatch: pytest.MonkeyPatch, *locked: str) -> None:
    """Files and folders of these names may not be read, nor anything that lies in the folders."""
    for owner, function in ((Path, "open"), (Path, "stat"), (os, "scandir")):
        real = getattr(owner, function)

        def refusing(path: Path, *args: Any, real: Any = real, function: str = function, **named: Any) -> Any:
            if path.parent.name in locked or (path.name in locked and function != "stat"):
                raise PermissionError(13, "Permission denied")
            return real(path, *args, **named)

        monkeypatch.setattr(owner, function, refusing)


def scanned(*sources: Path | str, options: ScanOptions = ALL) -> list[str]:
    return names(scan(sources, options))


def items(*sources: Path | str, options: ScanOptions = ALL) -> list[Item]:
    return [each for each in scan(sources, options) if isinstance(each, Item)]


def unreadable(*sources: Path | str, options: ScanOptions = ALL) -> dict[str, str]:
    return {each.name: each.kind for each in scan(sources, options) if isinstance(each, Unreadable)}


def names(found: Iterable[Item | Unreadable]) -> list[str]:
    """The items' names; what is Unreadable with an exclamation mark before it."""
    return [f"!{each.name}" if isinstance(each, Unreadable) else each.name for each in found]
