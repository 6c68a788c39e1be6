"""What `kernels.py` measures: our operations at the shapes of Qwen3.5, and flash-linear-attention's beside them.

Where ours does more in one call, the peer is what does the same by flash-linear-attention's operations one after the
other, without what it has no operation for (gates, and a decode step's convolution): its result is made before. Its
functions want dense inputs, and get them: the copies that a model has to make for them are not counted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shapes import Shapes
from qwen35mm_kernels import cpu, gpu, reference
from qwen35mm_kernels.cpu.attention import attention_decode
from qwen35mm_kernels.cpu.conv1d import causal_conv1d_step
from qwen35mm_kernels.cpu.gated_delta_rule import gdn_gates
from qwen35mm_kernels.gpu.attention_prefill import flash_attention_prefill

DEVICE = "cuda"
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        expected: the reference's result of the same inputs, for the check before timing.
        peer: None where flash-linear-attention has no such operation.
        graph: whether it is replayed from a CUDA graph.
        changed: the tensors that the operation works on in place, so that two runs can start alike.
    """

    kernel: str
    shape: str
    ours: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor]
    num_bytes: int
    num_flops: int = 0
    peer: Callable[[], object] | None = None
    graph: bool = False
    changed: tuple[torch.Tensor, ...] = ()


@functools.cache
def fla(module: str) -> Any:
    """A module of flash-linear-attention, None where it isn't installed: then the peer's columns are empty.

    Raises:
        ImportError: it is installed, and something that it needs isn't.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return importlib.import_module(f"fla.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("fla."):
            return None  # this version has it elsewhere
        raise


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def prefill_cases(s: Shapes, lengths: Sequence[int], only: str) -> Iterator[Case]:
    """One sequence's work on a layer."""
    for length in lengths:
        for make in (_gdn_prefill, _conv, _gated_norm, _add_norm, _attention_prefill):
            if only in make.__name__:
                yield make(s, length)
        if s.experts is not None and only in "_moe":
            yield _moe(s, length)


def decode_cases(s: Shapes, batches: Sequence[int], only: str) -> Iterator[Case]:
    """One token of each of some sequences."""
    for batch in batches:
        for make in (_gdn_step, _attention_decode):
            if only in make.__name__:
                yield make(s, batch)
        if s.experts is not None and only in "_moe":
            yield _moe(s, batch)


