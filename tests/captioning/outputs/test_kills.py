"""Every output, killed and out of room at every step: the next run leaves each item once, whole, and nothing else."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from qwen35mm.captioning.outputs import Wants
from tests.captioning.outputs.helpers import HARD_NAMES, captions_of, expected, leftovers, records_of, rows_of, run
from tests.captioning.outputs.steps import full_at, killed_at

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a killed process is made by a fork")

KINDS = ("jsonl", "dataset", "parquet", "webdataset")
NAMES = HARD_NAMES[2:7]


def check(out: Path, spec: str, records: list) -> None:
    assert captions_of(rows_of(spec)) == expected(records)
    assert leftovers(out) == []
    assert list(out.rglob("*.before-*")) == [], "what a killed run left is known for our own"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("torn_bytes", [0, 5])
def test_killed_at_every_step(tmp_path: Path, kind: str, torn_bytes: int) -> None:
    records = records_of(tmp_path / "media", NAMES)
    for step in itertools.count():
        out = tmp_path / f"out{step}"
        spec = f"{kind}:{out / 'captions'}"
        was_killed = killed_at(
            step, lambda out=out, spec=spec: run(out, records, spec, records_per_shard=2), torn_bytes=torn_bytes
        )
        if step % 2:
            run(out, [], spec)
            assert leftovers(out) == [], "also where nothing is written again"
        run(out, records, spec, records_per_shard=2)
        check(out, spec, records)
        assert run(out, records, spec, records_per_shard=2) == [Wants.DONE] * len(records)
        shutil.rmtree(out)
        if not was_killed:
            break
    assert step > 20, "the steps were counted"


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_step_of_a_run_with_new_captions(tmp_path: Path, kind: str) -> None:
    """Some captions are replaced, one medium was renamed, one is new, and the last shard grows."""
    old = records_of(tmp_path / "media", NAMES[:3])
    begun = tmp_path / "begun"
    new = [*old[:1], *records_of(tmp_path / "media", NAMES, "second")[1:]]
    out = tmp_path / "out"
    spec = f"{kind}:{out / 'captions'}"
    run(out, old, spec, records_per_shard=2)
    out.rename(begun)
    for step in itertools.count():
        shutil.copytree(begun, out)
        was_killed = killed_at(step, lambda: run(out, new, spec, records_per_shard=2), torn_bytes=step % 2 * 7)
        run(out, new, spec, records_per_shard=2)
        check(out, spec, new)
        shutil.rmtree(out)
        if not was_killed:
            break
    assert step > 20


@pytest.mark.parametrize("kind", KINDS)
def test_full_at_every_step(tmp_path: Path, kind: str) -> None:
    old = records_of(tmp_path / "media", NAMES[:3])
    new = [*old[:1], *records_of(tmp_path / "media", NAMES, "second")[1:]]
    for step in itertools.count():
        out = tmp_path / f"out{step}"
        spec = f"{kind}:{out / 'captions'}"
        was_full = full_at(step, lambda out=out, spec=spec: run(out, old, spec, records_per_shard=2))
        was_full |= full_at(step, lambda out=out, spec=spec: run(out, new, spec, records_per_shard=2))
        run(out, new, spec, records_per_shard=2)
        check(out, spec, new)
        shutil.rmtree(out)
        if not was_full:
            break
    assert step > 20


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(tmp_path: Path, kind: str) -> None:
    records = records_of(tmp_path / "media", [f"{number // 7}/{number}.png" for number in range(30)])
    chosen = random.Random(kind)
    out = tmp_path / "out"
    spec = f"{kind}:{out / 'captions'}"
    kills = 0
    while killed_at(chosen.randrange(1, 60), lambda: run(out, records, spec, records_per_shard=4), torn_bytes=3):
        kills += 1
        assert kills < 200, "every run gets a little further"
    assert kills > 2
    check(out, spec, records)
