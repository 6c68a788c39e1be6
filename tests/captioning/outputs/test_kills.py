"""Every output, killed and out of room at every step: the next run leaves each item once, whole, and nothing else."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow
import pytest

from qwen35mm.captioning.outputs import Mode, Wants
from qwen35mm.captioning.records import Record
from tests.captioning.kills import full_at, killed_at, needs_fork, stops
from tests.captioning.outputs.helpers import (
    HARD_NAMES,
    captions_of,
    expected,
    kept,
    leftovers,
    records_of,
    rows_of,
    run,
)

pytestmark = needs_fork

KINDS = ("sidecar", "jsonl", "dataset", "parquet", "webdataset")
MODES: tuple[Mode, ...] = ("overwrite", "append", "prepend")
MODES_OF: Sequence[tuple[str, Mode]] = [*((kind, "skip") for kind in KINDS), *(("sidecar", mode) for mode in MODES)]
# Kind, mode, and whether it is the first run over the folder; each kind and mode once, and all of them with `slow`.
FEW: Sequence[tuple[str, Mode, bool]] = [
    (kind, mode, (kind, mode) in (("sidecar", "skip"), ("sidecar", "prepend"))) for kind, mode in MODES_OF
]
ALL = [(*each, is_first) for each in MODES_OF for is_first in (True, False)]
NAMES = HARD_NAMES[2:7]
# A person's own texts, by the number of the item's name.
PERSONS = {0: "mine", 3: "mine too"}


def spec_of(kind: str, out: Path) -> str:
    return kind if kind == "sidecar" else f"{kind}:{out / 'captions'}"


def check_left(out: Path, *, theirs: Collection[str] = ()) -> None:
    assert leftovers(out) == []
    assert sorted(path.read_text() for path in kept(out)) == sorted(theirs), (
        "a person's texts, once each; what a killed run left is known for our own"
    )


class Runs:
    """A run over an empty folder, or one that goes on after another: some captions are replaced, one item is new, and
    shards are merged. Where text files are written, some of a person's are there."""

    def __init__(self, folder: Path, kind: str, mode: Mode, *, is_first: bool) -> None:
        self.out, self._begun = folder / "out", folder / "begun"
        self._kind, self._compact = kind, not is_first
        self._mode: Mode = mode
        old = [] if is_first else records_of(folder / "media", NAMES[:3])
        records = records_of(folder / "media", NAMES, "second")
        self.records = [*old[:1], *records[len(old[:1]) :]]
        if kind == "sidecar":
            for number, text in PERSONS.items():
                path = self._begun / "captions" / NAMES[number].replace(".png", ".txt")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        self._begun.mkdir(exist_ok=True)
        if not is_first:
            self._run(self._begun, old, compact=False)
        self._captions = [[each.caption.text] for each in self.records]
        for captions, before in zip(self._captions, old, strict=False):
            if captions != [before.caption.text]:
                captions.insert(0, before.caption.text)

    def reset(self) -> None:
        if self.out.exists():
            shutil.rmtree(self.out)
        shutil.copytree(self._begun, self.out)

    def go(self) -> list[Wants]:
        return self.write(self.records)

    def write(self, records: list[Record]) -> list[Wants]:
        return self._run(self.out, records, compact=self._compact)

    def check(self) -> None:
        check_left(self.out, theirs=PERSONS.values() if (self._kind, self._mode) == ("sidecar", "overwrite") else ())
        if self._kind != "sidecar":
            assert captions_of(rows_of(spec_of(self._kind, self.out))) == expected(self.records)
            assert self.go() == [Wants.DONE] * len(self.records)
            return
        assert sorted(path.read_text() for path in (self.out / "captions").rglob("*.txt")) == sorted(
            self._text(number) for number in range(len(NAMES))
        )
        theirs = PERSONS if self._mode == "skip" else ()
        assert self.go() == [Wants.KEPT if number in theirs else Wants.DONE for number in range(len(NAMES))]

    def _run(self, out: Path, records: list[Record], *, compact: bool) -> list[Wants]:
        return run(
            out,
            records,
            spec_of(self._kind, out),
            mode=self._mode,
            records_per_shard=2,
            compact=compact,
            captions=out / "captions",
        )

    def _text(self, number: int) -> str:
        """What an item's text file holds at the end."""
        persons, captions = PERSONS.get(number), self._captions[number]
        if self._mode == "skip" and persons is not None:
            return persons
        parts = captions[-1:] if self._mode in ("skip", "overwrite") else [*([persons] if persons else []), *captions]
        return "\n".join(parts if self._mode != "prepend" else parts[::-1]) + "\n"