def _gdn_prefill(s: Shapes, length: int) -> Case:
    dim, key_dim = s.gdn_dim, s.k_heads * s.gdn_dim
    row = randn(length, s.channels)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in row.split([key_dim, key_dim, s.v_heads * dim], dim=-1))
    a, b = randn(2, length, s.v_heads)
    A_log, dt_bias = torch.rand(s.v_heads, device=DEVICE).log(), torch.rand(s.v_heads, device=DEVICE) - 4
    before = torch.randn(s.v_heads, dim, dim, device=DEVICE) * 0.1
    state = before.clone()
    peer: Callable[[], object] | None = None
    module = fla("ops.gated_delta_rule")
    if module is not None:
        dense = [x[None].contiguous() for x in (q, k, v)]
        g, beta = gdn_gates(a, b, A_log, dt_bias)

        def run_peer() -> torch.Tensor:
            out, _ = module.chunk_gated_delta_rule(
                *dense,
                g[None],
                beta.bfloat16()[None],
                initial_state=before[None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            return out[0]

        peer = run_peer

    def expected() -> torch.Tensor:
        state.copy_(before)
        return cpu.gated_delta_prefill(q.float(), k.float(), v.float(), a, b, A_log, dt_bias, before.clone())

    def ours() -> torch.Tensor:
        return gpu.gated_delta_prefill(q, k, v, a, b, A_log, dt_bias, state)

    # Per token and head: k k^T, q k^T, five products with the chunk or the state, and the inverse.
    flops = 2 * length * s.v_heads * (3 * dim * dim + 64 * (2 * dim + 2 * dim) + 4 * 64 * 64 // 3)
    moved = num_bytes(row, a, b, v) + 2 * num_bytes(state)
    return Case("gdn prefill", f"{s.name} T={length}", ours, expected, moved, flops, peer, changed=(state,))


def _conv(s: Shapes, length: int) -> Case:
    x, weight, state = randn(length, s.channels), randn(s.channels, 4), randn(s.channels, 3)
    module = fla("modules.causal_conv1d.ops")
    peer = None
    if module is not None:
        initial = torch.cat([state.new_zeros(s.channels, 1), state], dim=1)[None]

        def run_peer() -> object:
            return module.causal_conv1d(
                x[None], weight, initial_state=initial, output_final_state=True, activation="silu"
            )

        peer = run_peer

    return Case(
        "causal conv1d",
        f"{s.name} T={length}",
        lambda: gpu.causal_conv1d(x, weight, state)[0],
        lambda: cpu.causal_conv1d(x.float(), weight.float(), state.float())[0],
        2 * num_bytes(x),
        peer=peer,
    )


def _gated_norm(s: Shapes, length: int) -> Case:
    x, z, weight = randn(length, s.v_heads, s.gdn_dim), randn(length, s.v_heads, s.gdn_dim), randn(s.gdn_dim)
    module = fla("modules.fused_norm_gate") or fla("modules.norm.fused_norm_gate")
    peer = None if module is None else lambda: module.rms_norm_gated(x, z, weight, None, eps=1e-6)
    return Case(
        "gated rms norm",
        f"{s.name} T={length}",
        lambda: gpu.gated_rms_norm(x, z, weight, 1e-6),
        lambda: reference.gated_rms_norm(x.float(), z.float(), weight, 1e-6),
        3 * num_bytes(x),
        peer=peer,
    )


def _add_norm(s: Shapes, length: int) -> Case:
    x, delta, weight = randn(length, s.hidden), randn(length, s.hidden) * 0, randn(s.hidden)
    module = fla("modules.layernorm") or fla("modules.norm.layernorm")
    scale = (1 + weight.float()).bfloat16()
    peer = None if module is None else lambda: module.rms_norm(delta, scale, None, residual=x, eps=1e-6, prenorm=True)
    return Case(
        "add + rms norm",
        f"{s.name} T={length}",
        lambda: gpu.add_rms_norm(x, delta, weight, 1e-6),
        lambda: reference.rms_norm(x.float(), weight, 1e-6, zero_centred=True),
        4 * num_bytes(x),
        peer=peer,
    )


def _attention_prefill(s: Shapes, length: int) -> Case:
    q, gate = randn(2, length, s.heads, s.head_dim)
    k, v = randn(2, length, s.kv_heads, s.head_dim)
    table = torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)
    if length % BLOCK_SIZE:
        raise ValueError(f"lengths must be multiples of {BLOCK_SIZE}; got {length}.")
    arguments = q, gate, k, v, table, length
    options = {"block_size": BLOCK_SIZE, "scale": s.head_dim**-0.5}

    def flash() -> torch.Tensor:
        return flash_attention_prefill(*arguments, **options)

    return Case(
        "attention prefill (beside: torch's flash)",
        f"{s.name} T={length}",
        lambda: gpu.paged_attention_prefill(*arguments, **options),
        flash,
        3 * num_bytes(q) + num_bytes(k, v),
        2 * length * length * s.heads * s.head_dim,
        peer=flash,
    )


def _gdn_step(s: Shapes, batch: int) -> Case:
    dim = s.gdn_dim
    mixed = randn(batch, s.channels + s.v_heads * (dim + 2))
    weight, scale = randn(s.channels, 4) * 0.2, randn(dim)
    A_log, dt_bias = torch.rand(s.v_heads, device=DEVICE).log(), torch.rand(s.v_heads, device=DEVICE) - 4
    conv_before = randn(batch, s.channels, 3)
    before = torch.randn(batch, s.v_heads, dim, dim, device=DEVICE) * 0.1
    conv_states, states = conv_before.clone(), before.clone()
    slots = torch.arange(batch, device=DEVICE)
    arguments = (weight, A_log, dt_bias, scale, 1e-6)

    def ours() -> torch.Tensor:
        return gpu.gdn_decode_step(mixed, *arguments, conv_states, states, slots, num_k_heads=s.k_heads)

    def expected() -> torch.Tensor:
        conv_states.copy_(conv_before)
        states.copy_(before)
        fresh = conv_before.clone(), before.clone()
        return cpu.gdn_decode_step(mixed.float(), *arguments, *fresh, slots, num_k_heads=s.k_heads)

    module = fla("ops.gated_delta_rule")
    gated = fla("modules.fused_norm_gate") or fla("modules.norm.fused_norm_gate")
    peer: Callable[[], object] | None = None
    if module is not None and gated is not None:
        key_dim = s.k_heads * dim
        theirs = before.clone()
        qkv, z, b, a = mixed.split([s.channels, s.v_heads * dim, s.v_heads, s.v_heads], dim=-1)
        parts = causal_conv1d_step(qkv, weight, conv_before.clone()).split([key_dim, key_dim, s.v_heads * dim], dim=-1)
        dense = [x.unflatten(-1, (-1, dim))[:, None].contiguous() for x in parts]
        gate = z.unflatten(-1, (-1, dim)).contiguous()
        g, beta = gdn_gates(a, b, A_log, dt_bias)

        def run_peer() -> object:
            out, _ = module.fused_recurrent_gated_delta_rule(
                *dense,
                g[:, None],
                beta=beta[:, None].bfloat16(),
                initial_state=theirs,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            return gated.rms_norm_gated(out[:, 0], gate, scale, None, eps=1e-6)

        peer = run_peer

    moved = 2 * num_bytes(states, conv_states) + num_bytes(mixed) + batch * s.v_heads * dim * 2
    changed = (conv_states, states)
    return Case("gdn decode step", f"{s.name} B={batch}", ours, expected, moved, peer=peer, graph=True, changed=changed)


def _attention_decode(s: Shapes, batch: int, length: int = 4096) -> Case:
    blocks = length // BLOCK_SIZE
    q, gate = randn(2, batch, s.heads, s.head_dim)
    k, v = randn(2, batch * length, s.kv_heads, s.head_dim)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=DEVICE).view(batch, blocks)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    scale = s.head_dim**-0.5

    def expected() -> torch.Tensor:
        rows = [
            attention_decode(q[i].float(), keys.float(), values.float(), scale=scale)
            for i, (keys, values) in enumerate(zip(k.split(length), v.split(length), strict=True))
        ]
        return torch.stack(rows) * torch.sigmoid(gate.float())

    return Case(
        "paged attention decode",
        f"{s.name} B={batch} L={length}",
        lambda: gpu.paged_attention_decode(q, gate, k, v, table, lengths, block_size=BLOCK_SIZE, scale=scale),
        expected,
        num_bytes(q, gate, k, v) + num_bytes(q),
        graph=True,
    )


def moe_inputs(s: Shapes, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """What `moe_experts` takes: x, gate_up, down, chosen, weights."""
    assert s.experts is not None
    count, top_k, width = s.experts
    gate_up = randn(count, 2 * width, s.hidden) * s.hidden**-0.5
    down = randn(count, s.hidden, width) * width**-0.5
    weights, chosen = cpu.moe_route(randn(num_tokens, count), top_k)
    return randn(num_tokens, s.hidden), gate_up, down, chosen, weights


def _moe(s: Shapes, num_tokens: int) -> Case:
    assert s.experts is not None
    _, top_k, width = s.experts
    x, gate_up, down, chosen, weights = moe_inputs(s, num_tokens)
    used = len(chosen.unique())
    moved = used * (num_bytes(gate_up[0]) + num_bytes(down[0])) + 2 * num_bytes(x)
    return Case(
        "moe experts",
        f"{s.name} N={num_tokens}",
        lambda: gpu.moe_experts(x, gate_up, down, chosen, weights),
        lambda: cpu.moe_experts(x, gate_up, down, chosen, weights),
        moved,
        6 * num_tokens * top_k * width * s.hidden,
        graph=num_tokens <= 64,
    )
