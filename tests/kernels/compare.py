"""How kernel tests compare: an operation of a backend with the reference's, and tensors that lie between others."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeGuard

import torch

from qwen35mm_kernels import cpu, reference
from qwen35mm_kernels.cpu.native.products import GroupedRows

# Odd lengths around a chunk, more than one block of every kernel, and last more than one of torch.
LENGTHS = (1, 63, 64, 65, 130, 257)
DTYPES = (torch.float32, torch.bfloat16)
# Each length in one of the types. `make test` interprets the first and the last.
LENGTHS_AND_DTYPES = (
    (65, torch.float32),
    (1, torch.bfloat16),
    (64, torch.float32),
    (63, torch.bfloat16),
    (257, torch.bfloat16),
    (1, torch.float32),
    (130, torch.bfloat16),
)
# What compiled libraries leave to torch.
UNCOMPILED = (
    "fp8_experts",
    "fp8_linear",
    "integer_experts",
    "integer_linear",
    "moe_experts",
    "moe_route",
    "mrope_cos_sin",
    "norm_linear",
)
# Triton's interpreter cuts bfloat16 off where a card rounds, except where a kernel goes through `arithmetic.round_to`.
_CUT_OFF_INTERPRETED = {
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "causal_conv1d",
    "gdn_decode_step",
    "paged_attention_prefill",
    "paged_attention_decode",
}


@dataclass(frozen=True)
class Backend:
    """A module of operations and the device that a test runs them on.

    Attributes:
        name: "cpu", a library of `cpu.native`, "interpreted" or "cuda".
    """

    name: str
    ops: Any
    device: torch.device

    @property
    def is_triton(self) -> bool:
        return self.name in ("interpreted", "cuda")

    def run(self, op: str, *arguments: Any, **options: Any) -> Any:
        """An operation on the device. What it changes in place is changed here, and its results are on the CPU."""
        there = [_mapped(argument, lambda tensor: moved(tensor, self.device)) for argument in arguments]
        result = getattr(self.ops, op)(*there, **options)
        for argument, changed in zip(arguments, there, strict=True):
            for here, tensor in zip(_tensors(argument), _tensors(changed), strict=True):
                here.untyped_storage().copy_(tensor.untyped_storage())
        return _mapped(result, torch.Tensor.cpu)

    def check(self, op: str, *arguments: Any, limit: float | None = None, **options: Any) -> Any:
        """Runs an operation and holds that it is the reference's, in what it returns and in what it changes in place.

        What the reference leaves alone keeps every bit, and so does what lies around a tensor that is a slice.

        Returns:
            The operation's result.
        """
        before = [tensor for argument in arguments for tensor in _tensors(argument)]
        wholes = [_whole(tensor).clone() for tensor in before]
        expected_arguments = [_mapped(argument, torch.Tensor.clone) for argument in arguments]
        expected = getattr(reference, op)(*expected_arguments, **options)
        changed = [tensor for argument in expected_arguments for tensor in _tensors(argument)]
        kept = [_same_bits(*pair) for pair in zip(before, changed, strict=True)]
        found = self.run(op, *arguments, **options)
        for ours, theirs in zip(_tensors(found), _tensors(expected), strict=True):
            self._close(op, ours, theirs, limit)
        for ours, theirs, same, whole in zip(before, changed, kept, wholes, strict=True):
            if same:
                assert _same_bits(ours, theirs), f"{op} changed what it must not"
            else:
                self._close(op, ours, theirs, limit)
                whole.as_strided(ours.shape, ours.stride(), ours.storage_offset()).copy_(ours)
            assert _same_bits(_whole(ours), whole), f"{op} wrote beside a tensor"
        return found

    def _close(self, op: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float | None) -> None:
        assert ours.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            return
        if limit is None and ours.dtype == torch.bfloat16 and self._rounds_roughly(op):
            limit = 1e-2
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_close(ours.nan_to_num(7.0), theirs.nan_to_num(7.0), limit)

    def _rounds_roughly(self, op: str) -> bool:
        # Torch rounds after every step, the reference once.
        interpreted = self.name == "interpreted" and op in _CUT_OFF_INTERPRETED
        return interpreted or getattr(self.ops, op) in (cpu.integer_experts, cpu.moe_experts, cpu.norm_linear)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN where `actual` has one."""
    assert actual.shape == expected.shape
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return (difference / torch.linalg.vector_norm(expected.double())).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    """Same dtype, and equal or a relative error of at most `limit` (by default 1e-5, or 5e-3 in bfloat16)."""
    assert actual.dtype == expected.dtype
    if limit is None:
        limit = 5e-3 if actual.dtype == torch.bfloat16 else 1e-5
    assert torch.equal(actual, expected) or relative_error(actual, expected) <= limit


def sliced(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, as a slice of a tensor with wider rows and more of them."""
    first, *middle, last = shape
    wide = torch.randn(first + 2, *middle, last + 5).to(dtype)
    return wide[1:-1, ..., 3:-2]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, lying there as it lies here: with its strides, its offset and what is around it.

    `Tensor.to` makes a slice dense, and a kernel would never see on a card what it is tested with on a CPU.
    """
    return _whole(tensor).to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a part of."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.view(bits), second.view(bits))


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument or a result: one, a tuple's or a dataclass's."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(value) if _is_tensors(value) else []


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if is_dataclass(value):
        make: Any = type(value)
        return make(*map(function, _tensors(value)))
    return tuple(map(function, value)) if _is_tensors(value) else value


def _is_tensors(value: Any) -> TypeGuard[tuple[torch.Tensor, ...]]:
    return isinstance(value, tuple) and all(isinstance(part, torch.Tensor) for part in value)


def dequantised(rows: GroupedRows, width: int) -> torch.Tensor:
    """[n, in] float32: what a checkpoint's groups stand for, each number rounded once."""

    def repeated(per_group: torch.Tensor) -> torch.Tensor:
        return per_group.double().repeat_interleave(width, dim=1)[:, : rows.integers.shape[1]]

    exact = rows.integers.double() * repeated(rows.scales)
    return (exact if rows.minima is None else exact + repeated(rows.minima)).float()
