"""What is in one file of the disk tier: a short head, then a safetensors image.

    head    magic (8 bytes), version (8 bytes, little endian), SHA-256 of everything behind the head (32 bytes)
    image   a safetensors file as the format describes it; its `__metadata__` names kind, address and root of the
            entry, and holds the caller's own metadata under the prefix "caller."

The checksum finds every truncation and every flipped byte, the label a file that lies at another's place. Nothing is
parsed before its checksum is right.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from math import prod
from typing import Any, Literal, get_args

import torch

Kind = Literal["kv", "state", "vision"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ADDRESS_BYTES = 32

_MAGIC = b"qwen35mm"
_VERSION = 1
_HEAD = struct.Struct("<8sQ32s")
HEAD_BYTES = _HEAD.size
_CALLER = "caller."
_METADATA = "__metadata__"
# Tensors begin at a multiple of this in memory, since the header in front of them is padded to it.
_ALIGNMENT = 64
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class UnusableFileError(Exception):
    """Why a file can't be used. It never leaves the disk tier: to everybody else the file is a miss."""


@dataclass(frozen=True)
class Label:
    """Which entry a file holds; `address` and `root` are SHA-256 digests.

    Raises:
        ValueError: an unknown kind, or a digest that isn't 32 bytes.
    """

    kind: Kind
    address: bytes
    root: bytes

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}.")
        for name in ("address", "root"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != ADDRESS_BYTES:
                raise ValueError(f"{name} must be {ADDRESS_BYTES} bytes; got {value!r}.")

    def tags(self) -> dict[str, str]:
        return {"kind": self.kind, "address": self.address.hex(), "root": self.root.hex()}


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """What was kept: tensors in host memory (views of one buffer), and the caller's metadata."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class PackedEntry:
    """A file's content as it will be written; the tensors' bytes are views, not copies."""

    header: bytes
    parts: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """The whole file's size."""
        return HEAD_BYTES + len(self.header) + sum(part.nbytes for part in self.parts)

    def write_to(self, file: BufferedIOBase) -> None:
        digest = hashlib.sha256(self.header)
        for part in self.parts:
            digest.update(part)
        file.write(_HEAD.pack(_MAGIC, _VERSION, digest.digest()))
        file.write(self.header)
        for part in self.parts:
            file.write(part)


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], label: Label) -> PackedEntry:
    """Lays an entry out for its file. CPU tensors that are contiguous aren't copied.

    Raises:
        ValueError: a name, a dtype or metadata that a file can't hold.
    """
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError(f"metadata must map strings to strings; got {dict(metadata)!r}.")
    header: dict[str, Any] = {_METADATA: label.tags() | {_CALLER + key: value for key, value in metadata.items()}}
    parts: list[memoryview] = []
    offset = 0
    # The widest numbers first keeps each tensor at a multiple of its own item size, as safetensors itself does.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if name == _METADATA or tensor.dtype not in _NAMES:
            raise ValueError(f"A file holds {', '.join(_NAMES.values())} tensors; got {name!r} of {tensor.dtype}.")
        numbers = tensor.detach().to("cpu").contiguous().reshape(-1)
        part = numbers.view(torch.uint8).numpy().data
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
        parts.append(part)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return PackedEntry(len(text).to_bytes(8, "little") + text, tuple(parts))


def checksum_in(head: bytes) -> bytes:
    """The checksum that a file's head names.

    Raises:
        UnusableFileError: the head is cut off, or belongs to something else.
    """
    if len(head) < HEAD_BYTES:
        raise UnusableFileError("truncated")
    magic, version, checksum = _HEAD.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise UnusableFileError("not a file of this cache, or damaged")
    return checksum


def unpack(image: torch.Tensor, checksum: bytes, label: Label) -> DiskEntry:
    """The entry in `image` (uint8, everything behind the head); its tensors are views of `image`.

    Raises:
        UnusableFileError: the bytes are damaged, belong to another entry, or hold NaN or infinity.
    """
    if hashlib.sha256(image.numpy().data).digest() != checksum:
        raise UnusableFileError("truncated or damaged")
    # Behind a right checksum only a forged or a wrongly written file fails here.
    try:
        header, data = _split(image)
        metadata = header.pop(_METADATA)
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError(metadata)
        tags = label.tags()
        found = {key: metadata[key] for key in tags}
        tensors = {name: _tensor(entry, data) for name, entry in header.items()}
        caller = {key[len(_CALLER) :]: value for key, value in metadata.items() if key.startswith(_CALLER)}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UnusableFileError("not a safetensors image") from error
    if found != tags:
        other = next(key for key in tags if found[key] != tags[key])
        raise UnusableFileError(f"a file of another {other}")
    bad = next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)
    if bad is not None:
        raise UnusableFileError(f"not finite in {bad!r}")
    return DiskEntry(tensors, caller)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    Through the extremes, which NaN passes into: some 30 times faster than `torch.isfinite` on a CPU.
    """
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _split(image: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    length = int.from_bytes(image[:8].numpy().tobytes(), "little")
    if not 0 < length <= len(image) - 8:
        raise ValueError(length)
    return json.loads(image[8 : 8 + length].numpy().tobytes()), image[8 + length :]


def _tensor(entry: dict[str, Any], data: torch.Tensor) -> torch.Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(entry)
    if end > len(data) or prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(entry)
    return data[begin:end].view(dtype).view(shape)
