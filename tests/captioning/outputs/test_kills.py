"""Every output, killed and out of room at every step: the next run leaves each item once, whole, and nothing else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.records import Record
from tests.captioning.kills import full_at, killed_at, needs_fork, stops, strides
from tests.captioning.outputs.helpers import HARD_NAMES, captions_of, expected, leftovers, records_of, rows_of, run

pytestmark = needs_fork

KINDS = ("sidecar", "jsonl", "dataset", "parquet", "webdataset")
NAMES = HARD_NAMES[2:7]


def check(out: Path, spec: str, records: list[Record]) -> None:
    if spec == "sidecar":
        texts = [path.read_text() for path in out.rglob("*.txt")]
        assert sorted(texts) == sorted(f"{each.caption.text}\n" for each in records)
    else:
        assert captions_of(rows_of(spec)) == expected(records)
    assert leftovers(out) == []
    assert list(out.rglob("*.before-*")) == [], "what a killed run left is known for our own"


def spec_of(kind: str, out: Path) -> str:
    return kind if kind == "sidecar" else f"{kind}:{out / 'captions'}"


class Runs:
    """A run over an empty folder, or one that goes on after another: some captions are replaced, one item is new, and
    shards are merged."""

    def __init__(self, folder: Path, kind: str, *, is_first: bool) -> None:
        self.out, self._begun = folder / "out", folder / "begun"
        self.spec = spec_of(kind, self.out)
        old = records_of(folder / "media", NAMES[:3])
        self.records = [*old[:1], *records_of(folder / "media", NAMES, "second")[1:]]
        self._compact = not is_first
        self._begun.mkdir()
        if not is_first:
            run(self._begun, old, spec_of(kind, self._begun), records_per_shard=2, captions=self._begun / "captions")

    def reset(self) -> None:
        if self.out.exists():
            shutil.rmtree(self.out)
        shutil.copytree(self._begun, self.out)

    def go(self) -> list[Wants]:
        return self.write(self.records)

    def write(self, records: list[Record]) -> list[Wants]:
        captions = self.out / "captions"
        return run(self.out, records, self.spec, records_per_shard=2, compact=self._compact, captions=captions)

    def check(self) -> None:
        check(self.out, self.spec, self.records)
        assert self.go() == [Wants.DONE] * len(self.records)


@pytest.fixture(params=[(kind, is_first) for kind in KINDS for is_first in (True, False)], ids=str)
def runs(request: pytest.FixtureRequest, in_memory: Path) -> Runs:
    kind, is_first = request.param
    return Runs(in_memory, kind, is_first=is_first)


@strides
def test_killed_at_every_step(runs: Runs, stride: int) -> None:
    for step, torn_bytes in stops(stride):
        runs.reset()
        was_killed = killed_at(step, runs.go, torn_bytes=torn_bytes)
        if step % 3 == 0:
            runs.write([])
            assert leftovers(runs.out) == [], "also where nothing is written again"
        runs.go()
        runs.check()
        if not was_killed:
            break
    assert step > 20, "the steps were counted"


@strides
def test_full_at_every_step(runs: Runs, stride: int) -> None:
    for step, _ in stops(stride):
        runs.reset()
        was_full = full_at(step, runs.go)
        runs.go()
        runs.check()
        if not was_full:
            break
    assert step > 20


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(in_memory: Path, kind: str) -> None:
    records = records_of(in_memory / "media", [f"{number // 7}/{number}.png" for number in range(20)])
    chosen = random.Random(kind)
    out = in_memory / "out"
    spec = spec_of(kind, out)

    def work() -> None:
        run(out, records, spec, records_per_shard=4, captions=out / "captions")

    kills = 0
    while killed_at(chosen.randrange(5, 30), work, torn_bytes=3):
        kills += 1
        assert kills < 200, "every run gets a little further"
    assert kills > 2
    check(out, spec, records)
