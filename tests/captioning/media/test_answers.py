"""What a reading process sends is data alone: nothing of it is executed, or allocated because it says so."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.media import workers
from qwen35mm.captioning.media.answers import Prepared, read_answer, write_answer
from qwen35mm.captioning.media.workers import MediaWorkers, prepare
from qwen35mm_preprocess import MediaProcessor, PreparedMedia

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path())
CLIP = asset_path("samples") / "moves-right.mp4"
ITEM = Item("moves-right.mp4", CLIP, "video", CLIP)
DIGEST = hashlib.sha256(CLIP.read_bytes()).digest()


def answered(form: Any = "pixels") -> tuple[dict[str, Any], bytes]:
    """A true answer: its JSON, and the data after it."""
    made = prepare(ITEM, PROCESSOR, digest=DIGEST, form=form, with_similarity=True)
    stream = io.BytesIO()
    write_answer(stream, made)
    _, num_text, _ = struct.unpack_from("<4sIQ", stream.getvalue())
    return json.loads(stream.getvalue()[16 : 16 + num_text]), stream.getvalue()[16 + num_text :]


def sent(values: Any, data: bytes = b"", num_data: int | None = None) -> io.BytesIO:
    text = json.dumps(values).encode()
    return io.BytesIO(
        struct.pack("<4sIQ", b"Q35M", len(text), len(data) if num_data is None else num_data) + text + data
    )


def test_what_is_sent_is_what_is_read() -> None:
    made = prepare(ITEM, PROCESSOR, digest=DIGEST, form="pixels", with_similarity=True)
    read = read_answer(sent(*answered()), ITEM, PROCESSOR, "pixels")
    assert isinstance(made, Prepared)
    assert isinstance(read, Prepared)
    assert isinstance(read.medium, PreparedMedia)
    assert isinstance(made.medium, PreparedMedia)
    assert (read.medium.plan, read.medium.warnings, read.similarity) == (
        *(made.medium.plan, made.medium.warnings),
        made.similarity,
    )
    assert np.array_equal(read.medium.pixel_values, made.medium.pixel_values)


def plan_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["plan"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        plan_with(num_tokens="4"),
        plan_with(num_tokens=1e9),
        plan_with(grid_thw=[2**40, 2**40, 2**40]),
        plan_with(size=[1 << 20, 1 << 20], grid_thw=[1, 1 << 16, 1 << 16]),
        plan_with(frame_times_s=[float("nan")] * 4),
        plan_with(kind="image"),
        plan_with(kind=["image"]),
        plan_with(processing="another"),
        plan_with(notes=[{"text": "{a}", "values": {}}]),
        plan_with(more=1),
        plan_with(size=None),
        lambda values: values.update(plan=None),
        lambda values: values.update(plan=[1]),
        lambda values: values.update(warnings="w"),
        lambda values: values.update(similarity="f" * 10_000),
        lambda values: values.pop("plan"),
        lambda values: values.update(failed="no such kind", message=""),
        lambda values: values.update(failed=[], message=""),
    ],
)
def test_an_answer_that_cannot_be_one_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    values, data = answered()
    change(values)
    with pytest.raises(ValueError, match=r"."):
        read_answer(sent(values, data), ITEM, PROCESSOR, "pixels")


@pytest.mark.parametrize("form", ["pixels", "frames"])
def test_nothing_is_allocated_that_an_answer_only_announces(form: Any) -> None:
    values, data = answered(form)
    tracemalloc.start()
    for stream in (
        sent(values, data, num_data=1 << 50),
        io.BytesIO(struct.pack("<4sIQ", b"Q35M", (1 << 32) - 1, 0)),
        io.BytesIO(b"Q35M"),
        sent(values, data[:-1], num_data=len(data)),
    ):
        with pytest.raises((ValueError, EOFError)):
            read_answer(stream, ITEM, PROCESSOR, form)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


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
    values, data = answered("frames")
    assert isinstance(read_answer(sent(values, data), ITEM, PROCESSOR, "frames"), Prepared)
    with pytest.raises(ValueError, match="parts"):
        read_answer(sent(values, json.dumps([part]).encode()), ITEM, PROCESSOR, "frames")


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


TAKEN_OVER = """
import resource, sys
from qwen35mm.captioning.media import workers
from qwen35mm.captioning.items import Failed
real = workers.write_answer
def answer(stream, value):
    if isinstance(value, Failed):
        real(stream, value)
    else:
        stream.write(bytes.fromhex(sys.argv[1]))
        stream.flush()
def work(function, item, *arguments):
    if item.name == "hungry":
        def function(*_, **__):
            bytearray(resource.getrlimit(resource.RLIMIT_DATA)[0] + 1)
    return real_work(function, item, *arguments)
real_work, workers.work, workers.write_answer = workers.work, work, answer
workers.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds what is mapped against RLIMIT_DATA")
async def test_a_process_that_was_taken_over_gets_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    payload = pickle.dumps(Exploit(tmp_path / "executed"))
    monkeypatch.setattr(workers, "_COMMAND", (sys.executable, "-c", TAKEN_OVER, payload.hex()))
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
