"""Sources: what can be opened, what it is by its content, and how the rest is refused."""

from __future__ import annotations

import base64
import contextlib
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import (
    MediaError,
    MediaKind,
    MediaLimitError,
    MediaLimits,
    MediaSourceError,
    describe,
    detect_kind,
    formats,
)
from qwen35mm_preprocess.errors import MediaFormatError
from qwen35mm_preprocess.formats import sniff
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.media import _data_uri_bytes, from_base64, open_stream
from tests.preprocess.media_files import PHOTOGRAPHS, encode_image, encode_video, scene

PNG = encode_image(Image.new("RGB", (8, 8), (200, 10, 10)), "PNG")
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


def _read(source: str | Path | bytes, limits: MediaLimits | None = None) -> bytes:
    with open_stream(source, "image", limits or MediaLimits()) as stream:
        return stream.read()


def test_every_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a picture.bin"
    path.write_bytes(PNG)
    percent = "data:," + "".join(f"%{byte:02x}" for byte in PNG)
    wrapped = URI[:60] + "\n" + URI[60:]
    for source in (path, str(path), PNG, URI, percent, wrapped):
        assert _read(source) == PNG


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (PNG, "image"),
        (URI, "image"),
        (Image.new("L", (3, 3)), "image"),
        (PHOTOGRAPHS / "no_time_for_that_tiny.gif", "video"),
        (encode_image(Image.new("L", (3, 3)), "GIF"), "image"),
        (encode_video([scene(0)], codec="mpeg4", fps=25), "video"),
    ],
)
def test_kind_by_content(source: object, kind: MediaKind) -> None:
    assert detect_kind(source) == kind  # type: ignore[arg-type]


def test_the_name_and_the_declared_type_are_not_believed(tmp_path: Path, clip: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(clip)
    assert detect_kind(path) == "video"
    assert detect_kind("data:video/mp4;base64," + base64.b64encode(PNG).decode()) == "image"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "empty: it has 0 bytes"),
        ("data:image/png;base64,", "empty: it has 0 bytes"),
        ("data:,", "empty: it has 0 bytes"),
        ("http://127.0.0.1/x.png", "address on the network"),
        ("https://host/x", "address on the network"),
        ("file:///etc/passwd", "address on the network"),
        ("rtsp://h/x", "address on the network"),
        ("data:image/png;base64", "data URI"),
        ("data:image/png;base64,@@@@", "data URI"),
        ("data:;base64,abcde", "data URI"),
        (None, "path, bytes, a data URI or a PIL image"),
        (7, "path, bytes, a data URI or a PIL image"),
        ("a\0b", "could not be opened"),
        ("x" * 5000, "could not be opened"),
        (PHOTOGRAPHS, "is not a file"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(source: Any, message: str) -> None:
    with pytest.raises(MediaSourceError, match=message) as caught:
        detect_kind(source)
    assert len(str(caught.value)) < 300


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(MediaSourceError, match="empty: it has 0 bytes"):
        detect_kind(tmp_path / "empty.png")


def test_missing_file_shows_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MediaSourceError, match=r"'nothing\.png' could not be opened: there is no such file") as caught:
        detect_kind(tmp_path / "secret" / "nothing.png")
    assert "secret" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MediaSourceError, match="is not a file"):
        detect_kind(tmp_path / "pipe")


