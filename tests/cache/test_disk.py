from __future__ import annotations

import errno
import io
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.cache import disk
from qwen35mm.cache.disk import DiskStore, Kind, is_finite
from qwen35mm.errors import ConfigError
from tests.cache.disk_helpers import KINDS, address_of, file_of, files_in, holds, put, same, tensors_of

BUDGET = 1 << 20
ADDRESS = address_of(0)
Spoil = Callable[[Path], object]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, max_bytes=BUDGET)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "qwen35mm")
    return caplog


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_comes_back_as_it_was_also_after_a_restart(
    store: DiskStore, tmp_path: Path, kind: Kind, log: pytest.LogCaptureFixture
) -> None:
    address = address_of(0)
    assert store.read(kind, address) is None
    assert not store.contains(kind, address)
    put(store, 0, kind=kind)
    for reader in (store, DiskStore(tmp_path, max_bytes=BUDGET)):
        assert reader.contains(kind, address)
        assert holds(reader, 0, kind=kind)
        assert not any(reader.contains(other, address) for other in KINDS if other != kind)
    assert files_in(tmp_path) == [file_of(tmp_path, kind, address)]
    assert log.messages == []


def test_any_tensors_come_back_bit_for_bit(store: DiskStore) -> None:
    base = torch.arange(-60, 60).to(torch.bfloat16).view(2, 3, 4, 5)
    extremes = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, -0.0])
    tensors = {"strided": base.transpose(0, 2)[::2], "extremes": extremes, "ids": torch.tensor([2**62, -1])}
    assert store.write("kv", address_of(0), tensors)
    assert same(store.read("kv", address_of(0)), tensors)


def test_a_file_is_a_checksum_and_a_safetensors_image(store: DiskStore, tmp_path: Path) -> None:
    address = put(store, 0)
    image = file_of(tmp_path, "state", address).read_bytes()[32:]
    assert same(safetensors.torch.load(image), tensors_of("state", address))


def test_writing_again_keeps_what_is_there(store: DiskStore, tmp_path: Path) -> None:
    address = put(store, 0)
    before = file_of(tmp_path, "state", address).stat().st_ino
    assert store.write("state", address, tensors_of("state", address_of(1)))
    assert file_of(tmp_path, "state", address).stat().st_ino == before
    assert holds(store, 0)


def test_a_removed_entry_is_gone(store: DiskStore) -> None:
    address = put(store, 0)
    put(store, 0, kind="kv")
    store.remove("state", address)
    store.remove("state", address)
    assert not store.contains("state", address)
    assert holds(store, 0, kind="kv")


def test_every_truncation_and_every_flipped_byte_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    address = put(store, 0)
    path = file_of(tmp_path, "state", address)
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))]
    damaged += [content + b"\0", content + content, b"\0" + content]
    for offset in range(len(content)):
        damaged += [content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :] for mask in (1, 0x80)]
    for wrong in damaged:
        path.write_bytes(wrong)
        assert store.read("state", address) is None
        assert not path.exists()


def image_of(header: str, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


def with_value(value: float) -> bytes:
    tensors = tensors_of("state", ADDRESS)
    tensors["conv"][-1, -1, -1] = value
    return safetensors.torch.save(tensors)


def forge(image: bytes) -> Spoil:
    """Another content with a right checksum."""
    return lambda path: path.write_bytes(disk._checksum("state", ADDRESS, image) + image)


def copy_of(kind: Kind, number: int) -> Spoil:
    return lambda path: shutil.copy(file_of(path.parents[1], kind, address_of(number)), path)


def link(path: Path) -> None:
    path.replace(path.parents[1] / "outside")
    path.symlink_to(path.parents[1] / "outside")


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[1] / "nowhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NOT_REGULAR: tuple[Spoil, ...] = (link, dangling_link, pipe)
FORGED = (
    b"",
    b"\xff" * 8,
    (2**63).to_bytes(8, "little") + b"{}",
    image_of("no json"),
    image_of("[]"),
    image_of('{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', bytes(8)),
    image_of('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', bytes(16)),
    image_of('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(7)),
)
WRONG: dict[str, tuple[Spoil, str]] = {
    "cut": (lambda path: os.truncate(path, 99), "damaged"),
    "over the budget": (lambda path: os.truncate(path, BUDGET + 1), "within the budget"),
    "of another address": (copy_of("state", 1), "another entry's"),
    "of another kind": (copy_of("kv", 0), "another entry's"),
    **{f"forged {n}": (forge(image), "not a safetensors image") for n, image in enumerate(FORGED)},
    **{f"with {x}": (forge(with_value(x)), "not finite in 'conv'") for x in (math.nan, math.inf, -math.inf)},
    **{make.__name__: (make, "not a regular file") for make in NOT_REGULAR},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_a_miss_told_once_removed_and_written_anew(
    store: DiskStore, tmp_path: Path, name: str, log: pytest.LogCaptureFixture
) -> None:
    put(store, 0)
    put(store, 1)
    put(store, 0, kind="kv")
    path = file_of(tmp_path, "state", ADDRESS)
    spoil, why = WRONG[name]
    spoil(path)
    found = []
    # A daemon, so that a reader that waits for the pipe's writer fails the test and doesn't hang it.
    reader = threading.Thread(target=lambda: found.append(store.read("state", ADDRESS)), daemon=True)
    reader.start()
    reader.join(30)
    assert found == [None]
    assert not os.path.lexists(path)
    (line,) = log.messages
    assert path.name in line
    assert why in line
    assert "removed" in line
    assert (tmp_path / "outside").exists() == (spoil is link)
    assert store.read("state", ADDRESS) is None
    assert not store.contains("state", ADDRESS)
    assert len(log.messages) == 1, "a second look is a silent miss"
    put(store, 0)
    assert all([holds(store, 0), holds(store, 1), holds(store, 0, kind="kv")])


@pytest.mark.parametrize("make", NOT_REGULAR)
def test_links_and_pipes_are_replaced_and_never_followed(store: DiskStore, tmp_path: Path, make: Spoil) -> None:
    put(store, 0)
    path, outside = file_of(tmp_path, "state", ADDRESS), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    make(path)
    assert not store.contains("state", ADDRESS)
    put(store, 0)
    assert path.is_file()
    assert not path.is_symlink()
    assert outside.read_bytes() == path.read_bytes()
    assert not (tmp_path / "nowhere").exists()


@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 700),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1.0]),
)
def test_finiteness_agrees_with_torch(dtype: torch.dtype, length: int, where: float, value: float) -> None:
    """Vectorised minima and maxima treat the ends of a row apart, and NaN is easily lost in a comparison."""
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    tensor[int(where * length)] = value
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


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
    assert not store.write("state", address, tensors_of("state", address))
    assert len(log.messages) == 1
    assert path.is_dir()
    assert files_in(tmp_path) == []


