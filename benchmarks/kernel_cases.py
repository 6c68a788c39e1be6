"""The kernels' operations with inputs of Qwen3.5's shapes, for measuring, tuning and checking."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qwen35mm_kernels import SamplingRows, cpu

BLOCK_SIZE = 64
VOCAB = 248_320
EPS = 1e-6


@dataclass(frozen=True)
class Shapes:
    """The sizes of a checkpoint that matter to kernels."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    v_heads: int
    vision_heads: int = 16
    vision_head_dim: int = 72
    k_heads: int = 16
    gdn_dim: int = 128
    head_dim: int = 256
    rotary_dim: int = 64
    experts: tuple[int, int, int] | None = None  # of a mixture: number, chosen, width
    vocab: int = VOCAB

    @property
    def channels(self) -> int:
        return (2 * self.k_heads + self.v_heads) * self.gdn_dim


SHAPES = {
    shapes.name: shapes
    for shapes in (
        Shapes("0.8B", 1024, 8, 2, 16, vision_heads=12, vision_head_dim=64),
        Shapes("9B", 4096, 16, 4, 32),
        Shapes("27B", 5120, 24, 4, 48),
        Shapes("35B-A3B", 2048, 16, 2, 32, experts=(256, 8, 512)),
    )
}


@dataclass(frozen=True)
class Case:
    """One operation on one set of inputs.

    Attributes:
        operation: its name in every backend.
        shape: the model and the size, for the table.
        num_bytes: each input read once and each output written once.
        changed: arguments that the operation changes in place.
    """

    operation: str
    shape: str
    arguments: tuple[Any, ...]
    num_bytes: int = 0
    num_flops: int = 0
    changed: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, ops: Any) -> Any:
        """A backend's result: a tensor or several."""
        return getattr(ops, self.operation)(*self.arguments, **self.options)

    def expected(self) -> Any:
        """The result in float32 by torch, on the inputs' device. Doesn't change the inputs."""
        # What FP8's experts round to the inputs' type decides eight-bit floats.
        exact = self.operation != "fp8_experts"
        arguments = (_as_float(x) if isinstance(x, torch.Tensor) and exact else x for x in self.arguments)
        return getattr(cpu, self.operation)(*arguments, **self.options)


def _as_float(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.is_floating_point() else x.dtype, copy=True)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of an operation's result."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    difference = torch.linalg.vector_norm(ours.float() - expected.float())
    return (difference / torch.linalg.vector_norm(expected.float())).item()


def num_bytes(*inputs: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in inputs)


