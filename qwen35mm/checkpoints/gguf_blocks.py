"""Blocks of GGUF's types as integers with scales and, for some types, minima: dequantising multiplies them out.

Defined by ggml's block structures (ggml-common.h). A scale's factors are multiplied in float32, where that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups

# A block's bytes by part, each [blocks, size] uint8.
Parts = dict[str, np.ndarray]


class Blocks(NamedTuple):
    """The layout of a type's blocks: sizes in bytes by part, in order, and their contents.

    Attributes:
        read: parts -> integers [blocks, values], scales and minima [blocks, groups].
    """

    groups: Groups
    sizes: dict[str, int]
    read: Callable[[Parts], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


def grouped_rows(kind: str, stored: np.ndarray) -> GroupedRows:
    """Reads rows [n, bytes] uint8 of a type in `BLOCKS`."""
    blocks = BLOCKS[kind]
    cut = np.cumsum([*blocks.sizes.values()])
    each = np.split(stored.reshape(-1, int(cut[-1])), cut[:-1], axis=1)
    found = blocks.read(dict(zip(blocks.sizes, each, strict=True)))
    integers, scales, minima = (
        None if x is None else torch.from_numpy(np.require(x, requirements="W").reshape(len(stored), -1)) for x in found
    )
    assert integers is not None
    assert scales is not None
    return GroupedRows(integers.to(torch.int8), scales.float(), None if minima is None else minima.float())


def _half(data: np.ndarray) -> np.ndarray:
    """[blocks, 2] bytes -> [blocks, 1] float32."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _fields(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """[blocks, bytes] -> [blocks, values]: from each run of bytes all lowest bits, then all next ones, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run)
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1).astype(np.int16)


def _bits(data: np.ndarray) -> np.ndarray:
    """[blocks, 4] bytes -> [blocks, 32], lowest bit first."""
    return np.unpackbits(data, axis=1, bitorder="little").astype(np.int16)


def _small(offset: int, *, fifth: bool) -> Callable[[Parts], tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    def read(parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        integers = _fields(parts["qs"], 4, 16)
        if fifth:
            integers |= _bits(parts["qh"]) << 4
        return integers - offset, _half(parts["d"]), _half(parts["m"]) if "m" in parts else None

    return read


def _scales_and_minima(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K's and Q5_K's eight each, of six bits; the upper two bits of the last four lie with the first four."""
    low, high, both = (part.astype(np.int16) for part in np.split(parts["scales"], 3, axis=1))
    scales = np.concatenate([low & 63, both & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=1)
    return _half(parts["d"]) * scales.astype(np.float32), -_half(parts["dmin"]) * minima.astype(np.float32)


def _q2_k(parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales, minima = ((parts["scales"] >> shift & 15).astype(np.float32) for shift in (0, 4))
    return _fields(parts["qs"], 2, 32), _half(parts["d"]) * scales, -_half(parts["dmin"]) * minima


def _q3_k(parts: Parts) -> tuple[np.ndarray, np.ndarray, None]:
    # A cleared bit subtracts four.
    integers = _fields(parts["qs"], 2, 32) - 4 * (1 - _fields(parts["hmask"], 1, 32))
    scales = _fields(parts["scales"][:, :8], 4, 8) | _fields(parts["scales"][:, 8:], 2, 4) << 4
    return integers, _half(parts["d"]) * (scales - 32).astype(np.float32), None


def _q4_k(parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _fields(parts["qs"], 4, 32), *_scales_and_minima(parts)


def _q5_k(parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _fields(parts["qs"], 4, 32) | _fields(parts["qh"], 1, 32) << 4, *_scales_and_minima(parts)


def _q6_k(parts: Parts) -> tuple[np.ndarray, np.ndarray, None]:
    integers = _fields(parts["ql"], 4, 64) | _fields(parts["qh"], 2, 32) << 4
    return integers - 32, _half(parts["d"]) * parts["scales"].view(np.int8).astype(np.float32), None


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(parts: Parts) -> tuple[np.ndarray, np.ndarray, None]:
    return _IQ4_VALUES[_fields(parts["qs"], 4, 16)], _half(parts["d"]), None


def _iq4_xs(parts: Parts) -> tuple[np.ndarray, np.ndarray, None]:
    low = (parts["scales_l"][..., None] >> np.array([0, 4], np.uint8) & 15).reshape(len(parts["d"]), -1)
    high = np.ascontiguousarray(parts["scales_h"]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.int16) - 32
    return _IQ4_VALUES[_fields(parts["qs"], 4, 16)], _half(parts["d"]) * scales.astype(np.float32), None


_K = {"d": 2, "dmin": 2, "scales": 12}
BLOCKS = {
    "Q8_0": Blocks(
        Groups(8, 32), {"d": 2, "qs": 32}, lambda parts: (parts["qs"].view(np.int8), _half(parts["d"]), None)
    ),
    "Q4_0": Blocks(Groups(4, 32), {"d": 2, "qs": 16}, _small(8, fifth=False)),
    "Q4_1": Blocks(Groups(4, 32, True), {"d": 2, "m": 2, "qs": 16}, _small(0, fifth=False)),
    "Q5_0": Blocks(Groups(8, 32), {"d": 2, "qh": 4, "qs": 16}, _small(16, fifth=True)),
    "Q5_1": Blocks(Groups(8, 32, True), {"d": 2, "m": 2, "qh": 4, "qs": 16}, _small(0, fifth=True)),
    "Q2_K": Blocks(Groups(4, 16, True), {"scales": 16, "qs": 64, "d": 2, "dmin": 2}, _q2_k),
    "Q3_K": Blocks(Groups(4, 16), {"hmask": 32, "qs": 64, "scales": 12, "d": 2}, _q3_k),
    "Q4_K": Blocks(Groups(4, 32, True), {**_K, "qs": 128}, _q4_k),
    "Q5_K": Blocks(Groups(8, 32, True), {**_K, "qh": 32, "qs": 128}, _q5_k),
    "Q6_K": Blocks(Groups(8, 16), {"ql": 128, "qh": 64, "scales": 16, "d": 2}, _q6_k),
    "IQ4_NL": Blocks(Groups(8, 32), {"d": 2, "qs": 16}, _iq4_nl),
    "IQ4_XS": Blocks(Groups(8, 32), {"d": 2, "scales_h": 2, "scales_l": 4, "qs": 128}, _iq4_xs),
}