def test_byte_limit_holds_for_every_source(tmp_path: Path) -> None:
    path = tmp_path / "big.png"
    path.write_bytes(PNG)
    for source in (path, PNG, URI, "data:," + "%00" * (len(PNG))):
        exact = MediaLimits(max_image_bytes=len(PNG))
        assert len(_read(source, exact)) == len(PNG)
        with pytest.raises(MediaLimitError, match="at most"):
            _read(source, MediaLimits(max_image_bytes=len(PNG) - 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#EXTM3U\n", r"expected JPEG, PNG.*MP4, MOV"),
        (b"GIF89a", "damaged GIF"),
    ],
)
def test_what_is_not_read_is_refused_in_words(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        detect_kind(data)


@pytest.mark.parametrize(
    ("head", "extra"), [(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heif"), (b"\xff\n\xfa\x1f", "jxl")]
)
def test_a_format_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch, head: bytes, extra: str) -> None:
    monkeypatch.setattr(formats, f"HAS_{extra.upper()}", False)
    with pytest.raises(MediaFormatError, match=rf"pip install 'qwen35mm\[{extra}\]'"):
        detect_kind(head)


def test_names_in_messages() -> None:
    assert describe("/a/b/c.png") == describe(Path("/a/b/c.png")) == "'c.png'"
    assert str(describe(PNG)) == "the uploaded data"
    assert str(describe(URI)) == "the data URI"
    assert str(describe(Image.new("L", (1, 1)))) == "the picture"


UNKNOWN = [
    b"",
    b"G",
    b"hello",
    b"#EXTM3U\n#EXT-X-VERSION:3\n",
    b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
    b"ffconcat version 1.0\nfile x.mp4\n",
    b"<?xml version='1.0'?><MPD/>",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"%PDF-1.7",
    b"RIFF\0\0\0\0WAVEfmt ",
    b"ID3\x04",
    b"OggS",
    b"BMW on a wide road",
    b"The wide road to the sea",
    b"The free seats, the skip and the bin",
]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf", "AVIF"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
        *((b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic", "HEIC") for brand in (b"heic", b"heix", b"mif1")),
        (b"\0\0\0\x08wide\0\0\x10\0mdat", "MP4/MOV"),
        # A bitmap's second header comes in several sizes.
        *(
            (b"BM" + bytes(8) + b"\x36\0\0\0" + bytes([size, 0, 0, 0]), "BMP")
            for size in (12, 40, 52, 56, 64, 108, 124)
        ),
        *((head, None) for head in UNKNOWN),
    ],
)
def test_formats_with_several_beginnings_and_none(head: bytes, name: str | None) -> None:
    found = sniff(head)
    assert (found and found.name) == name


def directory(tags: dict[int, int], order: str, following: int = 0) -> bytes:
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", following)


@pytest.mark.parametrize("order", "<>")
def test_raw_files_are_refused_by_what_is_in_them(order: str) -> None:
    start = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    # The thumbnail, a smaller one, and what the sensor saw: 2 + 12 * 3 + 4 bytes each.
    thumbnail, second = {254: 1, 256: 160, 330: 50}, {254: 1, 256: 320, 262: 2}
    sensor = {254: 0, 256: 6000, 262: 32803}
    for data in (
        start + directory(thumbnail, order) + directory(second, order),
        start + directory(second, order, 50) + directory(sensor, order),
        start + directory({256: 160, 257: 120, 50706: 1}, order),
    ):
        with pytest.raises(MediaFormatError, match=r"raw file .*\. Export it as JPEG or TIFF"):
            detect_kind(data)
        # Cut off anywhere, nothing else than an error of ours or a picture comes of it.
        for end in range(4, len(data)):
            with contextlib.suppress(MediaError):
                detect_kind(data[:end])
    # Directories that lead to each other.
    detect_kind(start + directory({256: 160, 257: 120, 330: 8}, order, 8))
    picture = Image.new("RGB", (160, 120), "teal")
    assert detect_kind(encode_image(picture, "TIFF", save_all=True, append_images=[picture])) == "image"


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"FUJIFILMCCD-RAW 0201", "Fujifilm RAF"),
        (b"IIRO\x08\0\0\0", "Olympus ORF"),
        (b"IIU\0\x18\0\0\0", "Panasonic RW2"),
        (b"II*\0\x10\0\0\0CR\2\0", "Canon CR2"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "Canon CR3"),
        (b"8BPS\0\1", "PSD"),
        (b".RMF\0\0", "RealMedia"),
    ],
)
def test_what_is_not_read_is_named(head: bytes, name: str) -> None:
    with pytest.raises(MediaFormatError, match=f"{name}.*not read here.*(Export|Convert) it"):
        detect_kind(head + bytes(64))


@pytest.mark.parametrize("format", ["PPM", "TGA", "JPEG2000"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_of_scanners_and_games(format: str, mode: str) -> None:
    picture = Image.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 50).convert(mode)
    data = encode_image(picture, format)
    assert sniff(data[: formats.HEAD_BYTES]).pillow == format  # type: ignore[union-attr]
    found = load_image(data, MediaLimits())
    np.testing.assert_allclose(np.asarray(found), np.asarray(picture.convert("RGB")), atol=1)


def test_grey_of_16_bits_in_a_pgm_is_by_its_own_maximum() -> None:
    found = load_image(b"P5 2 1 1023\n" + struct.pack(">2H", 0, 100), MediaLimits())
    assert np.asarray(found)[0, :, 0].tolist() == [0, round(100 / 1023 * 255)]


@pytest.mark.parametrize(
    "text", [b"P2 is what we drew", b"P1\nabc", b"\0\0\1\0\1\0\x10\x10\0\0\1\0 \0\x68\4\0\0", bytes(64)]
)
def test_what_begins_alike_is_none_of_them(text: bytes) -> None:
    assert sniff(text) is None


@pytest.mark.parametrize("code", ["%{:02X}", "%{:02x}"])
def test_base64_may_be_percent_encoded(code: str) -> None:
    text = base64.urlsafe_b64encode(PNG).decode() + "\r\n "
    escaped = "".join(each if each.isalnum() else code.format(ord(each)) for each in text)
    assert from_base64(escaped, len(PNG)) == PNG
    with pytest.raises(MediaSourceError, match="damaged"):
        from_base64(code.format(ord("P")) + text[1:], len(PNG))


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_long_percent_encoded_payload_is_read_in_little_memory(before: int) -> None:
    num_escapes = 200_000
    text = "a" * before + "%41" * num_escapes
    expected = b"a" * before + b"A" * num_escapes
    tracemalloc.start()
    try:
        assert _data_uri_bytes(f"data:,{text}", num_escapes + 3) == expected
        with pytest.raises(MediaSourceError, match="damaged"):
            from_base64(text, num_escapes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # `unquote` takes 48 MB.
    assert peak < 12 * len(text)