@pytest.fixture(scope="module", autouse=True)
def pandas_loaded() -> None:
    """With its first table, pyarrow looks for pandas: once here, not in every process that is killed."""
    pyarrow.Table.from_pylist([{"column": 1}])


@pytest.fixture
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    kind, mode, is_first = request.param
    return Runs(tmp_path, kind, mode, is_first=is_first)


def at_steps(*more: tuple[tuple[str, Mode, bool], int]) -> pytest.MarkDecorator:
    """Some steps of a few cases, and of `more` with their strides; with `slow` every step of all of them."""
    some, every = [(case, 23) for case in FEW], [pytest.param(case, 1, marks=pytest.mark.slow) for case in ALL]
    return pytest.mark.parametrize(("runs", "stride"), [*some, *more, *every], indirect=["runs"], ids=str)


@at_steps()
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


# Also while the first shard is written, which ends before the 17th step.
@at_steps((("parquet", "skip", True), 5), (("webdataset", "skip", True), 5))
def test_full_at_every_step(runs: Runs, stride: int) -> None:
    for step, _ in stops(stride):
        runs.reset()
        was_full = full_at(step, runs.go)
        runs.go()
        runs.check()
        if not was_full:
            break
    assert step > 20


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_step_of_pruning(tmp_path: Path, kind: str, stride: int) -> None:
    records = records_of(tmp_path / "media", NAMES)
    out, begun = tmp_path / "out", tmp_path / "begun"
    left = records[1:3]
    run(out, records, spec_of(kind, out), records_per_shard=2, captions=out / "captions")
    shutil.copytree(out, begun)
    for each in records:
        if each not in left:
            (tmp_path / "media" / each.item.name).unlink()

    def go() -> None:
        run(out, left, spec_of(kind, out), records_per_shard=2, captions=out / "captions", prune=True)

    for step, torn_bytes in stops(stride):
        shutil.rmtree(out)
        shutil.copytree(begun, out)
        was_killed = killed_at(step, go, torn_bytes=torn_bytes)
        go()
        check_left(out)
        if kind == "sidecar":
            found = sorted(path.read_text() for path in out.rglob("*.txt"))
            assert found == sorted(f"{each.caption.text}\n" for each in left)
        else:
            assert captions_of(rows_of(spec_of(kind, out))) == expected(left)
        if not was_killed:
            break
    assert step > 2


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(tmp_path: Path, kind: str) -> None:
    records = records_of(tmp_path / "media", [f"{number // 4}/{number}.png" for number in range(8)])
    chosen = random.Random(kind)
    out = tmp_path / "out"
    spec = spec_of(kind, out)

    def work() -> None:
        run(out, records, spec, records_per_shard=3, captions=out / "captions")

    kills = 0
    while killed_at(chosen.randrange(5, 20), work, torn_bytes=3):
        kills += 1
        assert kills < 200, "every run gets a little further"
    assert kills > 2
    check_left(out)
    found = sorted(path.read_text() for path in out.rglob("*.txt")) if kind == "sidecar" else captions_of(rows_of(spec))
    assert found == (sorted(f"{each.caption.text}\n" for each in records) if kind == "sidecar" else expected(records))
