"""Random quantised matrices, packed by the formats' definitions one number after the other, and what they mean."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# Its negative zero is zero here: read as integers they are one.
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packed:
    """A matrix as a checkpoint has it.

    Attributes:
        tensors: by the ends of their names behind the module's.
        expected: [out, in] float32.
        quantization: config.json's `quantization_config`.
    """

    tensors: Tensors
    expected: torch.Tensor
    quantization: Mapping[str, Any]


@dataclass(frozen=True)
class Chance:
    """Random tensors."""

    seed: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.seed)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def scales(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) / 64 + 1e-3).to(dtype)

    def order(self, width: int) -> torch.Tensor:
        return torch.randperm(width, generator=self.generator)


def words(rows: Sequence[Sequence[int]], bits: int) -> torch.Tensor:
    """Each row's numbers as fields of a word, and on in the next: [n, ceil(m * bits / 32)] int32."""
    count = -(-len(rows[0]) * bits // 32)
    wholes = (sum(number << bits * index for index, number in enumerate(row)) for row in rows)
    raw = b"".join(whole.to_bytes(4 * count, "little") for whole in wholes)
    return torch.frombuffer(bytearray(raw), dtype=torch.int32).view(len(rows), count)


def meaning(
    codes: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, group_of: Callable[[int, int], int]
) -> torch.Tensor:
    """(code - zero) * scale, one number after the other; float64 holds each product, so that it is rounded once."""
    code, scale = codes.tolist(), scales.float().tolist()
    zero = torch.zeros_like(scales).tolist() if zeros is None else zeros.tolist()
    rows = [
        [(number - zero[row][group]) * scale[row][group]
         for column, number in enumerate(numbers) for group in (group_of(row, column),)]
        for row, numbers in enumerate(code)
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).float()


def gptq(chance: Chance, out: int, width: int, *, bits: int, group: int, version: int = 1, ordered: bool) -> Packed:
    codes = chance.whole(0, 1 << bits, out, width)
    zeros, scales = chance.whole(2 - version, 1 << bits, out, width // group), chance.scales(out, width // group)
    group_of = torch.arange(width) // group
    group_of = group_of[chance.order(width)] if ordered else group_of
    tensors = {
        "qweight": words(codes.tolist(), bits).t(),
        "qzeros": words((zeros - (2 - version)).t().tolist(), bits),
        "scales": scales.t(),
        "g_idx": group_of.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    groups = group_of.tolist()
    return Packed(tensors, meaning(codes, zeros, scales, lambda _, column: groups[column]), config)


def auto_round(chance: Chance, out: int, width: int, *, packing: str, bits: int, group: int) -> Packed:
    """GPTQ's or AWQ's words under AutoRound's names; the matrix has other bits than config.json says for most."""
    if "awq" in packing:
        made = awq(chance, out, width, group=group)
    else:
        version = 1 if packing == "auto_round:auto_gptq" else 2
        made = gptq(chance, out, width, bits=bits, group=group, version=version, ordered=False)
        del made.tensors["g_idx"]
    config = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", "group_size": group}
    config |= {"bits": 4, "extra_config": {"a": {"bits": bits}}, "block_name_to_quantize": "model.layers"}
    return Packed(made.tensors, made.expected, config)


def awq(chance: Chance, out: int, width: int, *, group: int) -> Packed:
    codes, zeros = chance.whole(0, 16, out, width), chance.whole(0, 16, out, width // group)
    scales = chance.scales(out, width // group)

    def packed(columns: torch.Tensor) -> torch.Tensor:
        order = [8 * word + at for word in range(out // 8) for at in AWQ_ORDER]
        return words([[row[at] for at in order] for row in columns.t().tolist()], 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.t()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Packed(tensors, meaning(codes, zeros, scales, lambda _, column: column // group), config)


def packed_integers(
    chance: Chance, out: int, width: int, *, bits: int, group: int, symmetric: bool, ordered: bool
) -> Packed:
    codes, zeros = chance.whole(0, 1 << bits, out, width), torch.full((out, width // group), 1 << (bits - 1))
    zeros = zeros if symmetric else chance.whole(0, 1 << bits, *zeros.shape)
    scales = chance.scales(out, width // group, dtype=torch.bfloat16)
    group_of = torch.arange(width) // group
    group_of = group_of[chance.order(width)] if ordered else group_of
    tensors = {
        "weight_packed": words(codes.tolist(), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, width]),
        **({} if symmetric else {"weight_zero_point": words(zeros.t().tolist(), bits).t()}),
        **({"weight_g_idx": group_of.int()} if ordered else {}),
    }
    groups = group_of.tolist()
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    config = compressed({**scheme, "actorder": "group" if ordered else None})
    return Packed(tensors, meaning(codes, zeros, scales, lambda _, column: groups[column]), config)


def plain_integers(chance: Chance, out: int, width: int, *, group: int, symmetric: bool) -> Packed:
    codes, scales = chance.whole(-128, 128, out, width), chance.scales(out, width // group, dtype=torch.bfloat16)
    zeros = None if symmetric else chance.whole(-128, 128, out, width // group)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
    tensors |= {} if zeros is None else {"weight_zero_point": zeros.to(torch.int8)}
    config = compressed({"num_bits": 8, "type": "int", "symmetric": symmetric})
    return Packed(tensors, meaning(codes, zeros, scales, lambda _, column: column // group), config)


def paired_rows(chance: Chance, out: int, width: int, *, group: int, smoothed: bool) -> Packed:
    """ModelOpt's W4A16_AWQ: signed integers of two rows in a byte."""
    codes, scales = chance.whole(-8, 8, out, width), chance.scales(out, width // group, dtype=torch.float32)
    bytes_ = [
        [upper % 16 + lower % 16 * 16 for upper, lower in zip(*rows, strict=True)]
        for rows in codes.view(-1, 2, width).tolist()
    ]
    tensors = {"weight": torch.tensor(bytes_, dtype=torch.uint8), "weight_scale": scales}
    expected = meaning(codes, None, scales, lambda _, column: column // group)
    if smoothed:
        tensors["pre_quant_scale"] = 64 * chance.scales(width, dtype=torch.bfloat16)
        expected = expected * tensors["pre_quant_scale"].float()
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "config_groups": {"group_0": {"weights": {}}}}
    return Packed(tensors, expected, config)


def compressed(scheme: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": dict(scheme)}}}


def e4m3(chance: Chance, *shape: int) -> torch.Tensor:
    """Any of its numbers, save NaN."""
    codes = chance.whole(0, 254, *shape)
    return torch.where(codes < 127, codes, codes + 1).to(torch.uint8).view(torch.float8_e4m3fn)


def fp8(chance: Chance, out: int, width: int, *, block: tuple[int, int], per_row: bool = False) -> Packed:
    """Qwen's own FP8, by blocks that are narrower at the edges; or compressed-tensors' by rows."""
    codes = e4m3(chance, out, width)
    if per_row:
        scales = chance.scales(out, 1, dtype=torch.float32)
        config = compressed({"num_bits": 8, "type": "float", "strategy": "channel"})
        return Packed({"weight": codes, "weight_scale": scales}, meaning(codes, None, scales, lambda *_: 0), config)
    scales = chance.scales(-(-out // block[0]), -(-width // block[1]), dtype=torch.float32)
    rows = torch.stack([scales[row // block[0]] for row in range(out)])
    expected = meaning(codes, None, rows, lambda _, column: column // block[1])
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    return Packed({"weight": codes, "weight_scale_inv": scales}, expected, config)


def fp4(chance: Chance, out: int, width: int, *, kind: str, group: int) -> Packed:
    """`mxfp4`, and `nvfp4` of compressed-tensors and of `modelopt`."""
    codes = chance.whole(0, 16, out, width)
    halves = [[row[at] | row[at + 1] << 4 for at in range(0, width, 2)] for row in codes.tolist()]
    packed = torch.tensor(halves, dtype=torch.uint8)
    values = torch.tensor(E2M1)[codes]
    if kind == "mxfp4":
        powers = chance.whole(97, 157, out, width // group)
        scales, tensors = torch.exp2(powers - 127.0), {"weight_packed": packed, "weight_scale": powers.to(torch.uint8)}
    else:
        scale, whole = e4m3(chance, out, width // group), chance.scales(1, dtype=torch.float32)
        tensors = {"weight_scale": scale, **({"weight": packed} if kind == "modelopt" else {"weight_packed": packed})}
        tensors["weight_scale_2" if kind == "modelopt" else "weight_global_scale"] = whole
        scales = scale.float() * whole if kind == "modelopt" else scale.float() / whole
    config = {"quant_method": "modelopt"} if kind == "modelopt" else compressed({"num_bits": 4, "type": "float"})
    return Packed(tensors, meaning(values, None, scales, lambda _, column: column // group), config)


def bitsandbytes4(chance: Chance, out: int, width: int, *, run: int, nested: bool) -> Packed:
    count = out * width
    codes, table = chance.whole(0, 16, count).tolist(), chance.scales(16, dtype=torch.float32) - 1 / 128
    runs = -(-count // run)
    pairs = [*codes, 0][: count + count % 2]
    state: dict[str, Any] = {"shape": [out, width], "blocksize": run, "quant_type": "nf4", "dtype": "float16"}
    tensors = {
        "weight": torch.tensor([[high << 4 | low] for high, low in zip(pairs[::2], pairs[1::2], strict=True)]),
        "weight.quant_map": table,
    }
    tensors["weight"] = tensors["weight"].to(torch.uint8)
    absmax = chance.scales(runs, dtype=torch.float32)
    tensors["weight.absmax"] = absmax
    if nested:
        inner, whole = chance.whole(0, 256, runs), chance.scales(-(-runs // 4), dtype=torch.float32)
        known = chance.scales(256, dtype=torch.float32)
        state |= {"nested_blocksize": 4, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors |= {"weight.absmax": inner.to(torch.uint8), "weight.nested_absmax": whole}
        tensors["weight.nested_quant_map"] = known
        absmax = known[inner] * whole[torch.arange(runs) // 4] + 0.25
    said = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(said), dtype=torch.uint8)
    flat = table[torch.tensor(codes)] * absmax[torch.arange(count) // run]
    return Packed(tensors, flat.view(out, width), {"quant_method": "bitsandbytes", "load_in_4bit": True})


def bitsandbytes8(chance: Chance, out: int, width: int) -> Packed:
    codes, largest = chance.whole(-127, 128, out, width), chance.scales(out, dtype=torch.float32)
    expected = meaning(codes, None, largest[:, None] / 127, lambda *_: 0)
    return Packed({"weight": codes.to(torch.int8), "SCB": largest}, expected, {"quant_method": "bitsandbytes"})


# For whole checkpoints, whose matrices are multiples of 32 wide.
METHODS: dict[str, Callable[[Chance, int, int], Packed]] = {
    "fp8": lambda *at: fp8(*at, block=(16, 32)),
    "fp8-rows": lambda *at: fp8(*at, block=(1, 1), per_row=True),
    "gptq": lambda *at: gptq(*at, bits=4, group=32, ordered=False),
    "gptq-order": lambda *at: gptq(*at, bits=8, group=32, version=2, ordered=True),
    "awq": lambda *at: awq(*at, group=32),
    "auto-round": lambda *at: auto_round(*at, packing="auto_round:auto_gptq", bits=8, group=32),
    "modelopt-int4": lambda *at: paired_rows(*at, group=32, smoothed=True),
    "packed": lambda *at: packed_integers(*at, bits=4, group=16, symmetric=False, ordered=True),
    "int8": lambda *at: plain_integers(*at, group=32, symmetric=False),
    "nvfp4": lambda *at: fp4(*at, kind="nvfp4", group=16),
    "modelopt": lambda *at: fp4(*at, kind="modelopt", group=16),
    "mxfp4": lambda *at: fp4(*at, kind="mxfp4", group=32),
    "bitsandbytes-4": lambda *at: bitsandbytes4(*at, run=32, nested=True),
    "bitsandbytes-8": lambda *at: bitsandbytes8(*at),
}


def write_packed(method: str, source: Path, folder: Path, is_matrix: Callable[[str], bool]) -> Tensors:
    """A checkpoint with random matrices in a method's format in the place of others; returns what they mean."""
    shutil.copytree(source, folder)
    tensors: Tensors = {}
    expected: Tensors = {}
    quantization: Mapping[str, Any] = {}
    for seed, (name, x) in enumerate(load_file(source / "model.safetensors").items()):
        if is_matrix(name) and x.ndim == 2:
            made = METHODS[method](Chance(seed), *x.shape)
            prefix, quantization, expected[name] = name.removesuffix("weight"), made.quantization, made.expected
            tensors |= {f"{prefix}{part}": part_tensor.contiguous() for part, part_tensor in made.tensors.items()}
        else:
            tensors[name] = expected[name] = x
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(quantization)}))
    return expected


def whole_words(out: int, width: int, bits: int) -> tuple[int, int]:
    """The next sizes whose fields fill words."""
    step = 32 // math.gcd(32, bits)
    return -(-out // step) * step, -(-width // step) * step
