"""Mixture of experts: routing, and the experts' matrices over rows grouped by expert.

A pair is one choice of one token: pair = token * k + choice. A tile is up to BLOCK_M pairs of one expert. There are
three kernels: gate and up with SwiGLU (x -> inner [pairs, width]), down (inner -> outputs [pairs, hidden]) and the
weighted sum over each token's pairs. Nothing waits for the host: grids are upper bounds, and empty tiles return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.integers import halved
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2

MAX_EXPERTS = 1024
_NO_EXPERT = tl.constexpr(2**31 - 1)

# (gate and up, down) for each BLOCK_M in bfloat16. 16 rows are memory-bound: about 60 KB are in flight to a
# multiprocessor, and one token's eight experts make 128 and 512 programs. All fit into 99 KB.
_DEFAULTS = {
    16: (Config({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 4), Config({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 4)),
    64: (Config({"BLOCK_N": 64, "BLOCK_K": 64}, 4, 4), Config({"BLOCK_N": 128, "BLOCK_K": 64}, 4, 4)),
    128: (Config({"BLOCK_N": 64, "BLOCK_K": 64}, 8, 3), Config({"BLOCK_N": 128, "BLOCK_K": 64}, 8, 3)),
}


@triton.jit
def _route_kernel(
    logits_ptr, shared_ptr, weights_ptr, chosen_ptr, stride_logits, stride_shared, num_experts, K: tl.constexpr,
    K_PADDED: tl.constexpr, BLOCK_E: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """One token: logits [N, E] -> weights, chosen [N, K], dense: the K largest, the lower expert first for equals.

    HAS_SHARED: shared [N, 1] adds expert E as a further choice of each token.
    """
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + row * stride_logits + experts, mask=experts < num_experts, other=-float("inf"))
    logits = logits.to(tl.float32)
    # Experts that exist and are not yet taken. A mask, since a logit may be -inf.
    left = experts < num_experts
    places = tl.arange(0, K_PADDED)
    scores = tl.full((K_PADDED,), -float("inf"), tl.float32)
    chosen = tl.zeros((K_PADDED,), tl.int32)
    for choice in range(K):
        best = tl.max(tl.where(left, logits, -float("inf")))
        expert = tl.min(tl.where(left & (logits == best), experts, BLOCK_E))
        scores = tl.where(places == choice, best, scores)
        # Clamped, since a NaN logit must not give an address outside the experts.
        chosen = tl.where(places == choice, tl.minimum(expert, num_experts - 1), chosen)
        left = left & (experts != expert)
    # Renormalised weights are a softmax over the chosen experts only.
    shares = tl.exp(scores - tl.max(scores))
    shares = shares / tl.sum(shares)
    weights_ptr += row * (K + HAS_SHARED)
    chosen_ptr += row * (K + HAS_SHARED)
    tl.store(weights_ptr + places, round_to(shares, weights_ptr.dtype.element_ty), mask=places < K)
    tl.store(chosen_ptr + places, chosen.to(tl.int64), mask=places < K)
    if HAS_SHARED:
        logit = tl.load(shared_ptr + row * stride_shared).to(tl.float32)
        tl.store(weights_ptr + K, round_to(1 / (1 + tl.exp(-logit)), weights_ptr.dtype.element_ty))
        tl.store(chosen_ptr + K, num_experts)


def moe_route(logits: torch.Tensor, k: int, shared: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. The logits' rows must be dense."""
    num_tokens, num_experts = logits.shape
    assert 1 <= k <= num_experts <= MAX_EXPERTS, (k, num_experts)
    assert logits.stride(1) == 1
    has_shared = shared is not None
    last = logits if shared is None else shared
    assert last.shape == (num_tokens, 1) or not has_shared
    assert last.dtype == logits.dtype
    weights = torch.empty(num_tokens, k + has_shared, dtype=logits.dtype, device=logits.device)
    chosen = torch.empty(num_tokens, k + has_shared, dtype=torch.int64, device=logits.device)
    blocks = {"K": k, "K_PADDED": next_power_of_2(k), "BLOCK_E": next_power_of_2(num_experts)}
    launch(
        _route_kernel, (num_tokens,), logits, last, weights, chosen, logits.stride(0), last.stride(0), num_experts,
        config=Config(num_warps=1), HAS_SHARED=has_shared, **blocks,
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    chosen_ptr, pairs_ptr, tiles_ptr, stride_token, stride_choice, num_pairs,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One expert: writes its pairs in rising order after those of lower experts, and its tiles.

    pairs [num_pairs] int32; tiles [num_pairs // BLOCK_M + E, 3] int32: expert, first row in pairs, number of rows.
    """
    expert = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    own = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pairs = first + offsets
        address = chosen_ptr + (pairs // TOP_K).to(tl.int64) * stride_token + (pairs % TOP_K) * stride_choice
        chosen = tl.load(address, mask=pairs < num_pairs, other=_NO_EXPERT)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    start = tl.sum(before)
    count = tl.sum(own)
    end = start
    for first in range(0, num_pairs, CHUNK):
        pairs = first + offsets
        address = chosen_ptr + (pairs // TOP_K).to(tl.int64) * stride_token + (pairs % TOP_K) * stride_choice
        is_own = (tl.load(address, mask=pairs < num_pairs, other=_NO_EXPERT) == expert).to(tl.int32)
        tl.store(pairs_ptr + end + tl.cumsum(is_own, 0) - 1, pairs, mask=is_own != 0)
        end += tl.sum(is_own)
    # An expert's tiles begin at start // BLOCK_M + expert. That leaves enough room without a sum over the other
    # experts' tiles. Unused tiles before the next expert's first have no rows.
    first_tile = start // BLOCK_M + expert
    next_tile = (start + count) // BLOCK_M + expert + 1
    for tile in range(first_tile, next_tile):
        row = (tile - first_tile) * BLOCK_M
        tl.store(tiles_ptr + tile * 3, expert)
        tl.store(tiles_ptr + tile * 3 + 1, start + row)
        tl.store(tiles_ptr + tile * 3 + 2, tl.maximum(0, tl.minimum(BLOCK_M, count - row)))


@triton.jit
def _grouped_rows(pairs_ptr, tiles_ptr, tile, BLOCK_M: tl.constexpr):
    """A tile of `_group_kernel`: its expert, its pairs [BLOCK_M] and which of them exist."""
    offsets = tl.arange(0, BLOCK_M)
    expert = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    is_row = offsets < tl.load(tiles_ptr + tile * 3 + 2)
    return expert, tl.load(pairs_ptr + start + offsets, mask=is_row, other=0), is_row


@triton.jit
def _direct_rows(
    chosen_ptr, stride_token, stride_choice, num_tokens, tile,
    TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile without grouping, for at most BLOCK_M tokens: row m is token m.

    Tile number `tile` has the expert of that pair if its token is the first to choose it, else no rows.
    """
    tokens = tl.arange(0, BLOCK_M)
    choices = tl.arange(0, TOP_K_PADDED)
    expert = tl.load(chosen_ptr + (tile // TOP_K) * stride_token + (tile % TOP_K) * stride_choice)
    address = chosen_ptr + tokens[:, None] * stride_token + choices[None, :] * stride_choice
    mask = (tokens < num_tokens)[:, None] & (choices < TOP_K)[None, :]
    is_own = tl.load(address, mask=mask, other=-1) == expert
    choice = tl.max(tl.where(is_own, choices[None, :], -1), axis=1)
    first = tl.min(tl.where(is_own, tokens[:, None], BLOCK_M))
    choice = tl.where(first == tile // TOP_K, choice, -1)
    return expert, tl.maximum(tokens * TOP_K + choice, 0), choice >= 0


@triton.jit
def rows_of_tile(
    chosen_ptr, pairs_ptr, tiles_ptr, stride_token, stride_choice, num_tokens, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr, GROUPED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The program's tile: its expert, its pairs [BLOCK_M] and which of them exist."""
    tile = tl.program_id(1)
    if GROUPED:
        expert, pairs, is_row = _grouped_rows(pairs_ptr, tiles_ptr, tile, BLOCK_M)  # pyright: ignore
    else:
        expert, pairs, is_row = _direct_rows(  # pyright: ignore
            chosen_ptr, stride_token, stride_choice, num_tokens, tile, TOP_K, TOP_K_PADDED, BLOCK_M
        )
    return expert, pairs, is_row


@triton.jit
def columns_of_tile(WIDTH: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """For BLOCK_N rows of an expert's matrix: the column of out [pairs, WIDTH] of each row, the rows, int64, the first
    two of neighbours, and the columns that are stored.

    SWIGLU: half as many columns; eight rows of gate come before their eight of up, so that a thread has both of its
    column.
    """
    places = tl.arange(0, BLOCK_N)
    first = tl.program_id(0) * (BLOCK_N // 2 if SWIGLU else BLOCK_N)
    if SWIGLU:
        columns = first + places // 16 * 8 + places % 8
        matrix_rows, second = columns + places // 8 % 2 * WIDTH, first + WIDTH
        out_columns = first + tl.arange(0, BLOCK_N // 2)
    else:
        columns, second = first + places, first
        matrix_rows, out_columns = columns, columns
    return columns, matrix_rows.to(tl.int64), first, second, out_columns


@triton.jit
def store_tile(
    total, out_ptr, pairs, is_row, out_columns, WIDTH: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What `columns_of_tile`'s rows gave, float32 [BLOCK_N, BLOCK_M]."""
    if SWIGLU:
        both = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(both)
        total = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (BLOCK_N // 2, BLOCK_M))
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * WIDTH + out_columns[:, None]
    mask = is_row[None, :] & (out_columns < WIDTH)[:, None]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


# No specialisation on num_tokens: a prompt of a new length must not wait for a compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def _experts_kernel(
    x_ptr, matrix_ptr, out_ptr, chosen_ptr, pairs_ptr, tiles_ptr, stride_x, stride_expert, stride_row, stride_token,
    stride_choice, num_tokens, DEPTH: tl.constexpr, WIDTH: tl.constexpr, SWIGLU: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile, BLOCK_N columns of out [pairs, WIDTH], dense.

    SWIGLU: x [N, DEPTH], matrix [E, 2 * WIDTH, DEPTH] with gate rows, then up rows. Else: x [pairs, DEPTH],
    matrix [E, WIDTH, DEPTH].
    """
    expert, pairs, is_row = rows_of_tile(  # pyright: ignore
        chosen_ptr, pairs_ptr, tiles_ptr, stride_token, stride_choice, num_tokens, TOP_K, TOP_K_PADDED, GROUPED, BLOCK_M
    )
    if tl.max(is_row.to(tl.int32)) == 0:
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    rows = (pairs // TOP_K if SWIGLU else pairs).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * stride_x + depth[None, :]
    first_ptr = matrix_ptr + expert.to(tl.int64) * stride_expert
    ptrs = first_ptr + columns[None, :].to(tl.int64) * stride_row + depth[:, None]
    up_ptrs = ptrs + WIDTH * stride_row
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        x_mask = is_row[:, None]
        mask = (columns < WIDTH)[None, :]
        if DEPTH % BLOCK_K != 0:
            x_mask = x_mask & (first + depth < DEPTH)[None, :]
            mask = mask & (first + depth < DEPTH)[:, None]
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        out = dot(x, tl.load(ptrs + first, mask=mask, other=0.0), out, PRECISION)
        if SWIGLU:
            up = dot(x, tl.load(up_ptrs + first, mask=mask, other=0.0), up, PRECISION)
    if SWIGLU:
        out = out / (1 + tl.exp(-out)) * up
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out_ptrs, round_to(out, out_ptr.dtype.element_ty), mask=is_row[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _combine_kernel(
    outputs_ptr, weights_ptr, out_ptr, stride_token, stride_choice, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK_N columns: the weighted sum of outputs [N, TOP_K, HIDDEN] in the order of choice, dense."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in range(TOP_K):
        weight = tl.load(weights_ptr + token * stride_token + choice * stride_choice).to(tl.float32)
        output = tl.load(outputs_ptr + (token * TOP_K + choice) * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
        total += weight * output.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + columns, round_to(total, out_ptr.dtype.element_ty), mask=columns < HIDDEN)


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The last dimension of x, gate_up and down must be dense; other strides are free."""
    num_experts, hidden, width = down.shape
    assert x.shape == (len(chosen), hidden)
    assert gate_up.shape == (num_experts, 2 * width, hidden)
    assert weights.shape == chosen.shape
    assert x.dtype == gate_up.dtype == down.dtype == weights.dtype
    assert x.stride(-1) == gate_up.stride(-1) == down.stride(-1) == 1

    def multiply(source: torch.Tensor, target: torch.Tensor, pairs: Pairs, *, swiglu: bool) -> None:
        matrix, config = (gate_up, configs[0]) if swiglu else (down, configs[1])
        launch(
            _experts_kernel,
            (cdiv(target.shape[1], config.blocks["BLOCK_N"]), pairs.num_tiles),
            *(source, matrix, target, *pairs.tensors),
            *(source.stride(0), *matrix.stride()[:2], *pairs.sizes),
            config=config,
            DEPTH=source.shape[1],
            WIDTH=target.shape[1],
            SWIGLU=swiglu,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            **pairs.constants,
        )

    pairs = group(chosen, num_experts)
    configs = _configs(x, hidden, width, pairs.block_m)
    return over_pairs(multiply, x, width, weights, pairs)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, by tiles.

    Attributes:
        block_m: rows of a tile.
        tensors: chosen, pairs and tiles of the kernels, the last two unused if nothing is grouped.
        sizes: the kernels' numbers: strides of chosen, and the number of tokens.
        constants: those of the kernels that say how a tile finds its pairs.
    """

    block_m: int
    num_tiles: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sizes: tuple[int, int, int]
    constants: dict[str, Any]


def group(chosen: torch.Tensor, num_experts: int) -> Pairs:
    """One launch for more tokens than a tile has rows, none for fewer."""
    num_tokens, top_k = chosen.shape
    block_m = rows_of_a_tile(chosen.numel(), num_experts)
    is_grouped = num_tokens > block_m
    lists = _group(chosen, num_experts, block_m) if is_grouped else (chosen, chosen, chosen.numel())
    constants = {"TOP_K": top_k, "TOP_K_PADDED": next_power_of_2(top_k), "GROUPED": is_grouped, "BLOCK_M": block_m}
    sizes = chosen.stride(0), chosen.stride(1), num_tokens
    return Pairs(block_m, lists[2], (chosen, lists[0], lists[1]), sizes, constants)


def over_pairs(
    multiply: Callable[..., None], x: torch.Tensor, width: int, weights: torch.Tensor, pairs: Pairs
) -> torch.Tensor:
    """The experts' two products, and the weighted sum.

    Args:
        multiply: fills its target [pairs, ...] from a source: multiply(source, target, pairs, swiglu=...), where gate
            and up are x's own product.
    """
    (num_tokens, hidden), top_k = x.shape, weights.shape[1]
    inner = x.new_empty(num_tokens * top_k, width)
    outputs = x.new_empty(num_tokens * top_k, hidden)
    multiply(x, inner, pairs, swiglu=True)
    multiply(inner, outputs, pairs, swiglu=False)
    out = x.new_empty(num_tokens, hidden)
    config = config_for("moe_combine", x.device, f"K{hidden}", Config({"BLOCK_N": 1024}, 4))
    launch(
        _combine_kernel,
        (num_tokens, cdiv(hidden, config.blocks["BLOCK_N"])),
        *(outputs, weights, out, *weights.stride()),
        config=config,
        HIDDEN=hidden,
        TOP_K=top_k,
    )
    return out


def rows_of_a_tile(num_pairs: int, num_experts: int) -> int:
    """BLOCK_M for so many pairs: 16 if an expert has few rows (decode), 64 or 128 if tiles get full (prefill)."""
    rows_per_expert = num_pairs / num_experts
    return 16 if rows_per_expert <= 4 else 64 if rows_per_expert <= 96 else 128


def _configs(x: torch.Tensor, hidden: int, width: int, block_m: int) -> tuple[Config, Config]:
    name = f"M{block_m}_K{hidden}_N{width}" + ("_fp32" if x.dtype == torch.float32 else "")
    gate_up, down = (halved(config, x.dtype) for config in _DEFAULTS[block_m])
    return config_for("moe_gate_up", x.device, name, gate_up), config_for("moe_down", x.device, name, down)


def _group(chosen: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(pairs, tiles, number of tiles), see `_group_kernel`."""
    num_pairs = chosen.numel()
    num_tiles = num_pairs // block_m + num_experts
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
    launch(
        _group_kernel, (num_experts,), chosen, pairs, tiles, *chosen.stride(), num_pairs,
        config=Config({"CHUNK": 1024}, 4), TOP_K=chosen.shape[1], BLOCK_M=block_m,
    )  # fmt: skip
    return pairs, tiles, num_tiles
