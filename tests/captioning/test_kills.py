"""kill -9 at any moment: the last run leaves every item exactly once in each output, all of it valid."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from tests.captioning.fake_model import picture
from tests.children import ROOT, environment

NUM_ITEMS = 300
SLOTS = 4


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    for number in range(NUM_ITEMS):
        place = folder / f"{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number:03}.png")
    return folder


def spawn(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(media: Path, *step: str) -> subprocess.Popen[str]:
    """A run with all kinds of output, and a model that costs nothing."""
    return spawn("tests.captioning.child", str(media), *step)


def start_demo(media: Path) -> subprocess.Popen[str]:
    """The command, as a person would give it, with the bundled model."""
    lines = media.parent / "captions.jsonl"
    options = ["--preset", "plain", "--max-tokens", "6", "--keep-unfinished", "--output", f"jsonl:{lines}"]
    return spawn("qwen35mm", "caption", str(media), "--output", "sidecar", *options)


def finish(media: Path) -> int:
    """The last run; how many captions the model had to write in it."""
    out, errors = start(media).communicate(timeout=240)
    assert out, errors
    num_asked, num_captioned, num_failures = map(int, out.split())
    assert (num_asked, num_failures) == (num_captioned, 0), errors
    return num_asked


def check_texts(media: Path) -> dict[str, str]:
    """Every item's text file, and its one line."""
    names = sorted(path.relative_to(media).as_posix() for path in media.rglob("*.png"))
    captions = {name: (media / name).with_suffix(".txt").read_text() for name in names}
    assert len(captions) == NUM_ITEMS
    assert all(len(text) > 1 and text.endswith("\n") for text in captions.values())
    lines = [json.loads(line) for line in (media.parent / "captions.jsonl").read_text().splitlines()]
    assert {line["name"]: line["caption"] + "\n" for line in lines} == captions
    assert len(lines) == NUM_ITEMS
    strays = (".qwen35mm-", ".before-")  # temporary files and locks, and what was moved aside
    leftovers = [path for path in media.parent.rglob("*") if any(stray in path.name for stray in strays)]
    assert leftovers == []
    return captions


def check(media: Path) -> None:
    """Every item once in each output."""
    captions = check_texts(media)
    assert len(set(captions.values())) == NUM_ITEMS
    root = media.parent
    tables = [pyarrow.parquet.read_table(path) for path in sorted((root / "rows").glob("*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    assert {row["name"]: row["caption"] + "\n" for row in rows} == captions
    assert len(rows) == NUM_ITEMS
    described = [json.loads(line) for line in (root / "dataset" / "metadata.jsonl").read_text().splitlines()]
    assert len({line["file_name"] for line in described}) == len(described) == NUM_ITEMS
    assert all((root / "dataset" / line["file_name"]).stat().st_size for line in described)
    members: list[str] = []
    for path in sorted((root / "tars").glob("*.tar")):
        with tarfile.open(path) as tar:
            members += tar.getnames()
    assert len(members) == len(set(members)) == 3 * NUM_ITEMS


def num_written(media: Path) -> int:
    return sum(1 for _ in media.rglob("*.txt"))


def kill_at_random(media: Path, num_kills: int, seed: int) -> None:
    """Kills the command with the bundled model, each time after some captions more."""
    rng = random.Random(seed)
    for _ in range(num_kills):
        enough = num_written(media) + rng.randrange(1, NUM_ITEMS // num_kills)
        process = start_demo(media)
        deadline = time.monotonic() + 120
        while process.poll() is None and num_written(media) < enough:
            assert time.monotonic() < deadline, "it writes nothing"
            time.sleep(0.002)
        assert process.poll() is None, "it was done before it was killed"
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "a worker outlives its parent"
    assert 0 < num_written(media) < NUM_ITEMS


def finish_demo(media: Path) -> None:
    process = start_demo(media)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def kill_between_steps(media: Path, num_kills: int, seed: int) -> None:
    """The run ends itself right before an fsync or a rename, each time at another one."""
    rng = random.Random(seed)
    for number in range(num_kills):
        process = start(media, str(rng.randrange(1, 2500 // num_kills)))
        _, errors = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL, (number, errors)


def test_kills_at_random_moments(media: Path) -> None:
    kill_at_random(media, 8, seed=1)
    finish_demo(media)
    check_texts(media)


def test_kills_between_two_steps(media: Path) -> None:
    kill_between_steps(media, 12, seed=1)
    written = num_written(media)
    # What the slots were at, and what waited to be written, is all that may be asked again.
    assert 0 < NUM_ITEMS - SLOTS - written <= finish(media) <= NUM_ITEMS - written
    check(media)
    assert finish(media) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(media: Path, seed: int) -> None:
    kill_at_random(media, 10, seed)
    finish_demo(media)
    check_texts(media)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_between_two_steps(media: Path, seed: int) -> None:
    kill_between_steps(media, 10, seed)
    finish(media)
    check(media)
