"""A training that the review page starts: what it is told, and how it ends. A script stands for `qwen35mm tune`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import CaptioningError
from qwen35mm.review.training import Training

WORDS = ["qwen35mm", "tune", "photos", "--out", "photos-adapter"]
EVENTS: list[dict[str, Any]] = [
    {"event": "held_out", "step": 0, "loss": 2.5, "is_best": False},
    {"event": "answer", "name": "a.png", "answer": "red", "wanted": "a red circle"},
    {"event": "planned", "step": 0, "steps": 4, "seconds_left": 9.0},
    {"event": "step", "step": 4, "steps": 4, "loss": None, "seconds_left": 0.0},
    {"event": "held_out", "step": 4, "loss": 0.5, "is_best": True},
    {"event": "answer", "name": "a.png", "answer": "a red circle", "wanted": "a red circle"},
    {"event": "ended", "step": 4, "before": 2.5, "after": 0.5},
]


def training_by(script: str) -> Training:
    return Training(WORDS, (sys.executable, "-I", "-S", "-c", script))


async def ended(training: Training) -> dict[str, Any]:
    assert training._following is not None
    await training._following
    return training.look()


async def test_the_page_is_told_what_the_program_says(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, EVENTS))
    training = training_by(
        f"import sys; print({lines!r}); print('[1]', 'no JSON', sep='\\n'); "
        f"open({str(tmp_path / 'words')!r}, 'w').write(' '.join(sys.argv[1:])); "
        "sys.stderr.write('1%\\r2%\\rTakes a minute.\\n' + 'x' * 50_000)"
    )
    assert training.look()["state"] == "none"
    await training.start(restart=True, accepted=True)
    found = await ended(training)
    assert (found["state"], found["command"], found["adapter"]) == ("done", " ".join(WORDS), "photos-adapter")
    assert (found["before"], found["after"], found["steps"]) == (2.5, 0.5, 4)
    assert [each["loss"] for each in found["losses"]] == [2.5, 0.5]
    assert [(each["before"], each["answer"]) for each in found["answers"]] == [("red", "a red circle")]
    assert found["said"][:3] == ["1%", "2%", "Takes a minute."]
    assert len(found["said"][3]) == 10_000
    assert (tmp_path / "words").read_text() == "tune photos --out photos-adapter --json --accepted --restart"


async def test_it_is_stopped_and_resumed_and_a_failure_is_told() -> None:
    training = training_by("import sys; sys.stderr.write('Error: it does not fit.\\n'); sys.exit(1)")
    await training.start()
    assert ((await ended(training))["state"], training.look()["said"]) == ("failed", ["Error: it does not fit."])
    training = training_by(f"import sys; print({json.dumps(EVENTS[2])!r}, flush=True); sys.stdin.close(); import time; "
                           "time.sleep(600)")  # fmt: skip
    await training.start()
    child = training._child
    await training.start()
    assert training._child is child, "one at a time"
    while training.look()["state"] != "training":
        await asyncio.sleep(0)
    await training.stop()
    assert (training.look()["state"], child is not None and child.returncode is not None) == ("stopped", True)
    await training.start()
    assert training.look()["state"] == "loading"
    assert training._child is not child
    await training.stop()
    missing = Training(WORDS, ("/there/is/none",))
    with pytest.raises(CaptioningError, match="can't be started: No such file"):
        await missing.start()
    assert missing.look()["state"] == "failed"
