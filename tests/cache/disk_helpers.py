"""What the tests of the disk tier share: entries that can be computed again from their address."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from qwen35mm.cache.disk import DiskEntry, DiskStore, Kind
from qwen35mm.cache.disk_format import Label, pack

ROOT = hashlib.sha256(b"one model").digest()
OTHER_ROOT = hashlib.sha256(b"another model").digest()
METADATA = {"length": "128", "note": "Grüße ☃"}


def address_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


@functools.cache
def _base(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(size))


def _narrow(address: bytes, size: int) -> torch.Tensor:
    """bfloat16 numbers that count on from the address: a rounded sum wouldn't keep two addresses apart."""
    start = int.from_bytes(address[:2], "little")
    return torch.arange(start, start + size).to(torch.int16).view(torch.bfloat16).nan_to_num_(0.5, 1.5, -1.5)


def tensors_of(kind: Kind, address: bytes, size: int = 48) -> dict[str, torch.Tensor]:
    """An entry of about `size` numbers: a kind's names and dtypes, values that only this address has."""
    if kind == "kv":
        keys = _narrow(address, size)
        return {"k": keys.view(2, -1, 1, 4), "v": (-keys).view(2, -1, 1, 4)}
    if kind == "state":
        numbers = _base(size) + int.from_bytes(address[:2], "little")
        return {"conv": _narrow(address, 24).view(2, 4, 3), "recurrent": numbers.view(2, 2, -1, 4)}
    return {"features": _narrow(address, size).view(-1, 4)}


def same(entry: DiskEntry | None, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an entry holds exactly these tensors: names, dtypes, shapes, bits."""
    return entry is not None and (
        {name: (tensor.dtype, tensor.shape) for name, tensor in entry.tensors.items()}
        == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        and all(torch.equal(bits(entry.tensors[name]), bits(tensors[name])) for name in tensors)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, since -0.0 equals 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def file_of(directory: Path, kind: Kind, address: bytes, root: bytes = ROOT) -> Path:
    """Where an entry lies, as the contract of the layout says."""
    return directory / "v1" / root.hex() / address.hex()[:2] / f"{address.hex()}.{kind}"


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def temporaries_in(directory: Path) -> list[Path]:
    return [path for path in files_in(directory) if ".tmp-" in path.name]


def entries_in(directory: Path) -> Iterator[tuple[Kind, bytes]]:
    """Kind and address of each file under its final name."""
    for path in files_in(directory):
        if ".tmp-" not in path.name:
            kind = path.suffix[1:]
            assert kind in ("kv", "state", "vision")
            yield kind, bytes.fromhex(path.stem)


def bytes_in(directory: Path) -> int:
    return sum(os.lstat(path).st_size for path in files_in(directory))


def budget_for(count: int) -> int:
    """A budget that `count` files of `file_bytes()` just fit: a sixteenth stays free."""
    budget = count * file_bytes()
    while budget - budget // 16 < count * file_bytes():
        budget += 1
    return budget


def put(store: DiskStore, number: int, size: int = 48, kind: Kind = "state") -> bytes:
    """Writes the entry of a number, which must succeed; its address."""
    address = address_of(number)
    assert store.write(kind, address, tensors_of(kind, address, size), METADATA)
    return address


@functools.cache
def file_bytes() -> int:
    """The size of every file that `put` makes of a state of the usual size."""
    address = address_of(0)
    return pack(tensors_of("state", address), METADATA, Label("state", address, ROOT)).num_bytes
