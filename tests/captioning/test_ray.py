"""A run over a local Ray cluster, an engine of which is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.outputs import parse_output
from qwen35mm.captioning.run import RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.engine import EngineSettings, Event
from qwen35mm.prompt import Message
from tests.captioning.fake_model import picture

pytest.importorskip("ray")

from qwen35mm.captioning.ray_cluster import open_cluster
from tests.children import ROOT, environment

# Ray, and two processes with a model, take half a minute to start.
pytestmark = pytest.mark.slow

NUM_ITEMS = 40
RAY = ("--ray", "local", "--ray-actors", "2")
T = TypeVar("T")


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for seed in range(NUM_ITEMS):
        picture(seed).save(folder / f"{seed:02}.png")
    return folder


def start(media: Path, *options: str) -> subprocess.Popen[str]:
    jsonl = f"jsonl:{media.parent / 'captions.jsonl'}"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "qwen35mm", "caption", str(media), "--output", "sidecar", "--output", jsonl),
            *("--preset", "plain", "--max-tokens", "24", "--slots", "2", "--media-workers", "1"),
            *options,
        ],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the run says; it must have had no trouble."""
    errors = process.communicate(timeout=90)[1]
    assert process.returncode == 0, errors
    return errors


def wait_for(found: Callable[[], T], process: subprocess.Popen[str]) -> T:
    deadline = time.monotonic() + 90
    while not (value := found()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def engines(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The cluster's engines that are there."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any("CaptionActor" in part for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def texts(media: Path) -> dict[str, str]:
    return {path.with_suffix(".png").name: path.read_text() for path in media.glob("*.txt")}


def check(media: Path) -> None:
    """Every item once in each output."""
    captions = texts(media)
    assert sorted(captions) == sorted(path.name for path in media.glob("*.png"))
    assert len(captions) == NUM_ITEMS
    lines = [json.loads(line) for line in (media.parent / "captions.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_ITEMS
    assert {line["name"]: f"{line['caption']}\n" for line in lines} == captions


def test_an_engine_is_killed_and_nothing_is_lost(media: Path) -> None:
    process = start(media, *RAY)
    wait_for(lambda: len(texts(media)) >= 4, process)
    (first, *others) = engines(process)
    assert len(others) == 1
    first.send_signal(signal.SIGKILL)
    said = finish(process)
    assert f"{NUM_ITEMS} done" in said, said
    check(media)
    before = texts(media)
    # The same work without Ray.
    assert f"0 done, {NUM_ITEMS} skipped" in finish(start(media))
    assert texts(media) == before


def test_one_stops_and_the_other_goes_on(media: Path) -> None:
    process = start(media, *RAY)
    wait_for(lambda: len(texts(media)) >= 4, process)
    at_work = engines(process)
    assert len(at_work) == 2
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=90)[1]
    assert process.returncode == 130, errors
    num_done = len(texts(media))
    assert 4 <= num_done < NUM_ITEMS
    _, alive = psutil.wait_procs(at_work, timeout=20)
    assert alive == []
    assert f"{NUM_ITEMS - num_done} done, {num_done} skipped" in finish(start(media))
    check(media)


def test_what_cannot_be_begun_is_said(media: Path) -> None:
    for options, expected in (
        (("--ray", "127.0.0.1:1"), "There is no Ray cluster at '127.0.0.1:1'"),
        (("--ray", "somewhere"), "'local', 'auto' or HOST:PORT"),
        (("--ray", "local", "--ray-actors", "1000"), "too few for 1000 engines"),
        (("--ray", "local", "--ray-actors", "1", "--model", "/nowhere"), "There is no folder '/nowhere'"),
    ):
        process = start(media, *options)
        errors = process.communicate(timeout=90)[1]
        assert process.returncode not in (0, None)
        assert expected in " ".join(errors.split()), errors
        assert "Traceback" not in errors
    assert texts(media) == {}


class DeadlyBackend(LocalBackend):
    """Takes its process along when it is asked to."""

    async def stream(self, messages: Sequence[Message], *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
        if messages[-1].text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        async for event in super().stream(messages, *arguments, **options):
            yield event


def load_deadly() -> LocalBackend:
    return DeadlyBackend.load(demo_model_path(), settings=EngineSettings(slots=1))


async def test_an_item_that_kills_its_engines_fails_alone(media: Path) -> None:
    for path in sorted(media.glob("*.png"))[6:]:
        path.unlink()
    (media / "02.png").rename(media / "die.png")
    async with open_cluster("local", load_deadly, num_engines=1, slots=1, num_workers=1) as captioner:
        settings = RunSettings(slots=captioner.num_at_once)
        prompts = PromptSet([Question("{stem}")])
        job = Job([str(media)], prompts, {"max_tokens": 8}, outputs=[parse_output("sidecar")], run=settings)
        outcome = await carry_out(job, captioner)
    failures = [json.loads(line) for line in job.failures_path.read_text().splitlines()]
    assert ("die.png", "worker") in [(each["name"], each["kind"]) for each in failures]
    # What was in the same engine, each time that it ended, may have failed with it.
    assert len(failures) <= captioner.num_at_once
    assert outcome.counts.num_captioned == 6 - len(failures)
    assert (outcome.stopped, outcome.exit_code) == (None, 3)
