"""What kernels are tuned on: public operations at the shapes of Qwen3.5, in sizes that its engine meets.

An operation may take several kernels; each is tuned inside it, with what runs before and after. Tensors are made where
`kernel_cases.DEVICE` says: on "meta" they take no memory, which is enough to ask for configurations and to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import kernel_cases
from benchmarks.kernel_cases import BLOCK_SIZE, decode_cases, prefill_cases, randn
from benchmarks.shapes import Shapes
from qwen35mm_kernels import SamplingRows, cpu, gpu
from qwen35mm_kernels.gpu.attention_prefill import flash_attention_prefill

VOCAB = 248_320
_EPS = 1e-6


@dataclass(frozen=True)
class Workload:
    """One operation on one set of inputs.

    Attributes:
        run: returns a tensor or several.
        expected: the reference's result of the inputs as they are before the first run.
        changed: what `run` works on in place.
        exact: whether the results must be equal, as token ids must.
    """

    name: str
    run: Callable[[], Any]
    expected: Callable[[], Any]
    changed: tuple[torch.Tensor, ...] = ()
    exact: bool = False


@dataclass(frozen=True)
class Operation:
    """Attributes:
    make: a workload of a model's shapes and a size.
    sizes: tokens of a prompt or sequences of a decode step; where a pair, see `make`.
    kernels: those that ask for a configuration in it.
    every_model: False where the checkpoints' sizes don't enter: one model is enough.
    """

    make: Callable[[Shapes, Any], Workload]
    sizes: tuple[Any, ...]
    kernels: tuple[str, ...]
    every_model: bool = True
    only_mixtures: bool = False

    def models(self, models: list[Shapes]) -> list[Shapes]:
        """Those of `models` that have this operation in a form of their own."""
        own = [s for s in models if s.experts is not None] if self.only_mixtures else models
        return own if self.every_model else own[:1]


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=kernel_cases.DEVICE)


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=kernel_cases.DEVICE)


def _from_cases(cases: Any, only: str, s: Shapes, size: int) -> Workload:
    """The benchmark's own case."""
    (case,) = cases(s, [size], only)
    return Workload(f"{case.kernel}, {case.shape}", case.ours, case.expected, case.changed)


def _causal_conv1d(s: Shapes, length: int) -> Workload:
    x, weight, state = randn(length, s.channels), randn(s.channels, 4), randn(s.channels, 3)
    return Workload(
        f"causal conv1d, {s.name} T={length}",
        lambda: gpu.causal_conv1d(x, weight, state),
        lambda: cpu.causal_conv1d(x.float(), weight.float(), state.float()),
    )


def _rms_norm(s: Shapes, rows: int) -> Workload:
    x, weight = randn(rows, s.hidden), randn(s.hidden)
    return Workload(
        f"rms norm, {s.name} N={rows}",
        lambda: gpu.rms_norm(x, weight, _EPS, zero_centred=True),
        lambda: cpu.rms_norm(x.float(), weight, _EPS, zero_centred=True),
    )


def _add_rms_norm(s: Shapes, rows: int) -> Workload:
    x, delta, weight = randn(rows, s.hidden), randn(rows, s.hidden), randn(s.hidden)
    return Workload(
        f"add + rms norm, {s.name} N={rows}",
        lambda: gpu.add_rms_norm(x, delta, weight, _EPS),
        lambda: cpu.add_rms_norm(x.clone(), delta, weight, _EPS),
        changed=(x,),
    )


def _attention_decode(s: Shapes, size: tuple[int, int]) -> Workload:
    """Sizes: sequences, and their length."""
    case = kernel_cases._attention_decode(s, *size)
    return Workload(f"{case.kernel}, {case.shape}", case.ours, case.expected)


