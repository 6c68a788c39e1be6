"""What the tests of the disk tier share: entries that can be computed again from their address."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch

from qwen35mm.cache.disk import DiskStore, Kind

KINDS: tuple[Kind, ...] = ("kv", "state", "vision")


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


def same(found: Mapping[str, torch.Tensor] | None, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an entry holds exactly these tensors: names, dtypes, shapes, bits."""
    return (
        found is not None
        and found.keys() == tensors.keys()
        and all(
            found[name].dtype == tensor.dtype
            and found[name].shape == tensor.shape
            and torch.equal(bits(found[name]), bits(tensor))
            for name, tensor in tensors.items()
        )
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, since -0.0 equals 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def file_of(directory: Path, kind: Kind, address: bytes) -> Path:
    """Where an entry lies, as the contract of the layout says."""
    return directory / "v2" / f"{address.hex()}.{kind}"


def files_in(directory: Path) -> list[Path]:
    """Everything but the lock."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


def entries_in(directory: Path) -> Iterator[tuple[Kind, bytes]]:
    """Kind and address of each file under its final name."""
    for path in files_in(directory):
        if path.name != "unfinished":
            kind = path.suffix[1:]
            assert kind in KINDS
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
    assert store.write(kind, address, tensors_of(kind, address, size))
    return address


def holds(store: DiskStore, number: int, size: int = 48, kind: Kind = "state") -> bool:
    """Whether the entry that `put` wrote comes back bit for bit."""
    return same(store.read(kind, address_of(number)), tensors_of(kind, address_of(number), size))


@functools.cache
def file_bytes() -> int:
    """The size of every file that `put` makes of a state of the usual size: the checksum, then safetensors."""
    return 32 + len(safetensors.torch.save(tensors_of("state", address_of(0))))
