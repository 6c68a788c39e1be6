"""How keys and values lie in the cache: as numbers of a type, or as codes with a scale for every 32 neighbours.

A row is what one head of one token takes; its bytes depend on nothing but its values. A format of codes has rows of
bytes, one block for each `GROUP` values: the scale in bfloat16, then the codes. Naively: `reference.kv_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
_SCALE_BYTES = 2


@dataclass(frozen=True)
class KVFormat:
    """One way of keeping them.

    Attributes:
        name: what people call it.
        number: what the compiled part calls it (kv_rows.h).
        dtype: of the numbers; torch.uint8 of codes.
        bits: of a code; 0 where there are none.
        codes: of codes that are numbers of a type, that type; None of integers.
        largest: what the number of the largest size in a group becomes.
    """

    name: str
    number: int
    dtype: torch.dtype
    bits: int = 0
    codes: torch.dtype | None = None
    largest: float = 0.0

    @property
    def block_bytes(self) -> int:
        """Of `GROUP` codes and their scale."""
        return _SCALE_BYTES + GROUP * self.bits // 8

    def fits(self, head_dim: int) -> bool:
        """Whether heads of this size can be kept so."""
        return not self.bits or head_dim % GROUP == 0

    def row_width(self, head_dim: int) -> int:
        """Elements of `dtype` in a row."""
        return head_dim // GROUP * self.block_bytes if self.bits else head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row."""
        return self.row_width(head_dim) * self.dtype.itemsize

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of values [..., D], rounded once: [..., row_width] of `dtype`. What is no number stays none."""
        if self.dtype == torch.float16:
            x = x.clamp(-65504.0, 65504.0)  # its largest
        if not self.bits:
            return x.to(self.dtype)
        groups = x.float().unflatten(-1, (-1, GROUP))
        top, bottom = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        extreme = torch.where(top > -bottom, top, bottom)
        # Four bits have one code more below zero than above: the extreme takes it.
        scale = (extreme / -8.0 if self.bits == 4 else extreme.abs() / self.largest).to(torch.bfloat16)
        steps = torch.where(scale.abs() > 0, groups / scale.float(), 0.0)
        if self.codes is not None:
            codes = steps.clamp(-self.largest, self.largest).to(self.codes).view(torch.uint8)
        elif self.bits == 8:
            codes = steps.clamp(-127, 127).round().to(torch.int8).view(torch.uint8)
        else:
            low, high = (steps.clamp(-8, 7).round() + 8).to(torch.uint8).split(GROUP // 2, dim=-1)
            codes = low | high << 4
        return torch.cat([scale.view(torch.uint8), codes], dim=-1).flatten(-2)

    def dequantise(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values [..., D] of rows [..., row_width], in another type; a product of code and scale is rounded once."""
        if not self.bits:
            return rows.to(dtype)
        blocks = rows.unflatten(-1, (-1, self.block_bytes))
        scale = blocks[..., :_SCALE_BYTES].contiguous().view(torch.bfloat16).float()
        codes = blocks[..., _SCALE_BYTES:]
        if self.codes is not None:
            steps = codes.contiguous().view(self.codes).float()
        elif self.bits == 8:
            steps = codes.contiguous().view(torch.int8).float()
        else:
            steps = torch.cat([codes & 15, codes >> 4], dim=-1).float() - 8
        return (steps * scale).flatten(-2).to(dtype)

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Whether no scale of rows [..., row_width] is NaN or infinite; of numbers whoever holds them can ask."""
        if not self.bits or not rows.numel():
            return True
        scales = rows.unflatten(-1, (-1, self.block_bytes))[..., :_SCALE_BYTES].contiguous().view(torch.bfloat16)
        return bool(scales.isfinite().all())


_BYTES = torch.uint8
FORMATS = {
    format.name: format
    for format in (
        KVFormat("float32", 0, torch.float32),
        KVFormat("bf16", 1, torch.bfloat16),
        KVFormat("f16", 2, torch.float16),
        KVFormat("fp8", 3, _BYTES, bits=8, codes=torch.float8_e4m3fn, largest=448.0),
        KVFormat("fp8_e5m2", 4, _BYTES, bits=8, codes=torch.float8_e5m2, largest=57344.0),
        KVFormat("int8", 5, _BYTES, bits=8, largest=127.0),
        KVFormat("int4", 6, _BYTES, bits=4),
    )
}
PLAIN = {format.dtype: format for format in FORMATS.values() if not format.bits}

# Of keys, and of values.
KVFormats = tuple[KVFormat, KVFormat]


def formats_of(formats: KVFormats | None, k_cache: torch.Tensor, v_cache: torch.Tensor) -> KVFormats:
    """The formats of a layer's cache; where none are given, its tensors hold plain numbers."""
    return formats or (PLAIN[k_cache.dtype], PLAIN[v_cache.dtype])