def _attention_prefill(s: Shapes, size: tuple[int, int]) -> Workload:
    """Sizes: new tokens, and all of the sequence."""
    num_new, length = size
    q, gate = randn(2, num_new, s.heads, s.head_dim)
    k, v = randn(2, length, s.kv_heads, s.head_dim)
    table = torch.arange(length // BLOCK_SIZE, dtype=torch.int32, device=kernel_cases.DEVICE)
    arguments = q, gate, k, v, table, length
    options = {"block_size": BLOCK_SIZE, "scale": s.head_dim**-0.5}
    return Workload(
        f"paged attention prefill, {s.name} T={num_new} L={length}",
        lambda: gpu.paged_attention_prefill(*arguments, **options),
        lambda: flash_attention_prefill(*arguments, **options),
    )


def _mrope_cos_sin(s: Shapes, length: int) -> Workload:
    num_pairs = s.rotary_dim // 2
    positions = torch.arange(3 * length, device=kernel_cases.DEVICE).view(3, length)
    inv_freq = 1e7 ** -(torch.arange(num_pairs, device=kernel_cases.DEVICE) / num_pairs)
    third = num_pairs // 3
    sections = (num_pairs - 2 * third, third, third)
    return Workload(
        f"mrope cos sin, T={length}",
        lambda: gpu.mrope_cos_sin(positions, inv_freq, sections),
        lambda: cpu.mrope_cos_sin(positions, inv_freq, sections),
    )


def _vision_rope(s: Shapes, length: int) -> Workload:
    dim = s.vision_head_dim
    x = randn(length, 3, s.vision_heads, dim)[:, 0]
    angles = _rand(length, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return Workload(
        f"apply partial rope, {s.name} vision T={length}",
        lambda: gpu.apply_partial_rope(x, cos, sin),
        lambda: cpu.apply_partial_rope(x.float(), cos, sin),
    )


def _qk_norm_rope_write(s: Shapes, length: int) -> Workload:
    qkv = randn(length, 2 * (s.heads + s.kv_heads) * s.head_dim)
    angles = _rand(length, s.rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = randn(2, s.head_dim)
    k_cache, v_cache = randn(2, -(-length // BLOCK_SIZE) * BLOCK_SIZE, s.kv_heads, s.head_dim)
    rows = torch.arange(length, device=kernel_cases.DEVICE)
    inputs = qkv, cos, sin, q_norm, k_norm, _EPS
    return Workload(
        f"qk norm rope write, {s.name} N={length}",
        lambda: gpu.qk_norm_rope_write(*inputs, k_cache, v_cache, rows, num_heads=s.heads),
        lambda: cpu.qk_norm_rope_write(*inputs, k_cache.clone(), v_cache.clone(), rows, num_heads=s.heads),
        changed=(k_cache, v_cache),
    )


def _moe_experts(s: Shapes, num_tokens: int) -> Workload:
    inputs = kernel_cases.moe_inputs(s, num_tokens)
    return Workload(
        f"moe experts, {s.name} N={num_tokens}",
        lambda: gpu.moe_experts(*inputs),
        lambda: cpu.moe_experts(*inputs),
    )


def _sample(s: Shapes, batch: int, vocab: int = VOCAB) -> Workload:
    """Rows with the samplings that Qwen recommends, and one without filters."""
    logits = randn(batch, vocab) * 3
    seen = _zeros(batch, vocab, dtype=torch.bool), _zeros(batch, vocab, dtype=torch.bool)
    banned = _zeros(vocab, dtype=torch.bool)
    row = torch.arange(batch, device=kernel_cases.DEVICE)
    filtered = row % 4 != 3
    rows = SamplingRows(
        temperature=torch.where(row % 2 == 0, 0.7, 1.0),
        top_k=torch.where(filtered, 20, 0).int(),
        top_p=torch.where(filtered, torch.where(row % 2 == 0, 0.8, 0.95), 1.0),
        min_p=row * 0.0,
        repetition_penalty=row * 0.0 + 1,
        presence_penalty=row * 0.0 + 1.5,
        seeds=row * 0x1234567890AB,
        steps=row * 7919,
        slots=row,
    )
    return Workload(
        f"sample, B={batch}",
        lambda: gpu.sample(logits, rows, *seen, banned),
        lambda: cpu.sample(logits, rows, seen[0].clone(), seen[1].clone(), banned),
        changed=seen,
        exact=True,
    )


_PROMPTS, _STEPS, _BOTH = (512, 4096), (1, 8, 32), (1, 32, 4096)

OPERATIONS: Mapping[str, Operation] = {
    "gdn_prefill": Operation(
        functools.partial(_from_cases, prefill_cases, "gdn_prefill"),
        (512, 4096, 16384),
        ("gdn_prepare", "gdn_scan"),
    ),
    "gdn_step": Operation(functools.partial(_from_cases, decode_cases, "gdn_step"), _STEPS, ("gdn_decode_step",)),
    "attention_decode": Operation(
        _attention_decode,
        ((1, 4096), (1, 32768), (8, 4096), (32, 4096)),
        ("paged_attention_decode", "paged_attention_combine"),
    ),
    "attention_prefill": Operation(
        _attention_prefill, ((512, 512), (512, 8192), (2048, 2048), (8192, 8192)), ("paged_attention_prefill",)
    ),
    "moe_experts": Operation(
        _moe_experts,
        (1, 8, 64, 512, 2048, 8192),
        ("moe_gate_up", "moe_down", "moe_combine"),
        only_mixtures=True,
    ),
    "qk_norm_rope_write": Operation(_qk_norm_rope_write, _BOTH, ("qk_norm_rope_write",)),
    "causal_conv1d": Operation(_causal_conv1d, _PROMPTS, ("causal_conv1d",)),
    "add_rms_norm": Operation(_add_rms_norm, _BOTH, ("rms_norm",)),
    "rms_norm": Operation(_rms_norm, _BOTH, ("rms_norm",)),
    "gated_rms_norm": Operation(
        functools.partial(_from_cases, prefill_cases, "gated_norm"), _PROMPTS, ("gated_rms_norm",)
    ),
    "sample": Operation(_sample, _STEPS, ("sampling",), every_model=False),
    "apply_partial_rope": Operation(_vision_rope, (1024, 8192), ("apply_partial_rope",)),
    "mrope_cos_sin": Operation(_mrope_cos_sin, _BOTH, ("mrope_cos_sin",), every_model=False),
}
