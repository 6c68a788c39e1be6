"""Quantised weights on disk in their memory layout, so that the next start maps them instead of making them.

    <directory>/packed/<key>.safetensors    all of a model's tensors, and a digest over them

The key covers all that decides the bytes: the checkpoint's digest, the format, and the packing code. Every start
checks every byte: they are read for the first token anyway, and a few threads check two gigabytes or more a second.
So a file needs no fsync, and a file that differs is made again. Nothing here raises an error for the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qwen35mm.checkpoints.safetensors_files import DTYPES, StoredTensor, read_headers
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.errors import CheckpointError
from qwen35mm.model.weight_formats import PackedWeight
from qwen35mm_kernels.cpu.native.library import find_library

logger = logging.getLogger(__name__)

_FORMAT = 1
_PACKAGE = Path(__file__).parents[1]
# The folders whose code decides which rows lie where.
_PACKING = ("checkpoints", "config", "model")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SLICE_BYTES = 8 << 20
_MAX_THREADS = 8
_ALIGNMENT = 64
# Bytes to leave free on the disk, and the longest that writing a file may take.
_SPARE_BYTES = 1 << 30
_UNFINISHED_S = 3600.0


@dataclass(frozen=True)
class WeightsCache:
    """Files of quantised weights in a folder; evicts the least recently used.

    Attributes:
        directory: the disk cache's folder, which also holds checkpoints' digests. Created if missing.
        max_bytes: limit for all files together; a larger file isn't written.
    """

    directory: Path
    max_bytes: int

    def find(
        self,
        folder: Path,
        integers: str,
        dtype: torch.dtype,
        with_mtp: bool = False,
        adapters: Sequence[str] = (),
    ) -> PackedFile | None:
        """The file for a checkpoint in a format, whether it exists or not; None where weights aren't packed.

        Args:
            with_mtp: whether it has the layer of multi-token prediction.
            adapters: digests of those that are merged into it.

        Raises:
            CheckpointError: the checkpoint's files can't be read.
        """
        library = find_library()
        if library is None:
            return None
        parts = [_FORMAT, weights_digest(folder, self.directory / "weights"), integers, str(dtype), with_mtp, *adapters]
        key = hashlib.sha256(json.dumps([*parts, library.digest, _packing_digest()]).encode()).hexdigest()
        return PackedFile(self.directory / "packed" / f"{key}.safetensors", self.max_bytes)


@dataclass(frozen=True)
class PackedFile:
    """A model's tensors in one format."""

    path: Path
    max_bytes: int

    def exists(self) -> bool:
        return self.path.is_file()

    def read_into(self, model: nn.Module) -> bool:
        """Maps the file read-only as the model's tensors; removes the file and returns False if it can't be used."""
        started_s = time.monotonic()
        try:
            found = self._map(model.state_dict())
        except (OSError, ValueError, CheckpointError) as error:
            logger.warning("%s can't be used (%s): the weights are made again.", self.path.name, error)
            _remove(self.path)
            return False
        for name, module in model.named_modules():
            if isinstance(module, PackedWeight):
                module.take(found.pop(f"{name}.data"), found.pop(f"{name}.scales"))
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.data = found[name]
        with contextlib.suppress(OSError):
            os.utime(self.path)
        logger.info("Weights mapped from the disk cache in %.1f s.", time.monotonic() - started_s)
        return True

    def write(self, model: nn.Module) -> None:
        """Writes a model's tensors if they fit the limit; evicts older files to make room."""
        tensors = dict(model.state_dict())
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        folder = self.path.parent
        part = folder / f"{secrets.token_hex(8)}.part"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fits = num_bytes <= self.max_bytes
            self._make_room(num_bytes if fits else 0)
            if not fits or num_bytes + _SPARE_BYTES > shutil.disk_usage(folder).free:
                logger.info("The weights take %.1f GB, too much for the disk cache.", num_bytes / 1e9)
                return
            with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for piece in _as_file(tensors):
                    file.write(piece)
            part.replace(self.path)
        except OSError as error:
            logger.warning("Weights can't be kept in the disk cache: %s.", error.strerror or error)
            _remove(part)

    def _map(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raises OSError, CheckpointError, or ValueError if the file isn't this model's."""
        stored = read_headers([self.path])
        digest = stored.pop("digest", None)
        wanted = {name: (_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in expected.items()}
        if digest is None or {name: (each.dtype, each.shape) for name, each in stored.items()} != wanted:
            raise ValueError("it is another model's")
        if hasattr(os, "getuid") and self.path.stat().st_uid != os.getuid():
            raise ValueError("it is another user's")
        memory = _mapped(self.path)
        tensors = {name: _view(memory, each) for name, each in stored.items()}
        if bytes(_view(memory, digest).tolist()) != _digest(tensors):
            raise ValueError("it is damaged")
        return tensors

    def _make_room(self, num_bytes: int) -> None:
        """Removes files that a killed process left unfinished, then the least recently used ones."""
        files = []
        for path in self.path.parent.iterdir():
            info = path.stat()
            if path.suffix == ".safetensors" and path != self.path:
                files.append((info.st_mtime, info.st_size, path))
            elif path.suffix == ".part" and time.time() - info.st_mtime > _UNFINISHED_S:
                _remove(path)
        left = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if left + num_bytes <= self.max_bytes:
                return
            _remove(path)
            left -= size


def _as_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, without copying the tensors."""
    digest = torch.tensor(list(_digest(tensors)), dtype=torch.uint8)
    # Tensors whose size keeps the next one aligned come first.
    ordered = sorted([*tensors.items(), ("digest", digest)], key=lambda item: item[1].nbytes % _ALIGNMENT != 0)
    header, start = {}, 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _bytes(tensor)


def _digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 over names, types, shapes and bytes."""
    order = sorted(tensors)
    slices = [
        _bytes(tensors[name])[start : start + _SLICE_BYTES]
        for name in order
        for start in range(0, tensors[name].nbytes, _SLICE_BYTES)
    ]
    head = json.dumps([[name, _NAMES[tensors[name].dtype], list(tensors[name].shape)] for name in order])
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda part: hashlib.sha256(part).digest(), slices)
        return hashlib.sha256(head.encode() + b"".join(found)).digest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _mapped(path: Path) -> torch.Tensor:
    """A file's bytes, mapped read-only as long as the tensor or a view of it lives."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        memory.madvise(mmap.MADV_WILLNEED)
    # torch warns about read-only buffers, so it gets one that doesn't declare itself read-only.
    owner = np.frombuffer(memory, dtype=np.uint8)
    buffer = (ctypes.c_uint8 * len(owner)).from_address(owner.ctypes.data)
    buffer.owner = owner  # pyright: ignore[reportAttributeAccessIssue] - lives as long
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _view(memory: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    data = memory[stored.start : stored.start + stored.num_bytes]
    dtype = DTYPES[stored.dtype]
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(stored.shape)


def _packing_digest() -> str:
    """Digest of the sources that decide which of a checkpoint's rows lie where."""
    digest = hashlib.sha256()
    for folder in _PACKING:
        for path in sorted((_PACKAGE / folder).glob("*.py")):
            digest.update(f"{folder}/{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
