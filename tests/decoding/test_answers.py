"""What a reading process sends is data alone: nothing of it is executed, or allocated because it says so."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.decoding.answers import (
    AnswerError,
    NonsenseError,
    read_here,
    receive,
    send_answer,
    send_error,
    send_progress,
)
from qwen35mm.decoding.processor import prepared_answer, read_prepared
from qwen35mm_preprocess import MediaBudget, MediaDecodeError, MediaPlan, MediaProcessor, PreparedMedia
from qwen35mm_preprocess.say import said_of, say

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path())
CLIP = asset_path("samples") / "moves-right.mp4"


@cache
def whole_answer() -> bytes:
    stream = io.BytesIO()
    send_answer(stream, prepared_answer(PROCESSOR.prepare(CLIP)))
    return stream.getvalue()


def answered() -> tuple[dict[str, Any], bytes]:
    """A true answer: its JSON, and the data after it."""
    whole = whole_answer()
    _, num_text, _ = struct.unpack_from("<4sIQ", whole)
    return json.loads(whole[16 : 16 + num_text]), whole[16 + num_text :]


def sent(message: Any, data: bytes = b"", num_data: int | None = None) -> io.BytesIO:
    text = json.dumps(message).encode()
    num_data = len(data) if num_data is None else num_data
    return io.BytesIO(struct.pack("<4sIQ", b"Q35M", len(text), num_data) + text + data)


def read(stream: io.BytesIO, given: MediaPlan | None = None, processor: MediaProcessor = PROCESSOR) -> PreparedMedia:
    return receive(stream, partial(read_prepared, processor=processor, kind="video", given=given))


def test_what_is_sent_is_what_is_read() -> None:
    made = PROCESSOR.prepare(CLIP)
    here = read_here(partial(read_prepared, processor=PROCESSOR, kind="video"), prepared_answer(made))
    for each in (read(sent(*answered())), here):
        assert (each.plan, each.warnings) == (made.plan, made.warnings)
        assert np.array_equal(each.pixel_values, made.pixel_values)


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
        plan_with(digest=None, unit_digests=None),
        lambda values: values.update(plan=None),
        lambda values: values.update(plan=[1]),
        lambda values: values.update(warnings="w"),
        lambda values: values.pop("plan"),
    ],
)
def test_an_answer_that_cannot_be_one_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    message, data = answered()
    change(message["values"])
    with pytest.raises(NonsenseError):
        read(sent(message, data))


@pytest.mark.parametrize(
    "stream",
    [
        sent([]),
        sent({}),
        sent({"values": {}, "more": 1}),
        sent({"error": "SystemExit", "words": ""}),
        sent({"error": ["MediaError"], "words": ""}),
        sent({"error": "MediaError", "words": {"text": "{a}", "values": {}}}),
        sent({"error": "MediaError", "words": "x" * (1 << 17)}),
        sent({"error": "MediaError", "words": ""}, b"data"),
        sent({"progress": [2, 1]}),
        sent({"progress": [0, 1 << 40]}),
        sent({"progress": [0, "1"]}),
        io.BytesIO(struct.pack("<4sIQ", b"Q35M", 3, 0) + b"{}}"),
        io.BytesIO(struct.pack("<4sIQ", b"Q35M", 200_000, 0) + b"[" * 200_000),
        io.BytesIO(pickle.dumps({"values": {}}) + bytes(16)),
    ],
)
def test_what_is_no_answer_is_refused(stream: io.BytesIO) -> None:
    with pytest.raises(NonsenseError):
        read(stream)


def test_progress_goes_forward_and_errors_keep_their_words() -> None:
    stream, steps = io.BytesIO(), []
    error = MediaDecodeError(say("{name} is damaged.", name="a.png"))
    for done in (0, 1):
        send_progress(stream, done, 2)
    send_error(stream, error)
    stream.seek(0)
    with pytest.raises(AnswerError) as caught:
        receive(stream, lambda values, data: None, lambda *step: steps.append(step))
    assert (type(caught.value.error), said_of(caught.value.error)) == (MediaDecodeError, said_of(error))
    assert steps == [(0, 2), (1, 2)]
    # Else a process could have its parent note one step for ever.
    repeated = io.BytesIO(sent({"progress": [1, 2]}).getvalue() * 2)
    with pytest.raises(NonsenseError):
        receive(repeated, lambda values, data: None)


def test_nothing_is_allocated_that_an_answer_only_announces() -> None:
    message, data = answered()
    tracemalloc.start()
    for stream in (
        sent(message, data, num_data=1 << 50),
        io.BytesIO(struct.pack("<4sIQ", b"Q35M", (1 << 32) - 1, 0)),
        io.BytesIO(struct.pack("<4sIQ", b"NONE", 4, 0) + b"1234"),
        io.BytesIO(b"Q35M"),
    ):
        with pytest.raises((NonsenseError, EOFError)):
            read(stream)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_what_is_read_by_a_plan_is_of_that_plan() -> None:
    message, data = answered()
    fresh, complete = PROCESSOR.plan(CLIP), PROCESSOR.prepare(CLIP).plan
    assert read(sent(message, data), fresh).plan == read(sent(message, data), complete).plan == complete
    frames = fresh.frame_indices or ()
    fewer = fresh.with_frames(frames[:2], 2)
    for given in (replace(complete, cache_bytes=complete.cache_bytes + 1), fewer, replace(fresh, color="checkpoint")):
        with pytest.raises(NonsenseError):
            read(sent(message, data), given)
    # One of its own keeps to the budget; one that was given may be of another.
    small = replace(PROCESSOR, budget=MediaBudget(max_video_tokens=8))
    with pytest.raises(NonsenseError):
        read(sent(message, data), processor=small)
    assert read(sent(message, data), fresh, small).plan == complete


def test_what_is_read_executes_nothing(tmp_path: Path) -> None:
    class Exploit:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "executed"), "w")

    with pytest.raises(NonsenseError):
        read(io.BytesIO(pickle.dumps(Exploit()) + bytes(16)))
    assert not (tmp_path / "executed").exists()
