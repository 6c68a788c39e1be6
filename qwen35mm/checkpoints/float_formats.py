"""Matrices of small floats times scales: FP8 by blocks, by rows or whole, NVFP4 and MXFP4, bitsandbytes' 4 bits.

Defined by: transformers' Fp8Dequantize, compressed-tensors' compressors, NVIDIA's ModelOpt, the OCP Microscaling
specification, and bitsandbytes' Params4bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qwen35mm.checkpoints.integer_formats import FLOATS, check_groups, needed, pair, spread
from qwen35mm.checkpoints.safetensors_files import StoredTensor, read_tensor
from qwen35mm.checkpoints.sources import Format, Grouped, as_groups
from qwen35mm.outside_json import load_json
from qwen35mm_kernels.cpu.native.products import Groups
from qwen35mm_kernels.reference.fp8 import GROUP, Blocks

# e2m1's values, doubled: whole numbers. The sign is the fourth bit.
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


@dataclass(frozen=True)
class Fp8(Format):
    """`codes` [out, in] or [experts, out, in], and `scale`: one for all, for a row, for a row's group, or for a block.

    Attributes:
        block: rows and columns of a block; None for scales by rows.
    """

    name = "FP8"
    dtypes: ClassVar = {"codes": ("F8_E4M3",), "scale": (*FLOATS, "U8")}

    block: tuple[int, int] | None = None

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        codes, scale = needed(parts, "codes", "scale")
        if self._is_in_blocks(codes.shape, scale.shape):
            return codes.shape
        if len(codes.shape) == 2 and (self.block is None or _is_for_rows(scale.shape, codes.shape[0])):
            check_groups(scale, *pair(codes))
        elif self.block is None or len(codes.shape) not in (2, 3):
            raise ValueError(
                f"is {list(codes.shape)} with a scale of {list(scale.shape)}, and no size of blocks is known"
            )
        else:
            raise ValueError(
                f"has a scale of {list(scale.shape)}, which doesn't fit {list(codes.shape)} in blocks of "
                f"{self.block[0]} x {self.block[1]}"
            )
        return codes.shape

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        codes, scale = parts["codes"].view(-1, shape[-1]), _powers(parts["scale"])
        if self.block is None or not self._is_in_blocks(shape, tuple(scale.shape)):
            scales = spread(scale, len(codes))
            return Grouped(codes, scales, -(-shape[-1] // scales.shape[1]))
        scales = scale.repeat_interleave(self.block[0], dim=-2)[..., : shape[-2], :]
        return Grouped(codes, scales.flatten(0, -2), self.block[1])

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Blocks | None:
        scale = parts["scale"].shape
        block = self.block if self._is_in_blocks(shape, scale) else None
        if block is not None and block[0] != 1:
            return Blocks(GROUP) if block == (GROUP, GROUP) else None
        num_groups = max(1, math.prod(scale) // math.prod(shape[:-1]))
        if num_groups == 1:
            return Blocks(1, True)
        width = shape[-1] / num_groups if block is None else block[1]
        return Blocks(1) if width == GROUP and shape[-1] % GROUP == 0 else None

    def _is_in_blocks(self, shape: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        """Whether there is a scale for each block; the last ones of a row or column may be narrower."""
        if self.block is None or len(shape) not in (2, 3):
            return False
        return scale == (*shape[:-2], -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1]))


@dataclass(frozen=True)
class Fp4(Format):
    """e2m1 numbers: `packed` [out, in / 2] uint8, the first in the lower bits; `scale` [out, groups], e4m3 or powers of
    two; for NVFP4 also `global_scale`, one number.

    Attributes:
        divides: whether to divide the scale by the global one, as in compressed-tensors; else multiply.
    """

    name = "FP4"
    dtypes: ClassVar = {"packed": ("U8",), "scale": ("F8_E4M3", "U8"), "global_scale": FLOATS}

    divides: bool = True

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        packed, scale = needed(parts, "packed", "scale")
        (out, halves), (rows, groups) = pair(packed), pair(scale)
        if rows != out or (2 * halves) % groups:
            raise ValueError(f"has a scale of {list(scale.shape)}, which doesn't fit {[out, 2 * halves]}")
        if scale.dtype != "U8" and math.prod(needed(parts, "global_scale")[0].shape) != 1:
            raise ValueError("has a global scale that isn't one number")
        return out, 2 * halves

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        scales = _powers(parts["scale"])
        if "global_scale" in parts:
            whole = parts["global_scale"].float().reshape(())
            scales = scales / whole if self.divides else scales * whole
        codes = parts["packed"]
        both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        return Grouped(_E2M1[both.int()], scales / 2, shape[1] // scales.shape[1])

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        return as_groups(8, shape[1], parts["scale"].shape[1])


class Bitsandbytes4(Format):
    """`codes` uint8, two values each, the first in the upper bits; `absmax` for each run of values; `quant_map` of 16
    floats; and `quant_state`, JSON with shape and run length. A nested map may quantise `absmax`."""

    name = "4-bit floats"
    dtypes: ClassVar = {
        **dict.fromkeys(("codes", "quant_state"), ("U8",)),
        **dict.fromkeys(("quant_map", "nested_absmax", "nested_quant_map"), FLOATS),
        "absmax": (*FLOATS, "U8"),
    }

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        codes, absmax, table, stored = needed(parts, "codes", "absmax", "quant_map", "quant_state")
        state = _State.read(read_tensor(stored))
        shape, run = state.shape, state.run
        count = math.prod(shape)
        if math.prod(codes.shape) != -(-count // 2) or math.prod(table.shape) != 16:
            raise ValueError(f"has codes of {list(codes.shape)}, which don't fit {list(shape)}")
        if math.prod(absmax.shape) != -(-count // run):
            raise ValueError(f"has an absmax of {list(absmax.shape)}, which doesn't fit {list(shape)} in runs of {run}")
        if absmax.dtype == "U8":
            needed(parts, "nested_absmax", "nested_quant_map")
        return shape

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        state, (out, width) = _State.read(parts["quant_state"]), shape
        absmax = parts["absmax"].flatten()
        if absmax.dtype == torch.uint8:
            nested = parts["nested_absmax"].float().repeat_interleave(state.nested_run)[: len(absmax)]
            absmax = parts["nested_quant_map"].float()[absmax.int()] * nested + state.nested_offset
        codes = parts["codes"].flatten()
        both = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()[: out * width].view(out, width)
        values, run = parts["quant_map"].float()[both.int()], state.run
        if width % run == 0:
            return Grouped(values, absmax.float().view(out, -1), run)
        # Runs may continue in the next row.
        return Grouped(values, absmax.float().repeat_interleave(run)[: out * width].view(out, width), 1)


def _is_for_rows(scale: tuple[int, ...], out: int) -> bool:
    """Whether a scale is one number or belongs to rows, rather than to blocks of them."""
    return math.prod(scale) == 1 or (scale[0] == out and out > 1)


@dataclass(frozen=True)
class _State:
    """The JSON that bitsandbytes writes beside a matrix."""

    shape: tuple[int, int]
    run: int
    nested_run: int
    nested_offset: float

    @classmethod
    def read(cls, stored: torch.Tensor) -> _State:
        """Raises ValueError."""
        try:
            values = load_json(stored.flatten().view(torch.uint8).numpy().tobytes())
            out, width = values["shape"]
            runs = values["blocksize"], values.get("nested_blocksize", 1)
            offset = float(values.get("nested_offset", 0))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError("has a quant_state that can't be read") from None
        if not all(type(each) is int and each > 0 for each in (out, width, *runs)) or not math.isfinite(offset):
            raise ValueError(f"has an impossible quant_state: {values}")
        return cls((out, width), *runs, offset)


def _powers(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents of two, biased by 127, and 255 is NaN."""
    if scale.dtype != torch.uint8:
        return scale.float()
    return torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))
