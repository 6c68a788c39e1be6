"""Several stores in one folder: processes and threads that write, read and evict at once, and are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from qwen35mm.cache import disk
from qwen35mm.cache.disk import DiskStore
from tests.cache.disk_helpers import (
    address_of,
    budget_for,
    bytes_in,
    entries_in,
    file_bytes,
    file_of,
    files_in,
    holds,
    put,
    same,
    tensors_of,
)
from tests.forked import ForkedProcess

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")


def start_writer(directory: Path, name: str, *, budget: int, size: int, count: int) -> ForkedProcess:
    """A process that writes `count` entries named after it, and has begun."""
    writer = ForkedProcess("tests.cache.disk_writer", directory, name, budget, size, count)
    assert writer.stdout.readline() == "begins\n", writer.stderr.read()
    return writer


def wait_for(path: Path, writers: list[ForkedProcess]) -> None:
    """Returns while a writer, most likely, still writes this file: chance alone meets it seldom on a busy machine."""
    while not path.exists():
        assert all(writer.poll() is None for writer in writers), f"a writer ended, and {path.name} never came to be"


@needs_fork
@pytest.mark.parametrize("num_kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_nothing_wrong(tmp_path: Path, num_kills: int) -> None:
    # About 1 MiB an entry, and room for six or so: the writers evict too.
    size, budget = 16 << 14, 7 << 20
    chosen = random.Random(num_kills)
    num_unfinished = num_entries = 0
    for kill in range(num_kills):
        names = [f"{kill}.{number}" for number in range(1 + kill % 2)]
        writers = [start_writer(tmp_path, name, budget=budget, size=size, count=100_000) for name in names]
        if kill % 2:
            wait_for(tmp_path / "v2" / "unfinished", writers)
        else:
            time.sleep(chosen.uniform(0, 0.06))
        for writer in writers:
            writer.kill()
            assert writer.wait() == -9, "it had still been at work"

        num_unfinished += (tmp_path / "v2" / "unfinished").exists()
        store = DiskStore(tmp_path, max_bytes=budget)
        assert not (tmp_path / "v2" / "unfinished").exists()
        for kind, address in entries_in(tmp_path):
            # More than "right or a miss": under its final name a file is whole.
            assert same(store.read(kind, address), tensors_of(kind, address, size)), (kill, kind, address.hex())
            num_entries += 1
        put(store, kill, size)
        assert holds(store, kill, size)
        assert bytes_in(tmp_path) <= budget
    # Else the kills missed the writes and all of this proves nothing.
    assert num_unfinished >= max(1, num_kills // 20)
    assert num_entries >= num_kills


@needs_fork
def test_two_processes_that_write_stay_within_the_budget(tmp_path: Path) -> None:
    budget = budget_for(5)
    for rounds in range(2):
        writers = [start_writer(tmp_path, f"{rounds}.{n}", budget=budget, size=48, count=25) for n in range(2)]
        assert [writer.wait() for writer in writers] == [0, 0]
        assert 3 * file_bytes() < bytes_in(tmp_path) <= budget
    store = DiskStore(tmp_path, max_bytes=budget)
    for kind, address in entries_in(tmp_path):
        assert same(store.read(kind, address), tensors_of(kind, address))


def test_a_reader_goes_on_while_another_store_evicts(tmp_path: Path) -> None:
    size = 48 * 1000
    budget = 12 * 8 * size
    reader, writer = (DiskStore(tmp_path, max_bytes=budget) for _ in range(2))
    counts = {True: 0, False: 0}
    wrong: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        chosen = random.Random(1)
        while not done.is_set():
            address = address_of(chosen.randrange(60))
            entry = reader.read("state", address)
            counts[entry is not None] += 1
            if entry is not None and not same(entry, tensors_of("state", address, size)):
                wrong.append(address)
            reader.touch([("state", address_of(chosen.randrange(60)))])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        # Until the reader has found an entry and missed one, which on a busy machine takes more rounds.
        for number in range(20_000):
            if number >= 180 and min(counts.values()) > 0:
                break
            put(writer, number % 60, size)
    finally:
        done.set()
        thread.join()
    assert wrong == []
    assert min(counts.values()) > 0
    assert bytes_in(tmp_path) <= budget


def test_a_store_that_opens_waits_for_a_writer_and_takes_nothing_from_it(tmp_path: Path) -> None:
    """What is unfinished is another's leftover only for whoever holds the lock."""
    writer = DiskStore(tmp_path, max_bytes=1 << 20)
    with writer._writing():
        writer._unfinished.write_bytes(b"half")
        opening = threading.Thread(target=DiskStore, args=(tmp_path,), kwargs={"max_bytes": 1 << 20})
        opening.start()
        opening.join(0.1)
        assert opening.is_alive()
        assert writer._unfinished.read_bytes() == b"half"
    opening.join()


def test_a_lock_that_is_never_given_back_costs_writes_and_not_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a process that was stopped in the middle of writing."""
    monkeypatch.setattr(disk, "LOCK_TIMEOUT_S", 0.1)
    stopped = DiskStore(tmp_path, max_bytes=1 << 20)
    put(stopped, 0)
    with stopped._writing():
        found = []

        def use() -> None:
            store = DiskStore(tmp_path, max_bytes=1 << 20)
            found.extend([holds(store, 0), store.write("state", address_of(1), tensors_of("state", address_of(1)))])

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert found == [True, False]
    assert len(caplog.messages) == 2
    assert files_in(tmp_path) == [file_of(tmp_path, "state", address_of(0))]
