from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qwen35mm.cache import disk
from qwen35mm.cache.disk import DiskStore, Kind
from qwen35mm.cache.disk_format import KINDS, PackedEntry
from qwen35mm.errors import ConfigError
from tests.cache.disk_helpers import (
    METADATA,
    OTHER_ROOT,
    ROOT,
    address_of,
    file_of,
    files_in,
    put,
    same,
    temporaries_in,
    tensors_of,
)

BUDGET = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "qwen35mm")
    return caplog


def is_right(store: DiskStore, kind: Kind, address: bytes, size: int = 48) -> bool:
    entry = store.read(kind, address)
    return same(entry, tensors_of(kind, address, size)) and entry is not None and entry.metadata == METADATA


def expect_removed(store: DiskStore, address: bytes, path: Path, log: pytest.LogCaptureFixture, why: str = "") -> None:
    """A miss, the file gone, one line that says why; a second look is a silent miss, and writing again works."""
    log.clear()
    assert store.read("state", address) is None
    assert not os.path.lexists(path)
    assert len(log.messages) == 1
    assert path.name in log.messages[0]
    assert why in log.messages[0]
    assert "removed" in log.messages[0]
    assert store.read("state", address) is None
    assert not store.contains("state", address)
    assert len(log.messages) == 1
    assert store.write("state", address, tensors_of("state", address), METADATA)
    assert is_right(store, "state", address)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_comes_back_as_it_was_also_after_a_restart(
    store: DiskStore, tmp_path: Path, kind: Kind, log: pytest.LogCaptureFixture
) -> None:
    address = address_of(0)
    assert store.read(kind, address) is None
    assert not store.contains(kind, address)
    put(store, 0, kind=kind)
    for reader in (store, DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)):
        assert reader.contains(kind, address)
        assert is_right(reader, kind, address)
        assert not any(reader.contains(other, address) for other in KINDS if other != kind)
    assert files_in(tmp_path) == [file_of(tmp_path, kind, address)]
    assert log.messages == []


def test_writing_again_keeps_what_is_there(store: DiskStore, tmp_path: Path) -> None:
    address = put(store, 0)
    before = file_of(tmp_path, "state", address).stat().st_ino
    assert store.write("state", address, tensors_of("state", address), {"length": "other"})
    assert file_of(tmp_path, "state", address).stat().st_ino == before
    assert is_right(store, "state", address)


def test_a_removed_entry_is_gone(store: DiskStore) -> None:
    address = put(store, 0)
    kv = put(store, 0, kind="kv")
    store.remove("state", address)
    store.remove("state", address)
    assert not store.contains("state", address)
    assert is_right(store, "kv", kv)


