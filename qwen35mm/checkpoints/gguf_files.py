"""Reads the headers of GGUF files."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from qwen35mm.checkpoints.safetensors_files import StoredTensor
from qwen35mm.errors import CheckpointError, MissingExtraError

T = TypeVar("T", bool, int, float, str)
# Other types in which a value of a kind may be stored.
_ALSO = {float: (int,), bool: (int,)}
# Limit for a string or an array of numbers. A vocabulary takes 3 MB.
_MAX_BYTES = 1 << 27
# Most elements of an array: a vocabulary has 250,000, and reading an absurd count could take hours.
_MOST = 1 << 21


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as the header describes it, with dimensions in torch's order."""

    stored: StoredTensor
    kind: Any

    def data(self) -> np.ndarray:
        """[..., bytes of a row] uint8, mapped from the file; while held, its pages count as the process's memory."""
        shape = (*self.stored.shape[:-1], -1)
        mapped = np.memmap(self.stored.file, np.uint8, "r", self.stored.start, (self.stored.num_bytes,))
        return mapped.reshape(shape)


class GgufFile:
    """One file's header. We read it ourselves: the `gguf` package takes half a minute for 248,000 tokens.

    Raises:
        CheckpointError: it is damaged, or isn't a GGUF file.
        MissingExtraError: the package that defines the types isn't installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError("A GGUF file", "gguf") from error
        self.path = path
        with _in_words(path):
            header = _Header(np.memmap(path, np.uint8, "r"))
            if header.take(4) != b"GGUF" or header.number("I") not in (2, 3):
                raise ValueError("another magic")
            num_tensors, num_values = header.number("Q"), header.number("Q")
            self._values = _without_repeats((header.string(), header.value()) for _ in range(num_values))
            entries = _without_repeats(_entry(header) for _ in range(num_tensors))
            alignment = self.value(int, "general.alignment", 32)
            if alignment < 1 or alignment & (alignment - 1):
                raise ValueError("another alignment")
            at = start = -(-header.at // alignment) * alignment
            self.tensors: dict[str, GgufTensor] = {}
            for name, (shape, number, offset) in entries.items():
                kind = gguf.GGMLQuantizationType(number)
                block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
                size = prod(shape) // block * num_bytes
                # Without gaps, as llama.cpp requires.
                if shape[-1] % block or start + offset != at or at + size > header.size:
                    raise ValueError(name)
                self.tensors[name] = GgufTensor(StoredTensor(name, path, kind.name, shape, at, size), kind)
                at += -(-size // alignment) * alignment
        # In a model of several files only the first has it.
        self.architecture = self.value(str, "general.architecture", "")

    def value(self, kind: type[T], key: str, default: T | None = None) -> T:
        """A key's value, or the default if the file lacks the key.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        return self._of(kind, key, [self._found(key, default)])[0]

    def values(self, kind: type[T], key: str, default: list[T] | None = None) -> list[T]:
        """`value` for an array."""
        return self._of(kind, key, self._found(key, default))

    def _found(self, key: str, default: Any) -> Any:
        found = self._values.get(key, default)
        if found is None:
            raise CheckpointError(f"{self.path.name} lacks {key}: it isn't complete. Download it again.")
        with _in_words(self.path):
            return found() if callable(found) else found

    def _of(self, kind: type[T], key: str, found: Any) -> list[T]:
        if isinstance(found, list) and set(map(type, found)) <= {kind, *_ALSO.get(kind, ())}:
            return list(map(kind, found))
        what = f"{key} holds {str(found)[:80]}, and should be of {kind.__name__}"
        raise CheckpointError(f"{self.path.name}: {what}. Download it again.")

    def own(self, key: str) -> str:
        """A key with the architecture's prefix."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return key in self._values

    def is_array(self, key: str) -> bool:
        return self.has(key) and isinstance(self._found(key, None), list)


def _without_repeats(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a name comes twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} twice")
        found[name] = value
    return found


class _Header:
    """Reads values one after the other; raises ValueError for anything malformed."""

    _NUMBERS = MappingProxyType(
        {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    )
    _STRING, _ARRAY = 8, 9

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self.size = len(self._data)
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= min(self.size - self.at, _MAX_BYTES):
            raise ValueError("the file ends")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self) -> Any:
        """A number, or for a string or an array a function that reads it on demand."""
        kind = self.number("I")
        if kind == self._STRING:
            return functools.partial(bytes.decode, self.take(self.number("Q")))
        if kind != self._ARRAY:
            return self.number(self._NUMBERS[kind])
        inner, count, start = self.number("I"), self.number("Q"), self.at
        if count > _MOST:
            raise ValueError("an absurd count")
        if inner == self._STRING:
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", self._data, self.at)
                self.at += 8 + size
            return functools.partial(self._texts, start, count)
        code = self._NUMBERS[inner]
        raw = self.take(count * struct.calcsize(f"<{code}"))
        return lambda: list(struct.unpack(f"<{count}{code}", raw))

    def _texts(self, at: int, count: int) -> list[str]:
        found = []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self._data, at)
            found.append(bytes(self._data[at + 8 : at + 8 + size]).decode())
            at += 8 + size
        return found


def _entry(header: _Header) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    name, num_dimensions = header.string(), header.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(name)
    shape = tuple(header.number("Q") for _ in range(num_dimensions))[::-1]
    if not all(0 < size < 1 << 40 for size in shape):
        raise ValueError(name)
    return name, (shape, header.number("I"), header.number("Q"))


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError, struct.error) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path.name} is truncated, damaged, or no GGUF file ({size:,} bytes): download it again."
        ) from error
