"""Formats of keys and values in the cache: plain numbers, or codes with a scale for every 32 neighbours.

A row holds one head of one token. Its bytes depend only on its values. A format with codes has rows of bytes: all codes
first, then a scale in bfloat16 for each `GROUP` values, so that cards read codes 16 bytes at a time.
`reference.kv_formats` has the naive version.

A rotated format stores H D x instead of x, where D is a diagonal of fixed signs and H the normalised Walsh-Hadamard
matrix (QuaRot, arXiv:2404.00456). This spreads the outliers of a few channels over all channels. Rotated keys and
queries have the same products as unrotated ones. Sums of rotated values are rotated sums. So attention rotates only its
queries and its result, never the cache.

A format with levels divides a rotated row by its root mean square, stores each number as the nearest level, and has one
scale a row (TurboQuant's first quantiser, arXiv:2504.19874). TurboQuant's second quantiser, one bit of K for the
residual's sign (QJL), costs more than it gains (docs/models.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

GROUP = 32
_SCALE_BYTES = 2

# Positive Lloyd-Max levels of a Gaussian with variance one. kv_rows.h has the same.
_LEVELS = {
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519456),
    4: (0.128395, 0.3880483, 0.6567591, 0.9423404, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
}


@dataclass(frozen=True)
class KVFormat:
    """One format of cached keys or values.

    Attributes:
        name: the option's value for users.
        number: its number in the compiled library (kv_rows.h).
        dtype: of plain numbers; torch.uint8 for codes.
        bits: bits of a code; 0 for plain numbers.
        codes: the float type of the codes; None for integers.
        largest: the code of a group's largest magnitude.
        is_rotated: whether it stores H D x.
        has_levels: whether codes are indices of Gaussian levels.
        on_cards: whether `gpu` has kernels for it (gpu/kv_rows.py).
    """

    name: str
    number: int
    dtype: torch.dtype
    bits: int = 0
    codes: torch.dtype | None = None
    largest: float = 0.0
    is_rotated: bool = False
    has_levels: bool = False
    on_cards: bool = False

    @property
    def levels(self) -> torch.Tensor:
        """[2^bits] float32, rising."""
        positive = torch.tensor(_LEVELS[self.bits])
        return torch.cat([-positive.flip(0), positive])

    def fits(self, head_dim: int) -> bool:
        """Whether the format supports heads of this size."""
        return not self.bits or (head_dim % GROUP == 0 and not (self.is_rotated and head_dim & (head_dim - 1)))

    def row_width(self, head_dim: int) -> int:
        """Elements of `dtype` in a row."""
        if not self.bits:
            return head_dim
        return (1 if self.has_levels else head_dim // GROUP) * _SCALE_BYTES + head_dim * self.bits // 8

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row."""
        return self.row_width(head_dim) * self.dtype.itemsize

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Values [..., D] -> rows [..., row_width] of `dtype`, rounded once. NaN stays NaN."""
        if self.dtype == torch.float16:
            x = x.clamp(-65504.0, 65504.0)  # its largest
        if not self.bits:
            return x.to(self.dtype)
        x = self.rotate(x.float())
        if self.has_levels:
            scale = x.double().square().mean(-1, keepdim=True).sqrt().float().to(torch.bfloat16)
            steps = torch.where((scale > 0) & scale.isfinite(), x / scale.float(), 0.0)
            levels = self.levels.to(x.device)
            codes = torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
            return torch.cat([_pack(codes, self.bits), scale.view(torch.uint8)], dim=-1)
        groups = x.unflatten(-1, (-1, GROUP))
        top, bottom = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        extreme = torch.where(top > -bottom, top, bottom)
        # Four bits have one more code below zero than above: the extreme value takes it.
        scale = (extreme / -8.0 if self.bits == 4 else extreme.abs() / self.largest).to(torch.bfloat16)
        steps = torch.where(scale.abs() > 0, groups / scale.float(), 0.0)
        if self.codes is not None:
            codes = steps.clamp(-self.largest, self.largest).to(self.codes).view(torch.uint8)
        elif self.bits == 8:
            codes = steps.clamp(-127, 127).round().to(torch.int8).view(torch.uint8)
        else:
            codes = _pack((steps.clamp(-8, 7).round() + 8).to(torch.uint8), 4)
        return torch.cat([codes.flatten(-2), scale.view(torch.uint8).flatten(-2)], dim=-1)

    def dequantise(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [..., row_width] -> values [..., D] in `dtype`. Rounds each product of code and scale once."""
        if not self.is_rotated:
            return self.read(rows, dtype)
        return self.rotate_back(self.read(rows, torch.float32)).to(dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] as stored, before rounding: H D x in x's type, or x itself."""
        return _hadamard(x.float() * _signs(x.shape[-1]).to(x.device)).to(x.dtype) if self.is_rotated else x

    def rotate_back(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`, [..., D]."""
        return (_hadamard(x.float()) * _signs(x.shape[-1]).to(x.device)).to(x.dtype) if self.is_rotated else x

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Like `dequantise`, but leaves rotated rows rotated."""
        if not self.bits:
            return rows.to(dtype)
        codes, scale = self._parts(rows)
        scale = scale.float()
        if self.has_levels:
            steps = self.levels.to(rows.device)[_unpack(codes, self.bits).long()]
            return (steps * scale).flatten(-2).to(dtype)
        if self.codes is not None:
            steps = codes.contiguous().view(self.codes).float()
        elif self.bits == 8:
            steps = codes.contiguous().view(torch.int8).float()
        else:
            steps = _unpack(codes, 4).float() - 8
        return (steps * scale).flatten(-2).to(dtype)

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Whether all scales of rows [..., row_width] are finite. Plain numbers are not checked: the caller can."""
        if not self.bits or not rows.numel():
            return True
        return bool(self._parts(rows)[1].isfinite().all())

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [..., row_width] as codes [..., groups, bytes] and bfloat16 scales [..., groups, 1]."""
        width, of_group = rows.shape[-1], GROUP * self.bits // 8
        num_groups = 1 if self.has_levels else width // (_SCALE_BYTES + of_group)
        codes, scales = rows.split([width - num_groups * _SCALE_BYTES, num_groups * _SCALE_BYTES], dim=-1)
        return codes.unflatten(-1, (num_groups, -1)), scales.contiguous().view(torch.bfloat16)[..., None]


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., n] as bytes [..., n * bits / 8].

    4 bits: in each `GROUP`, a byte has one code of the first half and one of the second. 3 bits: three bytes hold eight
    codes, the first in the lowest bits.
    """
    if bits == 4:
        low, high = codes.unflatten(-1, (-1, GROUP)).split(GROUP // 2, dim=-1)
        return (low | high << 4).flatten(-2)
    words = (codes.int().unflatten(-1, (-1, 8)) << torch.arange(0, 24, 3, device=codes.device)).sum(-1, keepdim=True)
    return (words >> torch.tensor([0, 8, 16], device=codes.device) & 255).to(torch.uint8).flatten(-2)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [..., n * bits / 8] as codes [..., n], int32 or uint8."""
    if bits == 4:
        halves = packed.unflatten(-1, (-1, GROUP // 2))
        return torch.cat([halves & 15, halves >> 4], dim=-1).flatten(-2)
    words = (packed.int().unflatten(-1, (-1, 3)) << torch.tensor([0, 8, 16], device=packed.device)).sum(-1, True)
    return (words >> torch.arange(0, 24, 3, device=packed.device) & 7).flatten(-2)


@functools.lru_cache(maxsize=8)
def _signs(dim: int) -> torch.Tensor:
    """[D] of 1 and -1: a bent function of the index, so that a constant row is spread, too."""
    return torch.tensor([-1.0 if (i & i >> 1 & 0x5555).bit_count() & 1 else 1.0 for i in range(dim)])


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform of rows [..., D], its own inverse. Adds in the order of kv_rows.h."""
    dim = x.shape[-1]
    for _ in range(dim.bit_length() - 1):
        first, second = x.chunk(2, dim=-1)
        x = torch.stack([first + second, first - second], dim=-1).flatten(-2)
    return x * dim**-0.5


_BYTES = torch.uint8
FORMATS = {
    format.name: format
    for format in (
        KVFormat("float32", 0, torch.float32, on_cards=True),
        KVFormat("bf16", 1, torch.bfloat16, on_cards=True),
        KVFormat("f16", 2, torch.float16, on_cards=True),
        KVFormat("fp8", 3, _BYTES, bits=8, codes=torch.float8_e4m3fn, largest=448.0, on_cards=True),
        KVFormat("fp8_e5m2", 4, _BYTES, bits=8, codes=torch.float8_e5m2, largest=57344.0, on_cards=True),
        KVFormat("int8", 5, _BYTES, bits=8, largest=127.0, on_cards=True),
        KVFormat("int4", 6, _BYTES, bits=4, on_cards=True),
        KVFormat("int4r", 7, _BYTES, bits=4, is_rotated=True),
        KVFormat("tq4", 8, _BYTES, bits=4, is_rotated=True, has_levels=True),
        KVFormat("tq3", 9, _BYTES, bits=3, is_rotated=True, has_levels=True),
    )
}
PLAIN = {format.dtype: format for format in FORMATS.values() if not format.bits}

# (format of keys, format of values).
KVFormats = tuple[KVFormat, KVFormat]

assert [each.number for each in FORMATS.values()] == list(range(len(FORMATS))), "kv_rows.h counts them from 0 on"


def formats_of(formats: KVFormats | None, k_cache: torch.Tensor, v_cache: torch.Tensor) -> KVFormats:
    """The formats of a layer's cache. None means plain numbers of the tensors' types."""
    return formats or (PLAIN[k_cache.dtype], PLAIN[v_cache.dtype])
