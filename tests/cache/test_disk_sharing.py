"""Several stores in one folder: threads and processes that write, read and evict at once."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from qwen35mm.cache import disk_file, disk_folder
from qwen35mm.cache.disk import DiskStore
from tests.cache.disk_helpers import (
    ROOT,
    address_of,
    budget_for,
    bytes_in,
    entries_in,
    file_of,
    files_in,
    put,
    same,
    temporaries_in,
    tensors_of,
)

BUDGET = 1 << 20


def test_two_writers_that_reserve_at_once_stay_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst order: the second store writes between the first one's reservation and its count."""
    budget = budget_for(3)
    first, second = (DiskStore(tmp_path, root=ROOT, max_bytes=budget) for _ in range(2))
    for number in range(3):
        put(first, number)
    make_room, nested, highest = first._folder._make_room, iter(range(10, 20)), []

    def interleaved(num_bytes: int) -> None:
        put(second, next(nested))
        make_room(num_bytes)
        highest.append(bytes_in(tmp_path))

    monkeypatch.setattr(first._folder, "_make_room", interleaved)
    for number in range(3, 8):
        put(first, number)
        assert bytes_in(tmp_path) <= budget
    assert len(highest) == 5
    assert max(highest) <= budget


def test_a_folder_that_another_process_removes_while_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one opens the cache, and tidies it, between the making of the folder and its first file."""
    store = DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)
    make_folders, num_removed = disk_file.make_folders, 0

    def make_and_lose(folder: Path) -> None:
        nonlocal num_removed
        make_folders(folder)
        if num_removed < 2:
            folder.rmdir()
            num_removed += 1

    monkeypatch.setattr(disk_file, "make_folders", make_and_lose)
    put(store, 0)
    assert num_removed == 2
    assert same(store.read("state", address_of(0)), tensors_of("state", address_of(0)))


def test_a_file_that_is_renamed_during_the_count_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing still had its temporary name, and at a look that is gone."""
    store = DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)
    path = file_of(tmp_path, "state", address_of(0))
    list_items = disk_folder._items
    with store._folder.writing(path, 1000):
        (temporary,) = temporaries_in(tmp_path)

        def rename_after_listing(folder: Path) -> list[os.DirEntry[str]]:
            items = list_items(folder)
            if folder == path.parent and temporary.exists():
                temporary.rename(path)
            return items

        monkeypatch.setattr(disk_folder, "_items", rename_after_listing)
        assert store.num_bytes == 1000
        path.rename(temporary)


def test_a_budget_full_of_another_s_unfinished_files_is_a_failed_write(tmp_path: Path) -> None:
    budget = budget_for(3)
    first, second = (DiskStore(tmp_path, root=ROOT, max_bytes=budget) for _ in range(2))
    with second._folder.writing(file_of(tmp_path, "kv", address_of(1)), budget - 10):
        assert not first.write("state", address_of(0), tensors_of("state", address_of(0)), {})
        assert len(files_in(tmp_path)) == 1


def test_a_reader_goes_on_while_another_store_evicts(tmp_path: Path) -> None:
    size = 48 * 1000
    budget = 12 * 8 * size
    reader, writer = (DiskStore(tmp_path, root=ROOT, max_bytes=budget) for _ in range(2))
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
        for number in range(180):
            put(writer, number % 60, size)
    finally:
        done.set()
        thread.join()
    assert wrong == []
    assert min(counts.values()) > 0
    assert bytes_in(tmp_path) <= budget


def test_two_threads_that_write_into_one_folder_stay_within_the_budget(tmp_path: Path) -> None:
    budget = budget_for(5)
    stores = [DiskStore(tmp_path, root=ROOT, max_bytes=budget) for _ in range(2)]
    for start in range(0, 180, 30):
        threads = [
            threading.Thread(target=lambda s=store, n=n: [put(s, start + 15 * n + i) for i in range(15)])  # noqa: B023
            for n, store in enumerate(stores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bytes_in(tmp_path) <= budget
        assert temporaries_in(tmp_path) == []
    kept = list(entries_in(tmp_path))
    assert kept
    assert all(same(stores[0].read(kind, address), tensors_of(kind, address)) for kind, address in kept)
