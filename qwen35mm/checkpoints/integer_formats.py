"""Matrices of integers times scales: GPTQ, AWQ, compressed-tensors' packed and plain ones, ModelOpt's, bitsandbytes'.

The writers' code defines the formats: GPTQModel's, AutoRound's and AutoAWQ's linear layers, compressed-tensors'
compressors, ModelOpt's export, bitsandbytes' Linear8bitLt. Nothing is rounded here: zero points are subtracted as
integers, and scales are multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qwen35mm.checkpoints.safetensors_files import StoredTensor, read_tensor
from qwen35mm.checkpoints.sources import Format, Grouped, as_groups
from qwen35mm_kernels.cpu.native.products import Groups

FLOATS = ("F16", "BF16", "F32")
_ORDER = ("I32", "I64")
# AutoAWQ puts column order[i] of eight into a word's i-th nibble.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, w] int32 -> [n, w * 32 // bits] uint8: fields of `bits`, from the lowest bit up."""
    # Flattened first: with one row or column torch calls any strides contiguous, and then can't view them.
    octets = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return octets
    if bits == 4:  # by far the most common, and twice as fast
        return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    if 8 % bits == 0:
        return (octets[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & ((1 << bits) - 1)).flatten(-2)
    # A field may span two words.
    digits = (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    fields = digits[..., : digits.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return (fields << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True)
class Gptq(Format):
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out] and `g_idx` [in].

    Attributes:
        bits: of a value.
        zero_offset: 1 if zero points are stored less one, as in GPTQ's first format.
        ordered: whether columns have their own order, without which the numbers are wrong.
    """

    name = "GPTQ"
    dtypes: ClassVar = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": _ORDER}

    bits: int
    zero_offset: int = 1
    ordered: bool = False

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        weight, zeros, scales, *_ = needed(parts, "qweight", "qzeros", "scales", *["g_idx"] * self.ordered)
        (words, out), (groups, _) = pair(weight), pair(scales)
        width = words * 32 // self.bits
        fits = zeros.shape == (groups, -(-out * self.bits // 32)) and scales.shape == (groups, out)
        if not fits or width % groups or ("g_idx" in parts and parts["g_idx"].shape != (width,)):
            raise ValueError(
                f"has parts that don't fit together: qweight {list(weight.shape)}, qzeros {list(zeros.shape)}, "
                f"scales {list(scales.shape)} at {self.bits} bits"
            )
        return out, width

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        scales = parts["scales"].float().t().contiguous()
        zeros = unpack(parts["qzeros"], self.bits).t()[: shape[0]].to(torch.int16) + self.zero_offset
        if int(zeros.max()) >= 1 << self.bits:
            raise ValueError(f"has zero points out of the range of {self.bits} bits")
        codes = unpack(parts["qweight"].t(), self.bits)
        group_of = parts["g_idx"].long() if "g_idx" in parts else None
        return affine(codes, zeros, scales, self.bits, group_of)

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        return _with_zeros(self.bits, parts, "scales", shape[1], parts["scales"].shape[0])


def stored_bits(parts: Mapping[str, StoredTensor]) -> int | None:
    """Bits of a value in GPTQ's or AWQ's words, by the sizes of `qzeros` and `scales`; None if these don't say."""
    if "qzeros" not in parts or "scales" not in parts:
        return None
    zeros, scales = parts["qzeros"].shape, parts["scales"].shape
    if len(zeros) != 2 or len(scales) != 2 or scales[1] < 1 or scales[1] % 32:
        return None
    bits, rest = divmod(zeros[1] * 32, scales[1])
    return bits if not rest and 2 <= bits <= 8 else None


class Awq(Format):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8] and `scales` [groups, out]: 4 bits in AWQ's own order."""

    name = "AWQ"
    dtypes: ClassVar = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        weight, zeros, scales = needed(parts, "qweight", "qzeros", "scales")
        (width, words), (groups, out) = pair(weight), pair(scales)
        if words * 8 != out or zeros.shape != (groups, words) or width % groups:
            raise ValueError(
                f"has parts that don't fit together: qweight {list(weight.shape)}, qzeros {list(zeros.shape)}, "
                f"scales {list(scales.shape)}"
            )
        return out, width

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        order = torch.tensor(_AWQ_ORDER).argsort()
        codes, zeros = (
            unpack(parts[name], 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).t() for name in ("qweight", "qzeros")
        )
        scales = parts["scales"].float().t().contiguous()
        return affine(codes, zeros.to(torch.int16), scales, 4)

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        return _with_zeros(4, parts, "scales", shape[1], parts["scales"].shape[0])


@dataclass(frozen=True)
class PackedIntegers(Format):
    """compressed-tensors' `packed` [out, in * bits / 32], `scale` [out, groups] and `shape`; asymmetric ones also have
    `zero_point` [out * bits / 32, groups], and groups in another order `g_idx` [in].

    Attributes:
        also: parts that config.json announces.
    """

    name = "packed integers"
    dtypes: ClassVar = {"packed": ("I32",), "scale": FLOATS, "shape": ("I64",), "zero_point": ("I32",), "g_idx": _ORDER}

    also: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        packed, scale, shape, *_ = needed(parts, "packed", "scale", "shape", *self.also)
        if math.prod(shape.shape) != 2 or shape.dtype != "I64":
            raise ValueError("has a weight_shape that isn't two whole numbers")
        out, width = read_tensor(shape).tolist()
        if packed.shape != (out, -(-width * _bits(packed.shape[1], width) // 32)) or out < 1:
            raise ValueError(f"has a weight_packed of {list(packed.shape)}, which isn't {[out, width]} in 1 to 8 bits")
        check_groups(scale, out, width)
        if "g_idx" in parts and parts["g_idx"].shape != (width,):
            raise ValueError(f"has a weight_g_idx of {list(parts['g_idx'].shape)} for {width} columns")
        return out, width

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        out, width = shape
        bits = _bits(parts["packed"].shape[1], width)
        scales = spread(parts["scale"], out)
        # Both are signed, stored with an offset.
        codes, zeros = unpack(parts["packed"], bits)[:, :width], torch.tensor(1 << (bits - 1), dtype=torch.int16)
        if "zero_point" in parts:
            zeros = unpack(parts["zero_point"].t(), bits).t()[:out].to(torch.int16)
        group_of = parts["g_idx"].long() if "g_idx" in parts else None
        return affine(codes, zeros.expand_as(scales), scales, bits, group_of)

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        bits, num_groups = _bits(parts["packed"].shape[1], shape[1]), _num_groups(parts["scale"], shape[0])
        if "zero_point" in parts or "g_idx" in parts:
            return _with_zeros(bits, parts, "scale", shape[1], num_groups)
        return as_groups(bits, shape[1], num_groups)


@dataclass(frozen=True)
class PlainIntegers(Format):
    """compressed-tensors' int8 `codes` [out, in], `scale` [out, groups], [out, 1] or [1], and `zero_point` like it.

    Attributes:
        also: parts that config.json announces.
    """

    name = "int8"
    dtypes: ClassVar = {"codes": ("I8",), "scale": FLOATS, "zero_point": ("I8",)}

    also: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        codes, scale, *_ = needed(parts, "codes", "scale", *self.also)
        out, width = pair(codes)
        check_groups(scale, out, width)
        if "zero_point" in parts and parts["zero_point"].shape != scale.shape:
            raise ValueError(
                f"has a weight_zero_point of {list(parts['zero_point'].shape)} and a weight_scale of another shape"
            )
        return out, width

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        out, width = shape
        scales = spread(parts["scale"], out)
        group_width = -(-width // scales.shape[1])
        if "zero_point" not in parts:
            return Grouped(parts["codes"], scales, group_width)
        zeros = spread(parts["zero_point"], out).to(torch.int16)
        return affine(parts["codes"], zeros, scales, 8)

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        num_groups = _num_groups(parts["scale"], shape[0])
        if "zero_point" in parts:
            return _with_zeros(8, parts, "scale", shape[1], num_groups)
        return as_groups(8, shape[1], num_groups)


class PairedRows(Format):
    """ModelOpt's `codes` uint8 [out / 2, in], two rows' signed integers in one, the upper row in the lower bits; and
    `scale` [out, groups]."""

    name = "int4"
    dtypes: ClassVar = {"codes": ("U8",), "scale": FLOATS}

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        codes, scale = needed(parts, "codes", "scale")
        pairs, width = pair(codes)
        check_groups(scale, 2 * pairs, width)
        return 2 * pairs, width

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        scales, packed = spread(parts["scale"], shape[0]), parts["codes"].view(torch.int8)
        # Shifting to the left and back repeats the sign.
        codes = torch.stack([(packed << 4) >> 4, packed >> 4], dim=1).flatten(0, 1)
        return Grouped(codes, scales, shape[1] // scales.shape[1])

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        return as_groups(4, shape[1], _num_groups(parts["scale"], shape[0]))


class RowIntegers(Format):
    """bitsandbytes' int8 `codes` [out, in] and `SCB` [out], each row's largest value, which 127 stands for."""

    name = "int8 rows"
    dtypes: ClassVar = {"codes": ("I8",), "SCB": FLOATS, "weight_format": ("U8",)}

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        codes, scale = needed(parts, "codes", "SCB")
        if scale.shape != codes.shape[:1]:
            raise ValueError(f"has an SCB of {list(scale.shape)} for {codes.shape[0]} rows")
        return pair(codes)

    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        return Grouped(parts["codes"], parts["SCB"].float()[:, None] / 127, shape[1])

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | None:
        return as_groups(8, shape[1], 1)


def affine(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, group_of: torch.Tensor | None = None
) -> Grouped:
    """Subtracts each group's zero point, zeros [out, groups] int16, from codes [out, in]. May overwrite the codes.

    Raises:
        ValueError: `group_of` names a group that doesn't exist.
    """
    num_groups = scales.shape[1]
    width, kind = codes.shape[1] // num_groups, torch.int8 if bits < 8 else torch.int16
    # In place: small integers have the same bits signed and unsigned.
    less = codes.view(kind) if kind == torch.int8 else codes.to(kind)
    if group_of is None or are_neighbours(group_of, num_groups):
        less.unflatten(1, (num_groups, width)).sub_(zeros.to(kind)[..., None])
        return Grouped(less, scales, width)
    if not bool(((group_of >= 0) & (group_of < num_groups)).all()):
        raise ValueError(f"has a g_idx that names groups beyond its {num_groups}")
    return Grouped(less.sub_(zeros.to(kind)[:, group_of]), scales, width, group_of)


def are_neighbours(group_of: torch.Tensor, num_groups: int) -> bool:
    """Whether the groups [in] of columns are the default ones, in order."""
    width = len(group_of)
    return torch.equal(group_of, torch.arange(width) * num_groups // width)


def needed(parts: Mapping[str, StoredTensor], *names: str) -> list[StoredTensor]:
    """The parts of these names; raises ValueError if one is missing."""
    missing = [name for name in names if name not in parts]
    if missing:
        raise ValueError(f"lacks its {', '.join(missing)}")
    return [parts[name] for name in names]


def pair(tensor: StoredTensor) -> tuple[int, int]:
    """A matrix's shape; raises ValueError for any other tensor."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ValueError(f"has a part {tensor.name} that is no matrix: {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def check_groups(scale: StoredTensor, out: int, width: int) -> None:
    """Raises ValueError unless there is one scale, one a row, or one for each group of neighbours in a row."""
    shape = scale.shape
    is_one = math.prod(shape) == 1
    if not is_one and not (
        shape[0] == out and (len(shape) == 1 or (len(shape) == 2 and shape[1] and width % shape[1] == 0))
    ):
        raise ValueError(f"has a weight_scale of {list(shape)}, which doesn't fit {[out, width]}")


def spread(scale: torch.Tensor, out: int) -> torch.Tensor:
    """Scales that passed `check_groups` -> [out, groups] float32."""
    found = scale.float()
    return found.reshape(1, 1).expand(out, 1) if found.numel() == 1 else found.view(out, -1)


def _num_groups(scale: StoredTensor, out: int) -> int:
    """Groups of a row, for scales that passed `check_groups`."""
    return max(1, math.prod(scale.shape) // out)


def _with_zeros(bits: int, parts: Mapping[str, StoredTensor], scale: str, width: int, num_groups: int) -> Groups | None:
    """Groups of integers with zero points; None if a group's columns aren't neighbours, or if a scale times a zero
    point may not fit float32 exactly."""
    if "g_idx" in parts and not are_neighbours(read_tensor(parts["g_idx"]).long(), num_groups):
        return None
    is_exact = parts[scale].dtype in ("F16", "BF16")
    return as_groups(bits, width, num_groups, has_minima=True) if is_exact else None


def _bits(words: int, width: int) -> int:
    """Bits of a value, from the number of words for `width` values."""
    bits = words * 32 // width if width > 0 else 0
    if not 1 <= bits <= 8:
        raise ValueError(f"has {words} words for {width} columns, which aren't 1 to 8 bits a value")
    return bits
