"""kill -9 at random moments while the disk tier writes: what is found afterwards is right or isn't there."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.cache.disk import DiskStore
from qwen35mm.cache.disk_format import Label, pack
from tests.cache.disk_children import Children
from tests.cache.disk_helpers import (
    METADATA,
    ROOT,
    address_of,
    budget_for,
    bytes_in,
    entries_in,
    file_bytes,
    same,
    temporaries_in,
    tensors_of,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")

# About 3 MiB an entry, and room for six of them: the children evict too.
SIZE = 48 << 14
BUDGET = 6 * (4 << 20)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    children = Children()
    yield children
    children.close()


def is_complete(temporary: Path) -> bool:
    """Whether everything was in a temporary file already, so that only its rename was left."""
    address, kind, _ = temporary.name.split(".")
    assert kind in ("kv", "state", "vision")
    label = Label(kind, bytes.fromhex(address), ROOT)
    whole = io.BytesIO()
    pack(tensors_of(kind, label.address, SIZE), METADATA, label).write_to(whole)
    return temporary.read_bytes() == whole.getvalue()


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_nothing_wrong(tmp_path: Path, children: Children, kills: int) -> None:
    chosen = random.Random(kills)
    num_partial = num_entries = 0
    for kill in range(kills):
        running = [
            children.start(tmp_path, f"{kill}.{writer}", max_bytes=BUDGET, size=SIZE, count=100_000)
            for writer in range(1 + kill % 2)
        ]
        time.sleep(chosen.uniform(0, 0.06))
        for child in running:
            children.kill(child)

        num_partial += sum(not is_complete(path) for path in temporaries_in(tmp_path))
        store = DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)
        assert temporaries_in(tmp_path) == []
        for kind, address in entries_in(tmp_path):
            # More than "right or a miss": under its final name a file is whole.
            assert same(store.read(kind, address), tensors_of(kind, address, SIZE)), (kill, kind, address.hex())
            num_entries += 1

        after = address_of("after", kill)
        assert store.write("state", after, tensors_of("state", after, SIZE), {})
        assert same(store.read("state", after), tensors_of("state", after, SIZE))
        assert bytes_in(tmp_path) <= BUDGET
    # Else the kills missed the writes and all of this proves nothing.
    assert num_partial >= kills // 20
    assert num_entries >= kills


def test_two_processes_that_write_stay_within_the_budget(tmp_path: Path, children: Children) -> None:
    budget = budget_for(5)
    for rounds in range(3):
        running = [
            children.start(tmp_path, f"{rounds}.{writer}", max_bytes=budget, size=48, count=40) for writer in range(2)
        ]
        assert [children.wait(child) for child in running] == [0, 0]
        assert 3 * file_bytes() < bytes_in(tmp_path) <= budget
        assert temporaries_in(tmp_path) == []
    store = DiskStore(tmp_path, root=ROOT, max_bytes=budget)
    for kind, address in entries_in(tmp_path):
        assert same(store.read(kind, address), tensors_of(kind, address))
