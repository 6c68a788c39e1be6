"""What libtiff says while a picture is decoded in this process."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from qwen35mm.chat.media.thumbnails import make_thumbnail
from qwen35mm_preprocess import MediaError, MediaLimits, libtiff
from qwen35mm_preprocess.image import load_image

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="libtiff is a part of Pillow's own file there")


def damaged(path: Path, *, num_strips: int = 1) -> Path:
    """A TIFF whose LZW codes are wrong in the middle."""
    noise = Image.effect_noise((300, 300), 90)
    noise.save(path, compression="tiff_lzw", tiffinfo={278: 300 // num_strips})
    data = bytearray(path.read_bytes())
    data[1000 : len(data) - 1000] = bytes(len(data) - 2000)
    path.write_bytes(data)
    return path


def decode(path: Path) -> None:
    with pytest.raises(MediaError):
        load_image(path, MediaLimits())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == libtiff.__name__]


def test_it_goes_to_the_log_with_the_files_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        decode(damaged(tmp_path / "a.tif"))
        with pytest.raises(MediaError):
            make_thumbnail(damaged(tmp_path / "b.tif"), MediaLimits())
        decode(damaged(tmp_path / "c.tif"))
    lines = said(caplog)
    assert [line.split(":")[0] for line in lines] == ["'a.tif'", "'b.tif'", "'c.tif'"]
    assert all("LZW" in line or "code" in line for line in lines)
    assert capfd.readouterr().err == ""


def test_threads_at_one_time_have_a_name_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [damaged(tmp_path / f"{number}.tif") for number in range(8)]
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as threads:
        list(threads.map(decode, paths * 5))
    assert sorted(line.split(":")[0] for line in said(caplog)) == sorted(f"'{path.name}'" for path in paths * 5)


def test_of_many_lines_the_first_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), libtiff.named("x"):
        for number in range(9):
            with pytest.raises(OSError, match="decoder error"), Image.open(damaged(tmp_path / f"{number}.tif")) as one:
                one.load()
    assert len(said(caplog)) == 5
