"""What the captioner is told of an item: by a process that read it, or one that a file has taken over."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.remote.apart import read_encoded
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.media.answers import Prepared, item_answer, read_item
from qwen35mm.captioning.media.workers import MediaWorkers, prepare
from qwen35mm.decoding import process
from qwen35mm.decoding.answers import Answer, NonsenseError, read_here
from qwen35mm_preprocess import MediaProcessor, PreparedMedia

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path())
CLIP = asset_path("samples") / "moves-right.mp4"
ITEM = Item("moves-right.mp4", CLIP, "video", CLIP)
DIGEST = hashlib.sha256(CLIP.read_bytes()).digest()


def answered(form: Any = "pixels") -> Answer:
    return item_answer(prepare(ITEM, PROCESSOR, digest=DIGEST, form=form, with_similarity=True))


def read(answer: Answer, form: Any = "pixels") -> Any:
    return read_here(lambda values, data: read_item(values, data, ITEM, PROCESSOR, form), answer)


def test_what_is_sent_is_what_is_read() -> None:
    made = prepare(ITEM, PROCESSOR, digest=DIGEST, form="pixels", with_similarity=True)
    again = read(answered())
    assert isinstance(made, Prepared)
    assert isinstance(again, Prepared)
    assert isinstance(again.medium, PreparedMedia)
    assert isinstance(made.medium, PreparedMedia)
    assert (again.medium.plan, again.similarity) == (made.medium.plan, made.similarity)
    assert again.measures == made.measures is not None
    assert np.array_equal(again.medium.pixel_values, made.medium.pixel_values)


@pytest.mark.parametrize(
    "change",
    [{"similarity": "f" * 10_000}, {"similarity": 1}, {"measures": [1.0]}, {"measures": [-1.0, 0.0]}, {"plan": None}],
)
def test_an_answer_that_cannot_be_one_is_refused(change: dict[str, Any]) -> None:
    answer = answered()
    with pytest.raises(NonsenseError):
        read(replace(answer, values={**answer.values, **change}))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/secret"}},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text", "text": 1},
        "text",
    ],
)
def test_a_server_is_sent_no_address(part: Any) -> None:
    answer = answered("frames")
    assert isinstance(read(answer, "frames"), Prepared)
    bad = replace(answer, data=(json.dumps([part]).encode(),))
    with pytest.raises(NonsenseError, match="parts"):
        read(bad, "frames")
    with pytest.raises(NonsenseError, match="parts"):
        read_here(lambda values, data: read_encoded(values, data, PROCESSOR, "video"), bad)


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


TAKEN_OVER = """
import resource, sys
from qwen35mm.decoding import child
def answer(stream, value):
    stream.write(bytes.fromhex(sys.argv[1]))
    stream.flush()
def work(asked, progress):
    if "hungry" in asked.name:
        def function(*_, **__):
            bytearray(resource.getrlimit(resource.RLIMIT_DATA)[0] + 1)
        asked = asked._replace(function=function)
    return real(asked, progress)
real, child.work, child.send_answer = child.work, work, answer
child.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds what is mapped against RLIMIT_DATA")
async def test_a_process_that_was_taken_over_gets_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    payload = pickle.dumps(Exploit(tmp_path / "executed"))
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", TAKEN_OVER, payload.hex()))
    limits = replace(PROCESSOR.limits, max_source_pixels=1_000_000, max_image_bytes=1, max_video_bytes=1 << 20)
    made = MediaWorkers(replace(PROCESSOR, limits=limits), 1)
    hungry = await made.prepare(replace(ITEM, name="hungry"), DIGEST, "pixels")
    assert isinstance(hungry, Failed)
    assert hungry.kind == "too large"
    answer = await made.prepare(ITEM, DIGEST, "pixels")
    made.close()
    assert isinstance(answer, Failed)
    assert "hostile" in answer.message
    assert not (tmp_path / "executed").exists()
