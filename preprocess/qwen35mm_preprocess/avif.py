"""What Pillow doesn't take from an AVIF: the part to show, and properties in several boxes.

The part is the clean aperture (`clap`; ISO/IEC 14496-12, 12.1.4).

Pillow itself handles rotation and mirroring, and libheif crops a HEIC. libheif and libvips crop an AVIF; Chromium 156
does so only if the part begins at the top left, and else shows the whole picture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import BinaryIO, NamedTuple

# Metadata is small, except for Exif and profiles, which it may contain.
_MAX_META_BYTES = 1 << 24

Box = tuple[int, int, int, int]


class _Part(NamedTuple):
    """A box of the file: its name and where its content lies."""

    name: bytes
    start: int
    end: int


def clean_aperture(stream: BinaryIO, width: int, height: int) -> Box | None:
    """(left, top, right, bottom) of the stored picture's shown part.

    None if the whole picture is shown, or if the box isn't inside the picture or not in whole pixels. Restores the
    stream's position.
    """
    before = stream.tell()
    try:
        meta = _meta(stream)
        numbers = None if meta is None else _primary_property(meta, b"clap")
        return None if numbers is None else _box(struct.unpack_from(">4IiIiI", numbers), width, height)
    except (ValueError, OSError, IndexError, struct.error, ZeroDivisionError):
        return None
    finally:
        stream.seek(before)


def with_one_association(data: bytes) -> bytes | None:
    """The file with its `ipma` boxes of one version joined; None if there aren't several.

    ISO/IEC 23008-12 allows one, and libavif refuses more. Older encoders wrote one an item, so one for the alpha plane.
    No other box moves: `free` takes the room that is saved.
    """
    meta = next((part for part in _parts(data, 0, len(data)) if part.name == b"meta"), None)
    inside = _parts(data, meta.start + 4, meta.end) if meta else ()
    around = next((part for part in inside if part.name == b"iprp"), None)
    if around is None:
        return None
    parts = list(_parts(data, around.start, around.end))
    joined = [part for part in parts if part.name == b"ipma"]
    kinds = {data[part.start : part.start + 4] for part in joined}
    if len(joined) < 2 or len(kinds) > 1 or any(part.end < part.start + 8 for part in joined):
        return None
    number = sum(struct.unpack_from(">I", data, part.start + 4)[0] for part in joined)
    entries = b"".join(data[part.start + 8 : part.end] for part in joined)
    others = b"".join(data[part.start - 8 : part.end] for part in parts if part.name != b"ipma")
    content = others + _boxed(b"ipma", kinds.pop() + struct.pack(">I", number) + entries)
    saved = around.end - around.start - len(content) - 8
    return data[: around.start - 8] + _boxed(b"iprp", content) + _boxed(b"free", bytes(saved)) + data[around.end :]


def _boxed(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", len(content) + 8, name) + content


def _box(numbers: tuple[int, ...], width: int, height: int) -> Box | None:
    wide, high, right_by, down_by = (Fraction(*numbers[at : at + 2]) for at in range(0, 8, 2))
    left, top = right_by + (width - wide) / 2, down_by + (height - high) / 2
    edges = left, top, left + wide, top + high
    is_part = 0 <= left < left + wide <= width and 0 <= top < top + high <= height
    if not is_part or any(edge.denominator != 1 for edge in edges) or (wide, high) == (width, height):
        return None
    return int(edges[0]), int(edges[1]), int(edges[2]), int(edges[3])


def _meta(stream: BinaryIO) -> bytes | None:
    """The content of the file's `meta` box without its version."""
    stream.seek(0)
    while len(head := stream.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        if name == b"meta":
            return stream.read(min(size - 8, _MAX_META_BYTES))[4:]
        if size == 1:
            size = struct.unpack(">Q", stream.read(8))[0] - 8
        if size < 8:
            return None
        stream.seek(size - 8, 1)
    return None


def _parts(data: bytes, start: int, end: int) -> Iterator[_Part]:
    while start + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, start)
        if not 8 <= size <= end - start:
            return
        yield _Part(name, start + 8, start + size)
        start += size


def _primary_property(meta: bytes, wanted: bytes) -> bytes | None:
    """The primary picture's property of this name (ISO/IEC 23008-12, 9.3)."""
    top = {part.name: part for part in _parts(meta, 0, len(meta))}
    if b"pitm" not in top or b"iprp" not in top:
        return None
    start = top[b"pitm"].start
    primary = struct.unpack_from(">I" if meta[start] else ">H", meta, start + 4)[0]
    about = list(_parts(meta, top[b"iprp"].start, top[b"iprp"].end))
    properties = [part for box in about if box.name == b"ipco" for part in _parts(meta, box.start, box.end)]
    for box in about:
        for number in _numbers(meta, box, primary) if box.name == b"ipma" else ():
            if 0 < number <= len(properties) and properties[number - 1].name == wanted:
                return meta[properties[number - 1].start : properties[number - 1].end]
    return None


def _numbers(meta: bytes, box: _Part, item: int) -> Iterator[int]:
    """The numbers of an item's properties, from 1, in an `ipma` box."""
    version, is_wide = meta[box.start], bool(meta[box.start + 3] & 1)
    id_form = ">I" if version else ">H"
    number_form, mask = (">H", 0x7FFF) if is_wide else (">B", 0x7F)
    at = box.start + 8
    while at < box.end:
        found = struct.unpack_from(id_form, meta, at)[0]
        at += struct.calcsize(id_form)
        count = meta[at]
        at += 1
        for _ in range(count):
            if found == item:
                yield struct.unpack_from(number_form, meta, at)[0] & mask
            at += struct.calcsize(number_form)
