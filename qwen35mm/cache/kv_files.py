"""Keys and values of a context that doesn't fit in memory: in an unnamed file, which the system pages."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import torch

from qwen35mm.cache.placement import mib
from qwen35mm.errors import ConfigError

# Identifies these files in a process's list of mappings.
PREFIX = "qwen35mm-kv-"
_LEAST_LEFT_BYTES = 2 << 30
# Files here are in memory.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_ZEROS = bytes(1 << 20)
# One entry for each page of this process.
_PAGES, _ENTRY_BYTES = Path("/proc/self/pagemap"), 8
# Mappings that tensors still hold.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def file_room(folder: Path) -> int:
    """Bytes that a file in a folder may take; the folder needn't exist yet.

    A tenth of the disk's free space stays free, at least 2 GiB. 0 if the file system is in memory.
    """
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists()).resolve()
    disks = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    if next((disks[each] for each in (there, *there.parents) if each in disks), None) in _MEMORY_FILE_SYSTEMS:
        return 0
    free = shutil.disk_usage(there).free
    return max(free - max(_LEAST_LEFT_BYTES, free // 10), 0)


def map_tensors(folder: Path, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Zero tensors of these shapes and dtypes in one unnamed file that disappears with them.

    The file's space is reserved first: a page without space would later end the process.

    Raises:
        ConfigError: the folder can't hold it.
    """
    starts, stop = [], 0
    for shape, dtype in wanted:
        starts.append(stop)
        stop += -(-math.prod(shape) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Windows removes it with its last handle, the mapping's.
        with tempfile.NamedTemporaryFile(prefix=PREFIX, dir=folder, delete=os.name == "nt") as file:
            if os.name != "nt":
                Path(file.name).unlink()
            _reserve(file, stop)
            mapped = mmap.mmap(file.fileno(), stop)
            _mapped.add(mapped)
    except OSError as error:
        raise ConfigError(
            f"Keys and values can't be kept in a file of {mib(stop)} in '{folder}': {error.strerror}. Take "
            "a shorter context, or with --cache-dir a folder on another disk."
        ) from error
    return [
        torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start).view(*shape)
        for start, (shape, dtype) in zip(starts, wanted, strict=True)
    ]


def mapped_bytes() -> int:
    """Bytes of such files that this process has in memory now; the system can reclaim them at any time."""
    # A copy, since another thread may be loading a model.
    if not (mapped := list(_mapped)):
        return 0
    # Some sandboxes refuse the list.
    with contextlib.suppress(OSError):
        return sum(map(_resident_bytes, mapped))
    # Lists all mappings of the process, which takes a twentieth of a second; macOS has no list.
    if not hasattr(psutil.Process, "memory_maps"):
        return 0
    maps = psutil.Process().memory_maps(grouped=False)
    return sum(each.rss for each in maps if Path(each.path).name.startswith(PREFIX))


def _resident_bytes(mapped: mmap.mmap) -> int:
    """Bytes of a mapping in this process's page table, by Linux' list of its pages."""
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() // mmap.PAGESIZE
    with _PAGES.open("rb", buffering=0) as file:
        file.seek(start * _ENTRY_BYTES)
        entries = np.frombuffer(file.read(-(-len(mapped) // mmap.PAGESIZE) * _ENTRY_BYTES), np.int64)
    # The highest bit is set if the page is in memory.
    return int(np.count_nonzero(entries < 0)) * mmap.PAGESIZE


def _reserve(file: IO[bytes], num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    for _ in range(-(-num_bytes // len(_ZEROS))):
        file.write(_ZEROS)
    file.truncate(num_bytes)
    file.flush()
