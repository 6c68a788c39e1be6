"""Thumbnails show what the model sees, of every file that the program's limits let in."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen35mm.chat.media.thumbnails import make_thumbnail, shown_picture
from qwen35mm_preprocess import MediaError, MediaLimits
from qwen35mm_preprocess import image as image_module
from qwen35mm_preprocess.formats import HAS_HEIF, HAS_JXL
from qwen35mm_preprocess.image import load_image
from tests.preprocess.media_files import LIMITS, encode_image, scene
from tests.preprocess.test_color import P3, profile
from tests.preprocess.test_image import HEIC, P3_JXL

GREY = np.linspace(0, 1, 300 * 200).reshape(200, 300)
SCENE = Image.fromarray(scene(5, (600, 900)))
XMP = b'<x xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 8
    return exif


FILES: dict[str, Callable[[], bytes]] = {
    "16-bit grey": lambda: encode_image(Image.fromarray((GREY * 65535).astype(np.uint16)), "PNG"),
    "32-bit grey": lambda: encode_image(Image.fromarray((GREY * 65535).astype(np.int32)), "TIFF"),
    "floats": lambda: encode_image(Image.fromarray(GREY.astype(np.float32)), "TIFF"),
    "wide colours": lambda: encode_image(SCENE, "JPEG", icc_profile=profile(P3, 2.2)),
    "inks": lambda: encode_image(SCENE.convert("CMYK"), "JPEG"),
    "turned": lambda: encode_image(SCENE, "JPEG", exif=turned()),
    "turned by XMP alone": lambda: encode_image(SCENE, "JPEG", xmp=XMP),
    "without its end": lambda: encode_image(SCENE, "JPEG")[:-2],
    "HEIC": lambda: base64.b64decode(HEIC),
    "JPEG XL": lambda: base64.b64decode(P3_JXL),
}


@pytest.mark.parametrize("name", FILES)
def test_a_thumbnail_is_what_the_model_sees(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (name, HAS_HEIF) == ("HEIC", False) or (name, HAS_JXL) == ("JPEG XL", False):
        pytest.skip("its extra isn't installed")
    # As in a process that has read no such file yet.
    for format in ("HEIF", "JXL"):
        monkeypatch.delitem(Image.OPEN, format, raising=False)
    image_module._know_heif.cache_clear()
    path = tmp_path / "a"
    path.write_bytes(FILES[name]())
    seen = load_image(path, LIMITS)
    seen.thumbnail((100, 100))
    with Image.open(io.BytesIO(make_thumbnail(path, LIMITS, 100))) as small:
        assert small.size == seen.size
        off = np.abs(np.asarray(small.convert("RGB"), np.float32) - np.asarray(seen, np.float32))
    assert off.mean() < 3
    assert off.mean((0, 1)).max() < 4


def test_the_programs_limits_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode_image(SCENE, "PNG"))
    for limits in (MediaLimits(max_image_bytes=100, max_video_bytes=100), MediaLimits(max_source_pixels=1000)):
        with pytest.raises(MediaError):
            make_thumbnail(path, limits)
        with pytest.raises(MediaError):
            shown_picture(path, limits)
    with path.open("ab") as file:
        file.truncate(LIMITS.max_video_bytes + 1)
    with pytest.raises(MediaError):
        make_thumbnail(path, LIMITS)
    raised = MediaLimits(max_image_bytes=1 << 30, max_video_bytes=1 << 30)
    assert make_thumbnail(path, raised)
    assert shown_picture(path, raised) is None
