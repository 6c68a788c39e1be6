"""Small videos and pictures, made on the spot: content that tells which frame it is and which side is up."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import skimage.data
from PIL import Image

from qwen35mm_preprocess import ImageProcessing, MediaLimits, VideoProcessing

HALF = (0.5, 0.5, 0.5)
# That of the Qwen3.5 checkpoints, and one that makes small pictures.
IMAGE = ImageProcessing(16, 2, 2, HALF, HALF, min_pixels=65536, max_pixels=16777216)
SMALL_IMAGE = ImageProcessing(16, 2, 2, HALF, HALF, min_pixels=12288, max_pixels=16384)
VIDEO = VideoProcessing(16, 2, 2, HALF, HALF, min_total_pixels=4096, max_total_pixels=25165824)
SMALL_VIDEO = VideoProcessing(16, 2, 2, HALF, HALF, min_total_pixels=65536, max_total_pixels=98304, max_frames=8)
LIMITS = MediaLimits()
# Those that scikit-image's wheel carries.
PHOTOGRAPHS = Path(skimage.data.__file__).parent


def scene(index: int, size: tuple[int, int] = (48, 64)) -> np.ndarray:
    """A frame, uint8 [H, W, 3]: grey by its index, red at the top left, green along the right side."""
    height, width = size
    frame = np.full((height, width, 3), 20 + index % 36 * 6, np.uint8)
    frame[: height // 3, : width // 3] = (220, 0, 0)
    frame[:, -width // 8 :] = (0, 180, 0)
    return frame


HOUR_SCENES_S = (0, 1200, 2700)


def hour_video() -> bytes:
    """An hour at a frame a second: three scenes, in which a bright spot moves."""
    frames = []
    for second in range(3600):
        frame = np.full((48, 64, 3), [(30, 40, 90), (150, 60, 40), (40, 130, 60)][(second >= 1200) + (second >= 2700)])
        left = second * 5 % 56
        frame[20:28, left : left + 8] = 230
        frames.append(frame.astype(np.uint8))
    return encode_video(frames, fps=1, options={"preset": "ultrafast", "g": "15"})


def scene_index(frame: np.ndarray) -> int:
    """Which frame `scene` drew, from its decoded and possibly turned pixels (up to index 35)."""
    height, width, _ = frame.shape
    centre = frame[height * 3 // 8 : height * 5 // 8, width * 3 // 8 : width * 5 // 8]
    return round((float(centre.mean()) - 20) / 6)


def encode_video(
    frames: Sequence[np.ndarray],
    *,
    container: str = "mp4",
    codec: str = "libx264",
    fps: int | Fraction = 10,
    pts: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A video file. `pts` are in units of 1 / fps and default to 0, 1, 2, ..."""
    height, width, _ = frames[0].shape
    # A real file, since a muxer that moves its index to the front opens it again.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video"
        with av.open(str(path), "w", format=container, options=container_options or {}) as output:
            stream = output.add_stream(codec, rate=fps, options=options or {})
            stream.width, stream.height = width, height
            stream.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p", "huffyuv": "yuv422p", "qtrle": "rgb24"}.get(
                codec, "yuv420p"
            )
            stream.bit_rate = 1_000_000
            stream.codec_context.time_base = 1 / Fraction(fps)
            for index, array in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
                frame.pts = index if pts is None else pts[index]
                frame.time_base = 1 / Fraction(fps)
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return path.read_bytes()


def turned(video: bytes, matrix: tuple[int, int, int, int], container: str = "mp4") -> bytes:
    """An MP4 with a display matrix (a, b, c, d); the muxer carries it to other containers."""
    a, b, c, d = matrix
    data = bytearray(video)
    at = data.index(b"tkhd") + 4 + 40
    struct.pack_into(">5i", data, at, a * 65536, b * 65536, 0, c * 65536, d * 65536)
    if container == "mp4":
        return bytes(data)
    file = io.BytesIO()
    with av.open(io.BytesIO(bytes(data))) as source, av.open(file, "w", format=container) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    return file.getvalue()


