"""Sources: what can be opened, and how the rest is refused."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from PIL import Image

from qwen35mm_preprocess import (
    MediaError,
    MediaFormatError,
    MediaKind,
    MediaLimitError,
    MediaLimits,
    MediaSourceError,
    describe,
    detect_kind,
)
from qwen35mm_preprocess.media import open_stream
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


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    path.touch()
    for source in (path, b"", "data:image/png;base64,", "data:,"):
        with pytest.raises(MediaSourceError, match="empty: it has 0 bytes"):
            detect_kind(source)


def test_missing_file_shows_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MediaSourceError, match=r"'nothing\.png' could not be opened: there is no such file") as caught:
        detect_kind(tmp_path / "secret" / "nothing.png")
    assert "secret" not in str(caught.value)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(MediaSourceError, match="is not a file"):
        detect_kind(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MediaSourceError, match="is not a file"):
        detect_kind(tmp_path / "pipe")


@pytest.mark.parametrize("source", ["http://127.0.0.1/x.png", "https://host/x", "file:///etc/passwd", "rtsp://h/x"])
def test_addresses_are_not_opened(source: str) -> None:
    with pytest.raises(MediaSourceError, match="address on the network"):
        detect_kind(source)


@pytest.mark.parametrize("source", ["data:image/png;base64", "data:image/png;base64,@@@@", "data:;base64,abcde"])
def test_bad_data_uris(source: str) -> None:
    with pytest.raises(MediaSourceError, match="data URI"):
        detect_kind(source)


@pytest.mark.parametrize("source", [None, 7, object()])
def test_other_types(source: object) -> None:
    with pytest.raises(MediaSourceError, match="path, bytes, a data URI or a PIL image"):
        detect_kind(source)  # type: ignore[arg-type]


def test_paths_that_no_system_takes() -> None:
    for source in ("a\0b", "x" * 5000):
        with pytest.raises(MediaSourceError, match="could not be opened") as caught:
            detect_kind(source)
        assert len(str(caught.value)) < 300


def test_byte_limit_holds_for_every_source(tmp_path: Path) -> None:
    path = tmp_path / "big.png"
    path.write_bytes(PNG)
    for source in (path, PNG, URI, "data:," + "%00" * (len(PNG))):
        exact = MediaLimits(max_image_bytes=len(PNG))
        assert len(_read(source, exact)) == len(PNG)
        with pytest.raises(MediaLimitError, match="at most"):
            _read(source, MediaLimits(max_image_bytes=len(PNG) - 1))


def test_unknown_formats_are_refused_with_what_is_read() -> None:
    with pytest.raises(MediaFormatError, match=r"expected JPEG, PNG.*MP4, MOV"):
        detect_kind(b"#EXTM3U\n")
    with pytest.raises(MediaFormatError, match="is HEIC, which is not read here"):
        detect_kind(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")


def test_damaged_gif() -> None:
    with pytest.raises(MediaError, match="damaged GIF"):
        detect_kind(b"GIF89a")


def test_names_in_messages() -> None:
    assert describe("/a/b/c.png") == describe(Path("/a/b/c.png")) == "'c.png'"
    assert describe(PNG) == "the uploaded data"
    assert describe(URI) == "the data URI"
    assert describe(Image.new("L", (1, 1))) == "the picture"
