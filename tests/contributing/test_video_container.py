"""A video container is one entry in formats.py: readers, captioning and review know it then."""

from __future__ import annotations

from pathlib import Path

from tests.contributing.copies import Copy

FORMATS = "preprocess/qwen35mm_preprocess/formats.py"
LAST = '    MediaFormat("FLV", "video"'
ENTRY = (
    '    MediaFormat("NUT", "video", "video/x-nut", (".nut",), libav="nut", magic=(b"nut/multimedia container\\0",)),\n'
)
TRIAL = """
import av, numpy as np
from qwen35mm.captioning.sources.candidates import MEDIA_SUFFIXES
from qwen35mm.review.folder import _CLIPS
from qwen35mm_preprocess import detect_kind
from qwen35mm_preprocess.video_container import open_video
with av.open("clip.nut", "w") as container:
    stream = container.add_stream("mpeg4", rate=10)
    stream.width = stream.height = 64
    for level in range(0, 200, 20):
        frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
from pathlib import Path
print(".nut" in MEDIA_SUFFIXES, ".nut" in _CLIPS, detect_kind(Path("clip.nut")))
"""


def test_it_is_read_listed_and_told_after_one_entry(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    before = copy.run(TRIAL)
    assert before.returncode != 0, "nothing else knows it"
    copy.edit(FORMATS, LAST, ENTRY + LAST)
    after = copy.run(TRIAL)
    assert after.stdout.split() == ["True", "True", "video"], after.stderr