def encode_sound(container: str = "mp4", codec: str = "aac") -> bytes:
    """A file with half a second of a tone and no picture."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=8000, layout="mono")
        samples = np.sin(np.arange(4096) / 10).astype(np.float32)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 8000, 0
        for resampled in av.AudioResampler("fltp", "mono", 8000, frame_size=1024).resample(frame):
            output.mux(stream.encode(resampled))
        output.mux(stream.encode())
    return file.getvalue()


def with_sound(video: bytes, seconds: float, container: str) -> bytes:
    """The video with silence beside it."""
    file = io.BytesIO()
    with av.open(io.BytesIO(video)) as source, av.open(file, "w", format=container) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        sound = target.add_stream("pcm_s16le", rate=8000, layout="mono")
        packets = []
        for start in range(0, int(seconds * 8000), 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, start, Fraction(1, 8000)
            packets += [(packet.dts * packet.time_base, packet) for packet in sound.encode(frame)]
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                packets.append((packet.dts * packet.time_base, packet))
        for _, packet in sorted(packets, key=lambda packet: packet[0]):
            target.mux(packet)
    return file.getvalue()


def pixel(image: Image.Image, x: int, y: int) -> list[int]:
    """The channels of one pixel."""
    return np.asarray(image)[y, x].tolist()


def encode_image(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def clap(part: Sequence[int | Fraction], size: tuple[int, int]) -> bytes:
    """A clean aperture, which keeps (left, top, width, height) of a picture of (width, height)."""
    left, top, width, height = map(Fraction, part)
    numbers = (width, height, left + (width - size[0]) / 2, top + (height - size[1]) / 2)
    pairs = [(number.numerator, number.denominator) for number in numbers]
    return b"clap" + struct.pack(">4IiIiI", *(value for pair in pairs for value in pair))


def with_property(avif: bytes, content: bytes, *, item: int = 1, comes_first: bool = False) -> bytes:
    """What Pillow wrote of a picture without alpha, with one more property.

    Args:
        content: the property's name and what follows it.
        item: whose it is, beside item 1, which is the picture: of others there is only said that they have it.
    """
    at = {name: avif.index(name) - 4 for name in (b"meta", b"iloc", b"iprp", b"ipco", b"ipma", b"mdat")}
    (ipco_size,) = struct.unpack_from(">I", avif, at[b"ipco"])
    properties, index = avif[at[b"ipco"] + 8 : at[b"ipco"] + ipco_size], 0
    while properties:
        properties, index = properties[int.from_bytes(properties[:4], "big") :], index + 1
    ipma = bytearray(avif[at[b"ipma"] : at[b"mdat"]])
    # Size, name, version and flags, number of items; then the item's number and how many it has.
    assert len(ipma) == int.from_bytes(ipma[:4], "big")
    assert ipma[8:18] == bytes([0, 0, 0, 0, 0, 0, 0, 1, 0, 1])
    number = 0x80 | (index + 1)
    if item == 1:
        ipma[18] += 1
        ipma.append(number)
    else:
        ipma[15] = 2
        other = item.to_bytes(2, "big") + bytes([1, number])
        ipma = ipma[:16] + other + ipma[16:] if comes_first else ipma + other
    ipma[:4] = len(ipma).to_bytes(4, "big")
    added = (len(content) + 4).to_bytes(4, "big") + content
    more = len(added) + len(ipma) - (at[b"mdat"] - at[b"ipma"])
    whole = bytearray(avif[: at[b"ipma"]] + added + bytes(ipma) + avif[at[b"mdat"] :])
    # One item, one extent: its place in the file stands 22 bytes into the box.
    for place, grows in ((at[b"ipco"], len(added)), (at[b"iprp"], more), (at[b"meta"], more), (at[b"iloc"] + 22, more)):
        struct.pack_into(">I", whole, place, struct.unpack_from(">I", whole, place)[0] + grows)
    return bytes(whole)