def test_every_truncation_is_a_miss(store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """At a head's, a header's and the data's every edge; test_disk_format.py tries every byte of the format."""
    address = put(store, 0)
    path = file_of(tmp_path, "state", address)
    content = path.read_bytes()
    header_end = 48 + 8 + int.from_bytes(content[48:56], "little")
    assert header_end < len(content) - 8
    edges = [0, 8, 16, 48, 56, header_end, len(content)]
    lengths = {edge + step for edge in edges for step in (-1, 0, 1)} | {300, (header_end + len(content)) // 2}
    for length in sorted(lengths - {-1, len(content)}):
        path.write_bytes((content + b"\0")[:length])
        expect_removed(store, address, path, log)


def test_every_flipped_byte_is_a_miss(store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    address = put(store, 0)
    path = file_of(tmp_path, "state", address)
    content = path.read_bytes()
    for offset in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        expect_removed(store, address, path, log)


def test_damage_in_the_middle_of_a_large_file_is_a_miss(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, root=ROOT, max_bytes=64 << 20)
    address = put(store, 0, size=1 << 20)
    path = file_of(tmp_path, "state", address)
    size = path.stat().st_size
    assert size > 4 << 20
    with path.open("r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 4]))
    expect_removed(store, address, path, log, "damaged")


def test_files_of_something_else_are_misses(store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    address, other = put(store, 0), put(store, 1)
    kv = put(store, 2, kind="kv")
    foreign = DiskStore(tmp_path, root=OTHER_ROOT, max_bytes=BUDGET)
    put(foreign, 0)
    path = file_of(tmp_path, "state", address)
    for source, why in (
        (file_of(tmp_path, "state", other), "another address"),
        (file_of(tmp_path, "kv", kv), "another kind"),
        (file_of(tmp_path, "state", address, OTHER_ROOT), "another root"),
    ):
        shutil.copy(source, path)
        expect_removed(store, address, path, log, why)
        assert source.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_a_miss(
    store: DiskStore, tmp_path: Path, value: float, log: pytest.LogCaptureFixture
) -> None:
    address = address_of(0)
    tensors = tensors_of("state", address)
    tensors["conv"][-1, -1, -1] = value
    assert store.write("state", address, tensors, {})
    expect_removed(store, address, file_of(tmp_path, "state", address), log, "not finite in 'conv'")


def test_links_and_pipes_are_removed_and_never_followed(
    store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    address = put(store, 0)
    path = file_of(tmp_path, "state", address)
    outside = tmp_path / "outside"
    path.rename(outside)

    def link() -> None:
        path.symlink_to(outside)

    def dangling_link() -> None:
        path.symlink_to(tmp_path / "nowhere")

    def pipe() -> None:
        os.mkfifo(path)

    for make in (link, dangling_link, pipe):
        make()
        assert not store.contains("state", address)
        found = []
        # A daemon, so that a reader that waits for the pipe's writer fails the test and doesn't hang it.
        reader = threading.Thread(target=lambda found=found: found.append(store.read("state", address)), daemon=True)
        reader.start()
        reader.join(30)
        assert found == [None], make.__name__
        assert not os.path.lexists(path)
        make()
        assert store.write("state", address, tensors_of("state", address), METADATA)
        assert path.is_file()
        assert not path.is_symlink()
        path.unlink()
        make()
        expect_removed(store, address, path, log, "not a regular file")
        path.unlink()
    assert outside.is_file()


def test_a_folder_in_a_file_s_place_is_a_miss_and_stays(
    store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    address = address_of(0)
    path = file_of(tmp_path, "state", address)
    path.mkdir(parents=True)
    assert not store.contains("state", address)
    assert store.read("state", address) is None
    assert ["can't be removed" in message for message in log.messages] == [True]
    log.clear()
    assert not store.write("state", address, tensors_of("state", address), METADATA)
    assert len(log.messages) == 1
    assert path.is_dir()
    assert temporaries_in(tmp_path) == []


@pytest.mark.parametrize("level", ["shard", "root"])
def test_linked_folders_are_not_entered(tmp_path: Path, level: str) -> None:
    store = DiskStore(tmp_path / "cache", root=ROOT, max_bytes=BUDGET)
    address = put(store, 0)
    folder = file_of(tmp_path / "cache", "state", address).parent
    folder = folder if level == "shard" else folder.parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert not store.contains("state", address)
    assert store.read("state", address) is None
    assert not store.write("state", address, tensors_of("state", address), METADATA)
    store.touch([("state", address)])
    store.remove("state", address)
    assert store.num_bytes == 0
    assert len(files_in(tmp_path / "moved")) == 1


def test_a_file_over_the_budget_is_not_read(store: DiskStore, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    address = put(store, 0)
    path = file_of(tmp_path, "state", address)
    os.truncate(path, BUDGET + 1)
    expect_removed(store, address, path, log, "within the budget")


def test_a_read_that_fails_for_another_reason_keeps_the_file(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Too many open files says nothing about this one."""
    address = put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _failing(OSError(errno.EMFILE, "Too many open files")))
        assert store.read("state", address) is None
    assert [message.endswith("can't be read (Too many open files)") for message in log.messages] == [True]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _failing(RuntimeError("can't allocate memory")))
        assert store.read("state", address) is None
    assert "(MemoryError)" in log.messages[1]
    assert is_right(store, "state", address)


def _failing(error: Exception) -> Callable[..., None]:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


def _write_half(packed: PackedEntry, file) -> None:
    file.write(bytes(packed.num_bytes // 2))
    file.flush()
    raise FULL


@pytest.mark.parametrize("where", ["reserve", "write", "mark", "replace"])
def test_a_full_disk_stops_writing_for_a_while(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    store = DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET, clock=lambda: now)
    kept, address = put(store, 0), address_of(1)
    with monkeypatch.context() as patch:
        owner, name, fails = {
            "reserve": (os, "ftruncate", _failing(FULL)),
            "write": (PackedEntry, "write_to", _write_half),
            "mark": (os, "utime", _failing(FULL)),
            "replace": (Path, "replace", _failing(FULL)),
        }[where]
        patch.setattr(owner, name, fails)
        assert not store.write("state", address, tensors_of("state", address), METADATA)
    assert log.messages == ["disk cache: writing failed (No space left on device); nothing is written for 60 s"]
    assert files_in(tmp_path) == [file_of(tmp_path, "state", kept)]
    now += disk.WRITE_PAUSE_S - 1
    assert not store.write("state", address, tensors_of("state", address), METADATA)
    # What is there already needs no writing, and reading goes on.
    assert store.write("state", kept, tensors_of("state", kept), METADATA)
    assert is_right(store, "state", kept)
    now += 1
    assert store.write("state", address, tensors_of("state", address), METADATA)
    assert is_right(store, "state", address)
    assert len(log.messages) == 1


def test_the_system_s_own_limit_leaves_nothing_behind(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    store = DiskStore(tmp_path, root=ROOT, max_bytes=BUDGET)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        address = address_of(0)
        assert not store.write("state", address, tensors_of("state", address, 4096), METADATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["File too large" in message for message in log.messages] == [True]
    assert files_in(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedEntry, "write_to", _failing(KeyboardInterrupt()))  # pyright: ignore[reportArgumentType]
    address = address_of(0)
    with pytest.raises(KeyboardInterrupt):
        store.write("state", address, tensors_of("state", address), METADATA)
    assert files_in(tmp_path) == []


def test_an_entry_larger_than_the_budget_is_not_written(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, root=ROOT, max_bytes=8192)
    kept = put(store, 0)
    for number in (1, 2):
        address = address_of(number)
        assert not store.write("state", address, tensors_of("state", address, 4096), METADATA)
    assert ["may take 8192" in message for message in log.messages] == [True]
    # It pushed nothing out, and nothing is paused.
    assert is_right(store, "state", kept)
    put(store, 3)


def test_a_cache_that_was_cleared_under_us_is_made_again(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path / "a" / "b", root=ROOT, max_bytes=BUDGET)
    address = put(store, 0)
    shutil.rmtree(tmp_path / "a")
    assert store.read("state", address) is None
    assert (store.num_bytes, store.other_roots()) == (0, [])
    store.touch([("state", address)])
    put(store, 0)
    assert is_right(store, "state", address)
    assert log.messages == []


def test_misuse_is_an_error(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        DiskStore(tmp_path, root=b"short", max_bytes=1)
    with pytest.raises(ConfigError, match="0 bytes or more; got -1"):
        DiskStore(tmp_path, root=ROOT, max_bytes=-1)
    with pytest.raises(ValueError, match="32 bytes"):
        store.contains("kv", b"../../etc/passwd")
    with pytest.raises(ValueError, match="kind"):
        store.read("../kv", ROOT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="complex64"):
        store.write("kv", ROOT, {"k": torch.zeros(1, dtype=torch.complex64)}, {})