class Cases:
    """The cases of a model. Each method takes a size: tokens, or sequences of a step.

    Args:
        device: "meta" allocates no memory; enough for configurations and for compiling.
    """

    def __init__(self, shapes: Shapes, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.shapes, self.device, self.dtype = shapes, device, dtype

    def gated_delta_prefill(self, length: int) -> Case:
        s, dim, key_dim = self.shapes, self.shapes.gdn_dim, self.shapes.k_heads * self.shapes.gdn_dim
        row = self._randn(length, s.channels)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in row.split([key_dim, key_dim, s.v_heads * dim], dim=-1))
        a, b = self._randn(2, length, s.v_heads)
        states = self._randn(1, s.v_heads, dim, dim).float() * 0.1
        # For each token and head: k k^T, q k^T, five products with the chunk or the state, and the inverse.
        flops = 2 * length * s.v_heads * (3 * dim * dim + 64 * (2 * dim + 2 * dim) + 4 * 64 * 64 // 3)
        moved = num_bytes(row, a, b, v) + 2 * num_bytes(states)
        return self._case(
            "gated_delta_prefill",
            (q, k, v, a, b, *self._decays(), states, self._number(0), self._number(length)),
            f"T={length}",
            moved,
            flops,
            changed=(states,),
        )

    def causal_conv1d(self, length: int) -> Case:
        channels = self.shapes.channels
        x, weight, states = self._randn(length, channels), self._randn(channels, 4), self._randn(1, channels, 3)
        arguments = x, weight, states, self._number(0), self._number(length)
        return self._case("causal_conv1d", arguments, f"T={length}", 2 * num_bytes(x), changed=(states,))

    def gated_rms_norm(self, length: int) -> Case:
        x, z = self._randn(2, length, self.shapes.v_heads, self.shapes.gdn_dim)
        return self._case(
            "gated_rms_norm", (x, z, self._randn(self.shapes.gdn_dim), EPS), f"T={length}", 3 * num_bytes(x)
        )

    def rms_norm(self, length: int) -> Case:
        x, weight = self._randn(length, self.shapes.hidden), self._randn(self.shapes.hidden)
        return self._case("rms_norm", (x, weight, EPS), f"T={length}", 2 * num_bytes(x), zero_centred=True)

    def add_rms_norm(self, length: int) -> Case:
        x, delta = self._randn(2, length, self.shapes.hidden)
        weight = self._randn(self.shapes.hidden)
        return self._case("add_rms_norm", (x, delta, weight, EPS), f"T={length}", 4 * num_bytes(x), changed=(x,))

    def swiglu(self, length: int) -> Case:
        """As wide as the 9B model's, three times the hidden size."""
        gate_up = self._randn(length, 6 * self.shapes.hidden)
        return self._case("swiglu", (gate_up,), f"T={length}", num_bytes(gate_up) * 3 // 2)

    def fp8_linear(self, length: int) -> Case:
        """Gate and up projections of the 9B model's feed-forward network, in blocks of 128 x 128."""
        hidden, width = self.shapes.hidden, 6 * self.shapes.hidden
        x, values = self._randn(length, hidden), self._randn(width, hidden).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-width // 128), -(-hidden // 128), device=self.device) * hidden**-0.5
        # Half of a bfloat16 product's, since a card does twice as many FP8 operations a second.
        flops = length * width * hidden
        moved = num_bytes(x, values) + 2 * length * width
        return self._case("fp8_linear", (x, values, scales), f"N={length}", moved, flops)

    def integer_linear(self, length: int, bits: int = 4) -> Case:
        """The same product with 8 bits in groups of 32, as `--weights int8`, or 4 bits in groups of 128, as AWQ."""
        hidden, width, group = self.shapes.hidden, 6 * self.shapes.hidden, 32 if bits == 8 else 128
        x, (words, scales) = self._randn(length, hidden), self._integers((width,), hidden, bits, group)
        minima = -7.5 * scales if bits == 4 else None
        moved = num_bytes(x, words, scales) + (0 if minima is None else num_bytes(minima)) + 2 * length * width
        arguments, flops = (x, words, scales, minima), 2 * length * width * hidden
        size = f"int{bits} N={length}"
        return self._case("integer_linear", arguments, size, moved, flops, bits=bits, width=group)

    def _integers(self, rows: tuple[int, ...], depth: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and scales of matrices whose products stay near 1."""
        words = torch.randint(-(1 << 31), 1 << 31, (*rows, -(-depth // 32) * bits), device=self.device).int()
        scales = torch.rand(*rows, -(-depth // group), device=self.device) + 0.5
        return words, scales * depth**-0.5 / (1 << bits)

    def norm_linear(self, length: int, is_plain: bool = False, *, swiglu: bool = True) -> Case:
        """The first operation of a decode step's feed-forward network, or of its mixer; or its last, which is plain."""
        hidden, width = self.shapes.hidden, 6 * self.shapes.hidden
        if is_plain:
            x, matrix = self._randn(length, width // 2), self._randn(hidden, width // 2) * hidden**-0.5
            moved, flops = num_bytes(x, matrix), length * width * hidden
            return self._case("norm_linear", (x, None, None, EPS, matrix), f"N={length} plain", moved, flops)
        x, delta, weight = self._randn(length, hidden), self._randn(length, hidden), self._randn(hidden)
        matrix = self._randn(width, hidden) * hidden**-0.5
        moved, flops = num_bytes(x, delta, weight, matrix), 2 * length * width * hidden
        arguments = x, delta, weight, EPS, matrix
        return self._case("norm_linear", arguments, f"N={length}", moved, flops, swiglu=swiglu)

    def paged_attention_prefill(self, num_new: int, length: int | None = None) -> Case:
        """The last `num_new` tokens of a sequence of `length`, `num_new` by default."""
        s, length = self.shapes, length or num_new
        if length % BLOCK_SIZE:
            raise ValueError(f"lengths must be multiples of {BLOCK_SIZE}; got {length}.")
        q, gate = self._randn(2, num_new, s.heads, s.head_dim)
        k, v = self._randn(2, length, s.kv_heads, s.head_dim)
        table = torch.arange(length // BLOCK_SIZE, dtype=torch.int32, device=self.device)
        flops = 2 * num_new * (2 * length - num_new) * s.heads * s.head_dim
        moved = 3 * num_bytes(q) + num_bytes(k, v)
        size = f"T={num_new}" if num_new == length else f"T={num_new} L={length}"
        options = {"block_size": BLOCK_SIZE, "scale": s.head_dim**-0.5}
        arguments = q, gate, k, v, table, self._number(length), self._number(num_new)
        return self._case("paged_attention_prefill", arguments, size, moved, flops, **options)

    def gdn_decode_step(self, batch: int) -> Case:
        s = self.shapes
        mixed = self._randn(batch, s.channels + s.v_heads * (s.gdn_dim + 2))
        weight, scale = self._randn(s.channels, 4) * 0.2, self._randn(s.gdn_dim)
        conv_states = self._randn(batch, s.channels, 3)
        states = self._randn(batch, s.v_heads, s.gdn_dim, s.gdn_dim).float() * 0.1
        moved = 2 * num_bytes(states, conv_states) + num_bytes(mixed) + batch * s.v_heads * s.gdn_dim * 2
        slots = torch.arange(batch, device=self.device)
        arguments = mixed, weight, *self._decays(), scale, EPS, conv_states, states, slots
        return self._case(
            "gdn_decode_step", arguments, f"B={batch}", moved, changed=(conv_states, states), num_k_heads=s.k_heads
        )

    def paged_attention_decode(self, batch: int, length: int = 4096) -> Case:
        s, blocks = self.shapes, -(-length // BLOCK_SIZE)
        q, gate = self._randn(2, batch, s.heads, s.head_dim)
        k, v = self._randn(2, batch * blocks * BLOCK_SIZE, s.kv_heads, s.head_dim)
        table = torch.arange(batch * blocks, dtype=torch.int32, device=self.device).view(batch, blocks)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=self.device)
        moved = num_bytes(q, gate, k, v) + num_bytes(q)
        options = {"block_size": BLOCK_SIZE, "scale": s.head_dim**-0.5}
        return self._case(
            "paged_attention_decode", (q, gate, k, v, table, lengths), f"B={batch} L={length}", moved, **options
        )

    def moe_experts(self, num_tokens: int) -> Case:
        count, hidden, width = self._experts()
        gate_up = self._randn(count, 2 * width, hidden) * hidden**-0.5
        down = self._randn(count, hidden, width) * width**-0.5
        return self._expert_case("moe_experts", num_tokens, (gate_up,), (down,))

    def integer_experts(self, num_tokens: int, bits: int = 4) -> Case:
        """As `--weights int4` and `int8` keep them."""
        count, hidden, width = self._experts()
        gate_up, down = (
            (words, scales.bfloat16())
            for rows, depth in ((2 * width, hidden), (hidden, width))
            for words, scales in [self._integers((count, rows), depth, bits, 32)]
        )
        return self._expert_case("integer_experts", num_tokens, gate_up, down, formats=((bits, 32), (bits, 32)))

    def fp8_experts(self, num_tokens: int) -> Case:
        """In blocks of 128 x 128, as checkpoints have them. The shared expert's product is another."""
        count, hidden, width = self._experts()
        gate_up, down = (
            (
                self._randn(count, rows, depth).to(torch.float8_e4m3fn),
                torch.rand(count, -(-rows // 128), -(-depth // 128), device=self.device) * depth**-0.5,
            )
            for rows, depth in ((2 * width, hidden), (hidden, width))
        )
        return self._expert_case("fp8_experts", num_tokens, gate_up, down)

    def _experts(self) -> tuple[int, int, int]:
        """Number of experts with the shared one, hidden size and width."""
        assert self.shapes.experts is not None
        return self.shapes.experts[0] + 1, self.shapes.hidden, self.shapes.experts[2]

    def _expert_case(
        self,
        operation: str,
        num_tokens: int,
        gate_up: tuple[torch.Tensor, ...],
        down: tuple[torch.Tensor, ...],
        **options: Any,
    ) -> Case:
        count, hidden, width = self._experts()
        assert self.shapes.experts is not None
        routed, routed_k, _ = self.shapes.experts
        x = self._randn(num_tokens, hidden)
        weights, chosen = cpu.moe_route(self._randn(num_tokens, routed), routed_k, self._randn(num_tokens, 1))
        # On "meta" the chosen experts are unknown.
        used = count if self.device == "meta" else len(chosen.unique())
        moved = used * num_bytes(*(part[0] for part in (*gate_up, *down))) + 2 * num_bytes(x)
        flops = 6 * num_tokens * (routed_k + 1) * width * hidden
        matrices = (gate_up[0], down[0]) if operation == "moe_experts" else (gate_up, down)
        size = f"int{options['formats'][0][0]} N={num_tokens}" if options else f"N={num_tokens}"
        return self._case(operation, (x, *matrices, chosen, weights), size, moved, flops, **options)

    def qk_norm_rope_write(self, length: int) -> Case:
        s = self.shapes
        qkv = self._randn(length, 2 * (s.heads + s.kv_heads) * s.head_dim)
        q_norm, k_norm = self._randn(2, s.head_dim)
        caches = self._randn(2, -(-length // BLOCK_SIZE) * BLOCK_SIZE, s.kv_heads, s.head_dim).unbind()
        rows = torch.arange(length, device=self.device)
        arguments = qkv, *self._rotation(length, s.rotary_dim), q_norm, k_norm, EPS, *caches, rows
        return self._case(
            "qk_norm_rope_write", arguments, f"T={length}", 2 * num_bytes(qkv), changed=caches, num_heads=s.heads
        )

    def apply_partial_rope(self, length: int) -> Case:
        """The vision tower's queries, with the strides of a tensor that has queries, keys and values."""
        s = self.shapes
        x = self._randn(length, 3, s.vision_heads, s.vision_head_dim)[:, 0]
        rotation = self._rotation(length, s.vision_head_dim)
        return self._case("apply_partial_rope", (x, *rotation), f"vision T={length}", 2 * num_bytes(x))

    def mrope_cos_sin(self, length: int) -> Case:
        num_pairs = self.shapes.rotary_dim // 2
        positions = torch.arange(3 * length, device=self.device).view(3, length)
        inv_freq = 1e7 ** -(torch.arange(num_pairs, device=self.device) / num_pairs)
        third = num_pairs // 3
        arguments = positions, inv_freq, (num_pairs - 2 * third, third, third)
        return self._case("mrope_cos_sin", arguments, f"T={length}", num_bytes(positions) + 8 * length * num_pairs)

    def sample(self, batch: int) -> Case:
        """Rows with Qwen's recommended settings; every fourth row has no filters."""
        logits = self._randn(batch, self.shapes.vocab) * 3
        seen = torch.zeros(batch, self.shapes.vocab, dtype=torch.bool, device=self.device)
        tables = seen, torch.zeros_like(seen, dtype=torch.uint8)
        row = torch.arange(batch, device=self.device)
        filtered = row % 4 != 3
        rows = replace(
            SamplingRows.neutral(batch, self.device),
            temperature=torch.where(row % 2 == 0, 0.7, 1.0),
            top_k=torch.where(filtered, 20, 0).int(),
            top_p=torch.where(filtered, torch.where(row % 2 == 0, 0.8, 0.95), 1.0),
            presence_penalty=row * 0.0 + 1.5,
            seeds=row * 0x1234567890AB,
            steps=row * 7919,
        )
        banned = torch.zeros(self.shapes.vocab, dtype=torch.bool, device=self.device)
        return self._case(
            "sample", (logits, rows, *tables, banned), f"B={batch}", 2 * num_bytes(logits), changed=tables
        )

    def _case(
        self,
        operation: str,
        arguments: tuple[Any, ...],
        size: str,
        num_bytes: int,
        num_flops: int = 0,
        changed: tuple[torch.Tensor, ...] = (),
        **options: Any,
    ) -> Case:
        return Case(operation, f"{self.shapes.name} {size}", arguments, num_bytes, num_flops, changed, options)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _number(self, value: int) -> torch.Tensor:
        """As a prompt's numbers are given to kernels."""
        return torch.full((1,), value, device=self.device)

    def _decays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A_log and dt_bias with the values of trained models."""
        A_log, dt_bias = torch.rand(2, self.shapes.v_heads, device=self.device)
        return A_log.log(), dt_bias - 4

    def _rotation(self, length: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin."""
        angles = torch.rand(length, rotated // 2, device=self.device) * 6
        return angles.cos(), angles.sin()
