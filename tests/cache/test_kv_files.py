"""Keys and values in a file: nobody finds it, its room is taken before it is used, and it counts as no memory."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from qwen35mm.cache import kv_files
from qwen35mm.cache.kv_files import file_room, map_tensors, mapped_bytes
from qwen35mm.errors import ConfigError
from qwen35mm.model_library.memory import resident_bytes
from tests.forked import ForkedProcess

MIB, GIB = 1 << 20, 1 << 30
SHAPES = [((100, 2, 24), torch.bfloat16), ((3, 5), torch.uint8), ((64, 4, 8), torch.float32)]

linux = pytest.mark.skipif(sys.platform != "linux", reason="by Linux' own lists")


def test_tensors_lie_apart_and_outlive_the_mapping(tmp_path: Path) -> None:
    tensors = map_tensors(tmp_path, SHAPES)
    assert [(tuple(each.shape), each.dtype) for each in tensors] == SHAPES
    for number, each in enumerate(tensors):
        assert not each.any()
        each.fill_(number + 1)
    for number, each in enumerate(tensors):
        assert torch.equal(each, torch.full_like(each, number + 1))
        assert each.data_ptr() % 64 == 0


@linux
def test_its_room_is_taken_and_nobody_else_can_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, seen = mmap.mmap, []

    def spy(descriptor: int, length: int) -> mmap.mmap:
        seen.append(os.fstat(descriptor))
        return mapped(descriptor, length)

    monkeypatch.setattr(kv_files.mmap, "mmap", spy)
    folder = tmp_path / "not" / "there"
    tensors = map_tensors(folder, [((4 * MIB,), torch.uint8)])
    (file,) = seen
    assert (file.st_nlink, file.st_mode & 0o777, folder.stat().st_mode & 0o777) == (0, 0o600, 0o700)
    assert file.st_blocks * 512 >= 4 * MIB
    assert len(tensors) == 1
    assert list(folder.iterdir()) == []
    monkeypatch.delattr(os, "posix_fallocate")
    map_tensors(folder, [((3 * MIB + 5,), torch.uint8)])
    assert seen[1].st_blocks * 512 >= seen[1].st_size >= 3 * MIB + 5
    assert list(folder.iterdir()) == []


@linux
def test_a_folder_that_cant_hold_it_is_told_with_its_size(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"a file of 200\.0 MiB in '.*': File too large\. Take a shorter context"):
            map_tensors(tmp_path, [((200 * MIB,), torch.uint8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be kept in a file"):
        map_tensors(tmp_path / "file", SHAPES)


@linux
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    process = ForkedProcess("tests.cache.test_kv_files", tmp_path)
    assert process.stdout.readline() == "written\n"
    names = [each.path for each in psutil.Process(process.pid).memory_maps(grouped=False)]
    assert any(name.startswith(f"{tmp_path / kv_files.PREFIX}") for name in names)
    assert list(tmp_path.iterdir()) == []
    process.kill()
    assert process.wait() == -9
    assert list(tmp_path.iterdir()) == []


def test_the_room_of_a_folder_that_isnt_there_yet_is_its_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="ext4")])
    for free, room in ((100 * GIB, 90 * GIB), (12 * GIB, 10 * GIB), (1 * GIB, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert file_room(tmp_path / "a" / "b") == room
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=tmp_path, fstype="tmpfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * GIB))
    assert file_room(tmp_path / "a") == 0
    assert file_room(tmp_path.parent) == 90 * GIB


@linux
@pytest.mark.parametrize("by", ["pages", "mappings"])
def test_its_pages_are_no_memory_of_ours(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file's own pages; only a system without such a list lists all mappings, which takes long."""
    if by == "pages":
        monkeypatch.delattr(psutil.Process, "memory_maps")
    else:
        monkeypatch.setattr(kv_files, "_PAGES", tmp_path / "missing")
    gc.collect()
    others = mapped_bytes()
    before, rss = resident_bytes(), psutil.Process().memory_info().rss
    (tensor,) = map_tensors(tmp_path, [((32 * MIB,), torch.uint8)])
    tensor.fill_(1)
    assert mapped_bytes() - others == 32 * MIB
    assert psutil.Process().memory_info().rss - rss > 28 * MIB
    assert resident_bytes() - before < 8 * MIB
    del tensor
    assert mapped_bytes() == others


if __name__ == "__main__":
    (mapped,) = map_tensors(Path(sys.argv[1]), [((MIB,), torch.uint8)])
    mapped.fill_(7)
    print("written", flush=True)
    sys.stdin.read()
