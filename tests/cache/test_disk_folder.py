"""The disk tier's folder: rights, leftovers, the budget."""

from __future__ import annotations

import errno
import os
import random
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.cache.disk import DiskStore
from qwen35mm.errors import ConfigError
from tests.cache.disk_helpers import (
    KINDS,
    address_of,
    budget_for,
    bytes_in,
    file_bytes,
    file_of,
    files_in,
    holds,
    put,
    tensors_of,
)

BUDGET = 1 << 20


def numbers_in(store: DiskStore, count: int) -> list[int]:
    return [number for number in range(count) if store.contains("state", address_of(number))]


# Rights and refusals.


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_everything_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_used, written = DiskStore._mark_used, []
    monkeypatch.setattr(
        DiskStore, "_mark_used", lambda self, path: written.append(path.stat()) or mark_used(self, path)
    )
    before = os.umask(0)
    try:
        put(DiskStore(tmp_path / "new" / "cache", max_bytes=BUDGET), 0)
    finally:
        os.umask(before)
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    assert {stat.S_IMODE(info.st_mode) for info in written} == {0o600}, "while they are written, too"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_a_folder_that_was_open_to_others_is_closed_but_not_the_one_that_was_named(tmp_path: Path) -> None:
    put(DiskStore(tmp_path, max_bytes=BUDGET), 0)
    folders = [tmp_path, tmp_path / "v2"]
    for folder in folders:
        folder.chmod(0o755)
    DiskStore(tmp_path, max_bytes=BUDGET)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o755, 0o700]


def test_a_folder_that_can_not_be_used_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match=r"'file' can't be used: it is not a folder.*--cache-dir"):
        DiskStore(file, max_bytes=BUDGET)
    with pytest.raises(ConfigError, match="'below' can't be used"):
        DiskStore(file / "below", max_bytes=BUDGET)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "v2").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="'linked' can't be used: it is not a folder"):
        DiskStore(tmp_path / "linked", max_bytes=BUDGET)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        DiskStore(tmp_path, max_bytes=BUDGET)
    assert not (tmp_path / "v2").exists()


def test_without_user_ids_the_owner_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(os, "geteuid")
    store = DiskStore(tmp_path, max_bytes=BUDGET)
    put(store, 0)
    assert holds(store, 0)


@pytest.fixture
def user_s_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder, and this thread's user bound by its rights: root is let through everywhere, so root becomes nobody."""
    if os.name == "nt" or os.geteuid() != 0:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_a_read_only_folder(user_s_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(user_s_folder, max_bytes=BUDGET)
    damaged = (put(store, 0), put(store, 1))[1]
    os.truncate(file_of(user_s_folder, "state", damaged), 99)
    folders = [path for path in user_s_folder.rglob("*") if path.is_dir()]
    for folder in (user_s_folder, *folders):
        folder.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="can't be used: Permission denied"):
            DiskStore(user_s_folder, max_bytes=BUDGET)
        assert holds(store, 0)
        assert store.read("state", damaged) is None
        assert not store.write("state", address_of(2), tensors_of("state", address_of(2)))
        assert [message.split("; ")[1] for message in caplog.messages] == [
            "it can't be removed",
            "nothing is written for 60 s",
        ]
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_full_disk_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(DiskStore(tmp_path, max_bytes=BUDGET), 0)

    def fail(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", fail)
    assert holds(DiskStore(tmp_path, max_bytes=BUDGET), 0)


# Leftovers.


def test_a_killed_writer_s_file_goes_with_the_next_one_that_opens_or_writes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=BUDGET)
    unfinished, stranger = tmp_path / "v2" / "unfinished", tmp_path / "v2" / "notes.txt"
    stranger.write_text("not ours")
    unfinished.write_bytes(b"partial")
    DiskStore(tmp_path, max_bytes=BUDGET)
    assert files_in(tmp_path) == [stranger]
    unfinished.write_bytes(b"partial")
    put(store, 0)
    assert files_in(tmp_path) == [file_of(tmp_path, "state", address_of(0)), stranger]
    assert holds(store, 0)


# The budget.


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=budget_for(4))
    for number in range(4):
        put(store, number)
    assert bytes_in(tmp_path) == 4 * file_bytes()
    store.touch([("state", address_of(2)), ("state", address_of(9)), ("state", address_of(0))])
    put(store, 4)
    assert numbers_in(store, 9) == [0, 2, 3, 4]
    put(store, 3)  # it is there: that is a use
    put(store, 5)
    put(store, 6)
    assert numbers_in(store, 9) == [3, 4, 5, 6]


def test_the_order_of_one_touch_counts_and_a_read_does_not(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=budget_for(6))
    for number in range(6):
        put(store, number)
    order = [3, 5, 0, 4, 1, 2]
    store.touch([("state", address_of(number)) for number in order])
    for number in (3, 5, 0):
        assert store.read("state", address_of(number)) is not None
    for step in range(6):
        put(store, 6 + step)
        assert numbers_in(store, 6) == sorted(order[step + 1 :])


def test_the_budget_spans_kinds(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=budget_for(4))
    for number, kind in enumerate(KINDS):
        put(store, number, kind=kind)
    assert [store.addresses(kind) for kind in KINDS] == [[address_of(number)] for number in range(len(KINDS))]
    for number in range(4):
        put(store, 10 + number)
    assert [store.addresses(kind) for kind in ("kv", "vision")] == [[], []]
    assert bytes_in(tmp_path) == 4 * file_bytes()


def test_a_smaller_budget_counts_from_the_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=BUDGET)
    for number in range(8):
        put(store, number)
    large = put(store, 8, size=8192)
    smaller = DiskStore(tmp_path, max_bytes=budget_for(3))
    # What could never fit goes first, though it was used last.
    assert not smaller.contains("state", large)
    assert numbers_in(smaller, 8) == [5, 6, 7]
    DiskStore(tmp_path, max_bytes=0)
    assert files_in(tmp_path) == []


def test_sizes_of_all_sorts_stay_within_the_budget(tmp_path: Path) -> None:
    budget = 200_000
    store = DiskStore(tmp_path, max_bytes=budget)
    chosen = random.Random(5)
    fullest = 0
    for number in range(80):
        address = address_of(number)
        size = 48 * chosen.choice([1, 1, 1, 10, 100, 400, 2000])
        fits = store.write("state", address, tensors_of("state", address, size))
        assert fits == (size < 48 * 2000)
        assert bytes_in(tmp_path) <= budget
        fullest = max(fullest, bytes_in(tmp_path))
    assert fullest > budget * 3 // 4


def test_the_folder_is_not_counted_for_every_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, max_bytes=budget_for(640))
    scans = []
    files = DiskStore._files
    monkeypatch.setattr(DiskStore, "_files", lambda self: scans.append(1) or files(self))
    for number in range(100):
        put(store, number)
    assert 5 <= len(scans) <= 10