def test_a_read_that_fails_for_another_reason_keeps_the_file(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Too many open files says nothing about this one."""
    address = put(store, 0)
    for error, words in ((OSError(errno.EMFILE, "Too many open files"), "Too many open files"), (MemoryError(), "Mem")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", _failing(error))
            assert store.read("state", address) is None
        assert f"can't be read ({words}" in log.messages[-1]
    assert holds(store, 0)


def _failing(error: BaseException) -> Callable[..., None]:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


def _write_half(path: Path, mode: str, **options: Any) -> IO[bytes]:
    """Opens a file that takes a few bytes and then no more."""
    file = io.open(path, mode, buffering=0, **options)  # noqa: SIM115, UP020
    file.write(b"half")
    file.write = _failing(FULL)  # pyright: ignore[reportAttributeAccessIssue]
    return file


@pytest.mark.parametrize("where", ["write", "mark", "replace"])
def test_a_full_disk_stops_writing_for_a_while(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    store = DiskStore(tmp_path, max_bytes=BUDGET, clock=lambda: now)
    kept, address = put(store, 0), address_of(1)
    with monkeypatch.context() as patch:
        owner, name, fails = {
            "write": (disk, "open", _write_half),
            "mark": (os, "utime", _failing(FULL)),
            "replace": (Path, "replace", _failing(FULL)),
        }[where]
        patch.setattr(owner, name, fails, raising=False)
        assert not store.write("state", address, tensors_of("state", address))
    assert log.messages == ["disk cache: writing failed (No space left on device); nothing is written for 60 s"]
    assert files_in(tmp_path) == [file_of(tmp_path, "state", kept)]
    now += disk.WRITE_PAUSE_S - 1
    assert not store.write("state", address, tensors_of("state", address))
    # What is there already needs no writing, and reading goes on.
    assert store.write("state", kept, tensors_of("state", kept))
    assert holds(store, 0)
    now += 1
    assert store.write("state", address, tensors_of("state", address))
    assert holds(store, 1)
    assert len(log.messages) == 1


def test_the_system_s_own_limit_leaves_nothing_behind(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    store = DiskStore(tmp_path, max_bytes=BUDGET)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        address = address_of(0)
        assert not store.write("state", address, tensors_of("state", address, 4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["File too large" in message for message in log.messages] == [True]
    assert files_in(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", _failing(KeyboardInterrupt()))
    address = address_of(0)
    with pytest.raises(KeyboardInterrupt):
        store.write("state", address, tensors_of("state", address))
    assert files_in(tmp_path) == []


def test_an_entry_larger_than_the_budget_is_not_written(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, max_bytes=8192)
    put(store, 0)
    for number in (1, 2):
        address = address_of(number)
        assert not store.write("state", address, tensors_of("state", address, 4096))
    assert ["may take 8192" in message for message in log.messages] == [True]
    # It pushed nothing out, and nothing is paused.
    assert holds(store, 0)
    put(store, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_entries_of_a_clock_that_was_ahead_make_room(
    restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = DiskStore(tmp_path, max_bytes=8 * 1024), time.time_ns()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now + 10**18)
        for number in range(8):
            put(store, number, 192)
    if restarts:
        store = DiskStore(tmp_path, max_bytes=8 * 1024)
    for number in range(100, 120):
        put(store, number, 192)
    kept = [number for number in (*range(8), *range(100, 120)) if store.contains("state", address_of(number))]
    assert len(kept) > 2
    assert kept == list(range(120 - len(kept), 120))


def test_a_cache_that_was_cleared_under_us_is_made_again(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path / "a" / "b", max_bytes=BUDGET)
    address = put(store, 0)
    shutil.rmtree(tmp_path / "a")
    assert store.read("state", address) is None
    assert store.addresses("state") == []
    store.touch([("state", address)])
    put(store, 0)
    assert holds(store, 0)
    assert log.messages == []


def test_a_budget_is_no_negative_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 bytes or more; got -1"):
        DiskStore(tmp_path, max_bytes=-1)
