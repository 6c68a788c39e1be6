"""Trees of small media for the scan's tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from qwen35mm.captioning.items import Item, Unreadable
from tests.preprocess.media_files import encode_image

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


def write(root: Path, *names: str, data: bytes = PNG) -> None:
    """Files with the same bytes."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(found: Iterable[Item | Unreadable]) -> list[str]:
    """The items' names; what is Unreadable with an exclamation mark before it."""
    return [f"!{each.name}" if isinstance(each, Unreadable) else each.name for each in found]
