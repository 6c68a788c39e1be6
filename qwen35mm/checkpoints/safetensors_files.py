"""Safetensors files: reading their headers, and reading tensors into place.

We read the headers ourselves (eight bytes of length, then JSON), to check all of them before reading any data, and to
read the data straight into the parameter: no copy, and no mapped file in the process's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from qwen35mm.checkpoints.shards import some
from qwen35mm.errors import CheckpointError
from qwen35mm.outside_json import load_json

# The format's own limit on a header (safetensors' MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000
# A tensor has ten values; a large mixture of experts has 100,000 tensors.
_MAX_HEADER_VALUES = 4_000_000
_MAX_DIMENSIONS = 16
_CHUNK_BYTES = 16 << 20

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a shard's header describes it; `start` is its offset in bytes from the file's start."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_headers(shards: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of all shards by name; reads only the headers.

    Raises:
        CheckpointError: a file is truncated, isn't safetensors, or repeats a tensor of another shard.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in shards:
        for tensor in _read_header(path):
            if tensor.name in tensors:
                raise CheckpointError(f"{tensor.name} is in both {tensors[tensor.name].file.name} and {path.name}.")
            tensors[tensor.name] = tensor
    return tensors


def new_buffer() -> torch.Tensor:
    """One buffer to read a whole checkpoint: separate buffers would remain with the process, several times over."""
    return torch.empty(_CHUNK_BYTES, dtype=torch.uint8)


def read_into(
    file: BufferedReader | FileIO, tensor: StoredTensor, target: torch.Tensor, buffer: torch.Tensor | None = None
) -> None:
    """Reads a tensor's numbers into `target` (1-D, contiguous, same number of elements); converts the dtype if needed.

    Args:
        buffer: from `new_buffer`.

    Raises:
        CheckpointError: the file ended early.
    """
    dtype = DTYPES[tensor.dtype]
    assert target.is_contiguous()
    assert target.numel() * dtype.itemsize == tensor.num_bytes
    file.seek(tensor.start)
    if target.dtype == dtype and target.device.type == "cpu":
        _fill(file, tensor, target)
        return
    chunk = _taken(buffer, max(1, min(target.numel(), _CHUNK_BYTES // dtype.itemsize)), dtype)
    for start in range(0, target.numel(), chunk.numel()):
        part = chunk[: min(chunk.numel(), target.numel() - start)]
        _fill(file, tensor, part)
        target[start : start + part.numel()].copy_(part)


def read_tensor(tensor: StoredTensor) -> torch.Tensor:
    """A whole tensor in its own dtype, on the CPU; raises CheckpointError if the file ends early."""
    found = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    with open_shard(tensor.file) as file:
        file.seek(tensor.start)
        _fill(file, tensor, found)
    return found


def read_rows(
    file: BufferedReader | FileIO, tensor: StoredTensor, width: int, buffer: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """A tensor's numbers as rows [n, width], 16 MiB at a time, float32 or bfloat16 on the CPU; float16 as float32.

    The next result overwrites the last one.

    Args:
        buffer: from `new_buffer`.

    Raises:
        CheckpointError: the file ended early.
    """
    dtype = DTYPES[tensor.dtype]
    num_rows = tensor.num_bytes // dtype.itemsize // width
    rows_at_once = max(1, min(num_rows, _CHUNK_BYTES // (width * dtype.itemsize)))
    chunk = _taken(buffer, rows_at_once * width, dtype).view(rows_at_once, width)
    file.seek(tensor.start)
    for start in range(0, num_rows, rows_at_once):
        rows = chunk[: num_rows - start]
        _fill(file, tensor, rows)
        yield rows.float() if dtype == torch.float16 else rows


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors hold the same numbers in the same dtype and shape."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as two:
        one.seek(first.start)
        two.seek(second.start)
        left = first.num_bytes
        while left > 0:
            size = min(left, _CHUNK_BYTES)
            if one.read(size) != two.read(size):
                return False
            left -= size
    return True


def not_finite(tensors: Iterable[StoredTensor]) -> Iterator[str]:
    """The names of tensors that hold NaN or infinite numbers. Reads them all.

    Raises:
        CheckpointError, OSError: a file ends early or is gone.
    """
    buffer = new_buffer()
    for tensor in tensors:
        if not DTYPES[tensor.dtype].is_floating_point:
            continue
        with open_shard(tensor.file) as file:
            # 8-bit floats support fewer operations.
            if not all(rows.float().isfinite().all() for rows in read_rows(file, tensor, 1, buffer)):
                yield tensor.name


def _taken(buffer: torch.Tensor | None, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements from the buffer, or from a new tensor if it is too small."""
    if buffer is None or count * dtype.itemsize > buffer.numel():
        return torch.empty(count, dtype=dtype)
    return buffer[: count * dtype.itemsize].view(dtype)


def _fill(file: BufferedReader | FileIO, tensor: StoredTensor, target: torch.Tensor) -> None:
    view = target.view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{tensor.file.name} ends in the middle of {tensor.name}: it changed while loading.")
        done += count


def _read_header(path: Path) -> Iterator[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{path.name} is truncated or not a safetensors file ({size} bytes): get it again.")
        try:
            header = load_json(file.read(length), max_bytes=_MAX_HEADER_BYTES, max_values=_MAX_HEADER_VALUES)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = [_entry(name, entry, path, 8 + length) for name, entry in entries.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name}: its safetensors header can't be read: get it again.") from error
    expected = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + length)
    if size != expected:
        cut = sorted(tensor.name for tensor in tensors if tensor.start + tensor.num_bytes > size)
        what = f"truncated, cutting off {some(cut)}" if cut else "longer than its header says"
        raise CheckpointError(f"{path.name} is {what}: {size} bytes where {expected} are expected. Get it again.")
    at = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != at:
            raise CheckpointError(
                f"{path.name} is damaged: {tensor.name} doesn't begin where others end. Get it again."
            )
        at += tensor.num_bytes
    yield from tensors


def _entry(name: str, entry: dict[str, Any], path: Path, data_start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    tensor = StoredTensor(name, path, entry["dtype"], shape, data_start + begin, end - begin)
    known = DTYPES.get(tensor.dtype)
    sizes = (*shape, begin, tensor.num_bytes)
    # Multiplying many huge numbers would take forever.
    if len(shape) > _MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 1 << 63 for number in sizes):
        raise ValueError(name)
    if known is not None and prod(shape) * known.itemsize != tensor.num_bytes:
        raise ValueError(name)
    return tensor


def open_shard(path: Path) -> FileIO:
    """Opens a shard unbuffered: reads go from the page cache straight into the parameter."""
    file = path.open("rb", buffering=0)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file
