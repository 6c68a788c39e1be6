"""A video can open nothing but its own bytes, and only the codecs that are read here."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import pytest
from PIL import Image

from qwen35mm_preprocess import (
    MediaDecodeError,
    MediaError,
    MediaFormatError,
    MediaKind,
    MediaLimits,
    MediaProcessor,
    MediaSource,
    video_container,
)
from qwen35mm_preprocess.formats import MediaFormat
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_container import open_video
from qwen35mm_preprocess.video_probe import probe_video
from tests.preprocess.media_files import LIMITS, encode_image, encode_sound, encode_video, scene

PICTURE = Image.new("RGB", (40, 40))


@pytest.fixture
def port() -> Iterator[int]:
    """Of a real server on 127.0.0.1, at which nobody may have come when the test ends."""
    visitors = []

    class Visit(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            visitors.append(self.client_address)

    with socketserver.TCPServer(("127.0.0.1", 0), Visit) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        port = server.server_address[1]
        yield port
        # A last visit proves that the count works.
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert connection.recv(1) == b""
        server.shutdown()
    assert len(visitors) == 1


@pytest.fixture
def canary(tmp_path: Path, clip: bytes) -> Path:
    """A video that a playlist may name."""
    path = tmp_path / "canary.mp4"
    path.write_bytes(clip)
    return path


def _playlists(port: int, canary: Path) -> dict[str, tuple[str, bytes]]:
    """Files that make libav open other things: name to (demuxer, content)."""
    address = f"http://127.0.0.1:{port}/x.ts"
    hls = "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{}\n#EXT-X-ENDLIST\n"
    sdp = (
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        f"m=video {port} RTP/AVP/TCP 96\na=rtpmap:96 H264/90000\n"
    )
    return {
        "hls-socket": ("hls", hls.format(address).encode()),
        "hls-file": ("hls", hls.format(canary).encode()),
        "concat-socket": ("concat", f"ffconcat version 1.0\nfile '{address}'\n".encode()),
        "concat-file": ("concat", f"ffconcat version 1.0\nfile '{canary}'\n".encode()),
        "sdp": ("sdp", sdp.encode()),
    }


NAMES = ["hls-socket", "hls-file", "concat-socket", "concat-file", "sdp"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [None, "video"])
def test_a_playlist_renamed_mp4_is_refused(
    name: str, kind: MediaKind | None, tmp_path: Path, canary: Path, port: int, processor: MediaProcessor
) -> None:
    path = tmp_path / "holiday.mp4"
    path.write_bytes(_playlists(port, canary)[name][1])
    with pytest.raises(MediaFormatError, match="not an image or a video"):
        processor.prepare(path, kind=kind)


@pytest.mark.parametrize("name", NAMES)
def test_even_a_playlist_demuxer_reaches_nothing(
    name: str, canary: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walls behind the first: were content ever to choose such a demuxer, it still could not open a thing."""
    demuxer, content = _playlists(port, canary)[name]
    found = MediaFormat(name, "video", "video/mp4", (".mp4",), libav=demuxer)
    monkeypatch.setattr(video_container, "read_format", lambda stream, source: found)
    with pytest.raises(MediaError):
        probe_video(content, LIMITS)


@pytest.mark.parametrize("name", ["hls-file", "concat-file"])
def test_the_canary_sings_without_the_walls(name: str, tmp_path: Path, canary: Path) -> None:
    """libav does follow these files when it may: the tests above would notice a wall that is gone."""
    demuxer, content = _playlists(1, canary)[name]
    path = tmp_path / "list.txt"
    path.write_bytes(content)
    options = {"safe": "0", "allowed_extensions": "ALL", "allowed_segment_extensions": "ALL", "extension_picky": "0"}
    with av.open(str(path), format=demuxer, options=options) as container:
        assert len(list(container.demux(video=0))) > 20


@pytest.mark.parametrize("other", ["matroska", "gif", "mpegts"])
def test_content_decides_the_demuxer(other: str, tmp_path: Path) -> None:
    codec = {"matroska": "mpeg4", "gif": "gif", "mpegts": "mpeg2video"}[other]
    path = tmp_path / "renamed.mp4"
    path.write_bytes(encode_video([scene(0), scene(1)], container=other, codec=codec, fps=25))
    with open_video(path, LIMITS) as video:
        assert video.container.format.name == other


def test_a_title_that_is_not_utf8() -> None:
    """In the place of the encoder's name, which is written into the header."""
    data = encode_video([scene(0)], container="matroska", codec="mpeg4")
    assert b"Lavf" in data
    assert probe_video(data.replace(b"Lavf", b"T\xfcr\xff"), LIMITS).num_frames == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encode_sound("mp4", "aac"), r"holds sound only.*Choose a file with a video track"),
        (lambda: encode_sound("matroska", "aac"), r"holds sound only.*Choose a file with a video track"),
        (
            lambda: encode_video([scene(0), scene(1)], container="matroska", codec="snow"),
            "encoded with snow, which is not read here",
        ),
        (lambda: encode_image(PICTURE, "PNG"), r"is an image \(PNG\) where a video was expected"),
        (lambda: PICTURE, "PIL image was given as a video"),
    ],
)
def test_what_is_no_video_is_refused_in_words(
    make: Callable[[], MediaSource], message: str, processor: MediaProcessor
) -> None:
    with pytest.raises(MediaFormatError, match=message):
        processor.plan(make(), kind="video")


def test_index_cut_off(clip: bytes, processor: MediaProcessor) -> None:
    with pytest.raises(MediaDecodeError, match="its index could not be read"):
        processor.plan(clip[: len(clip) // 2])


def test_pixels_of_a_frame_are_limited_in_the_decoder(clip: bytes) -> None:
    """Where a header lies about the size, the decoder still refuses to make such a frame."""
    info = probe_video(clip, LIMITS)
    assert len(list(decode_frames(clip, info, [0, 5], LIMITS))) == 2
    assert list(decode_frames(clip, info, [0, 5], MediaLimits(max_source_pixels=64 * 48 - 1))) == []
