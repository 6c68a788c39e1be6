"""kill -9 at any moment: the last run leaves every item exactly once in each output, all of it valid."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from qwen35mm.captioning.job import carry_out
from qwen35mm.captioning.outputs import OutputSettings
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.kills import killed_at, needs_fork
from tests.captioning.outputs.helpers import captions_of, rows_of
from tests.captioning.runs import job, settings
from tests.forked import PATIENCE_S, ForkedProcess

pytestmark = needs_fork

SLOTS = 4
# Steps of a run for an item: each output has some.
STEPS_PER_ITEM = 25
many = [pytest.param(10, 1, 0), pytest.param(120, 8, 1, marks=pytest.mark.slow)]


@pytest.fixture
def media(tmp_path: Path) -> Path:
    return tmp_path / "media"


def make_media(folder: Path, num_items: int) -> None:
    for number in range(num_items):
        place = folder / f"{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number:03}.png")


def specs(media: Path) -> list[str]:
    """An output of each kind, but for text files."""
    places = {"jsonl": "captions.jsonl", "dataset": "dataset", "webdataset": "tars", "parquet": "rows"}
    return [f"{kind}:{media.parent / place}" for kind, place in places.items()]


def go(media: Path, **how: Any) -> tuple[int, int, int]:
    """A run with every kind of output, and a model that costs nothing; how many were asked, captioned and failed."""
    model = FakeModel(delay_s=0.002)
    outputs, output_settings = ["sidecar", *specs(media)], OutputSettings(records_per_shard=16)
    one = job(media, outputs=outputs, output_settings=output_settings, run=settings(slots=SLOTS, **how))
    outcome = asyncio.run(carry_out(one, model.captioner()))
    return len(model.asked), outcome.counts.num_captioned, outcome.num_failures


def start_demo(media: Path) -> ForkedProcess:
    """The command, as a person would give it, with the bundled model."""
    options = ["--preset", "plain", "--max-tokens", "6", "--keep-unfinished", "--output", specs(media)[0]]
    return ForkedProcess("qwen35mm", "caption", media, "--output", "sidecar", *options)


def check(media: Path, num_items: int, outputs: Sequence[str]) -> dict[str, str]:
    """Every item has its text file, and is once in each other output; what each text file says."""
    names = sorted(path.relative_to(media).as_posix() for path in media.rglob("*.png"))
    captions = {name: (media / name).with_suffix(".txt").read_text() for name in names}
    assert len(captions) == num_items
    assert all(len(text) > 1 and text.endswith("\n") for text in captions.values())
    for spec in outputs:
        assert {name: f"{caption}\n" for name, caption in captions_of(rows_of(spec)).items()} == captions
    strays = (".qwen35mm-", "backups")  # temporary files and locks, and what was moved aside
    assert [path for path in media.parent.rglob("*") if any(stray in path.name for stray in strays)] == []
    return captions


def num_written(media: Path) -> int:
    return sum(1 for _ in media.rglob("*.txt"))


@pytest.mark.parametrize(("num_items", "num_kills", "seed"), many)
def test_kills_at_random_moments(media: Path, num_items: int, num_kills: int, seed: int) -> None:
    """Of the command with the bundled model, each time after some captions more."""
    make_media(media, num_items)
    rng = random.Random(seed)
    for _ in range(num_kills):
        enough = num_written(media) + rng.randrange(1, num_items // num_kills - 3)
        process = start_demo(media)
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and num_written(media) < enough:
            assert time.monotonic() < deadline, "it writes nothing"
            time.sleep(0.002)
        assert process.poll() is None, "it was done before it was killed"
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, "a worker outlives its parent"
    assert 0 < num_written(media) < num_items
    process = start_demo(media)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    check(media, num_items, specs(media)[:1])


@pytest.mark.parametrize(("num_items", "num_kills", "seed"), many)
def test_kills_between_two_steps(media: Path, num_items: int, num_kills: int, seed: int) -> None:
    make_media(media, num_items)
    rng = random.Random(seed)
    for _ in range(num_kills):
        step = rng.randrange(1, num_items * STEPS_PER_ITEM // num_kills)
        assert killed_at(step, lambda: go(media)), "it was done before it was killed"
    written = num_written(media)
    num_asked, num_captioned, num_failures = go(media)
    assert (num_asked, num_failures) == (num_captioned, 0)
    # What the slots were at, and what waited to be written, is all that may be asked again.
    assert num_items - SLOTS - written <= num_asked <= num_items - written
    assert len(set(check(media, num_items, specs(media)).values())) == num_items
    assert go(media) == (0, 0, 0)


@pytest.mark.usefixtures("media_in_process")
@pytest.mark.parametrize(("num_items", "num_kills", "seed"), [pytest.param(4, 1, 0), *many[1:]])
def test_kills_while_captions_of_earlier_runs_are_judged(
    media: Path, num_items: int, num_kills: int, seed: int
) -> None:
    make_media(media, num_items)
    go(media)
    before = check(media, num_items, specs(media))
    rng = random.Random(seed)
    for _ in range(num_kills):
        step = rng.randrange(1, num_items * STEPS_PER_ITEM // num_kills)
        killed_at(step, lambda: go(media, judge_below=0.95))
    num_asked, num_captioned, num_failures = go(media, judge_below=0.95)
    assert (num_asked < num_items, num_captioned, num_failures) == (True, 0, 0)
    assert check(media, num_items, specs(media)) == before, "what is judged stays as it is"
    for spec in specs(media):
        assert [row["flags"] for row in rows_of(spec)] == [["doubted"]] * num_items
        assert [len(row["judged"]) for row in rows_of(spec)] == [1] * num_items
    assert go(media, judge_below=0.95) == (0, 0, 0)
