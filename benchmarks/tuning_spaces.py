"""What `tune_kernels` tries for each kernel that asks `launch.config_for`, and on which operations and sizes.

A space is a product, less what a kernel can't be cut into. Candidates that need more shared memory than a card has
stay in: the command skips them there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.kernel_cases import Case, Cases, Shapes
from qwen35mm_kernels.gpu.tables import Config

Sizes = Mapping[str, int]


def _always(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    return True


@dataclass(frozen=True)
class Space:
    """The candidates for one kernel.

    Attributes:
        blocks: its block sizes, each with the values to try.
        num_stages: only where the kernel has a pipelined loop; None keeps the default's.
        is_legal: of blocks and num_warps, given the sizes that the shape's name holds.
    """

    blocks: Mapping[str, Sequence[int]]
    num_warps: Sequence[int]
    num_stages: Sequence[int] | None = None
    is_legal: Callable[[Sizes, int, Sizes], bool] = _always

    def candidates(self, shape: str, default: Config) -> list[Config]:
        """All but the default, in a fixed order."""
        sizes = sizes_of(shape)
        stages = (default.num_stages,) if self.num_stages is None else self.num_stages
        found = []
        for *values, num_warps, num_stages in itertools.product(*self.blocks.values(), self.num_warps, stages):
            blocks = dict(zip(self.blocks, values, strict=True))
            config = Config(blocks, num_warps, num_stages)
            if config != default and self.is_legal(blocks, num_warps, sizes):
                found.append(config)
        return found


def sizes_of(shape: str) -> dict[str, int]:
    """ "Hk16_Hv32_K128_16" -> {"Hk": 16, "Hv": 32, "K": 128}."""
    return {name: int(number) for name, number in re.findall(r"([A-Za-z]+)(\d+)", shape)}


def _scan(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """As many columns to a warp as its registers hold, and enough for the matrix units. 128 columns spill on Hopper."""
    block_v = blocks["BLOCK_V"]
    return block_v <= min(sizes["K"], sizes["V"]) and num_warps in {16: (4,), 32: (4, 8), 64: (8,)}[block_v]


def _prepare(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """A program's value heads share a key head."""
    return sizes["Hv"] // sizes["Hk"] % blocks["HEADS"] == 0


def _decode_step(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """At least four numbers of a tile for each thread: with fewer the kernel is wrong, see `gdn_step._default`. At most
    64: twice as many spill."""
    return blocks["BLOCK_V"] <= sizes["V"] and 4 <= _to_a_thread(sizes["K"] * blocks["BLOCK_V"], num_warps) <= 64


def _columns_of_d(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    return blocks["BLOCK_D"] <= sizes["D"]


def _prefill(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """4 warps can't hold the sums of 128 rows: more than a thousand bytes spill."""
    return blocks["BLOCK_M"] == 64 or num_warps == 8


def _experts(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """Tiles of 16 rows wait for memory: 4 warps do. Larger ones are bound by what their sums leave of the registers."""
    rows, columns = sizes["M"], blocks["BLOCK_N"]
    if rows == 16:
        return num_warps == 4
    return columns >= 64 and rows * columns <= 2048 * num_warps and (blocks["BLOCK_K"] == 64 or columns == 64)


def _fp8_vectors(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """A thread asks for 32 or 64 bytes of weights before it works with any: nothing is asked for ahead of that."""
    return 32 <= _to_a_thread(blocks["BLOCK_N"] * blocks["GROUPS"] * 128, num_warps) <= 64


def _fp8_tiles(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """Twice the sums have to fit into registers: those of a group, and of all."""
    if sizes["M"] == 16:
        return num_warps == 4
    return 32 <= _to_a_thread(sizes["M"] * blocks["BLOCK_N"], num_warps) <= 64


def _integer_vector(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """Four words to a thread: else x goes through shared memory at every step."""
    return blocks["WORDS"] == 128 * num_warps


def _integer_tiles(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """As of floats' tiles, with a tile of weights in registers beside the sums."""
    rows, columns = sizes["M"], blocks["BLOCK_N"]
    return columns <= 64 if rows == 16 else columns >= 32


def _normed_products(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """Eight columns to a thread, which are 16 bytes: its sums and x meet in its registers."""
    return blocks["BLOCK_K"] == 256 * num_warps


def _combine_experts(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    return _to_a_thread(blocks["BLOCK_N"], num_warps) >= 2 and blocks["BLOCK_N"] < 2 * sizes["K"]


def _sampling(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
    """Draws don't depend on these sizes. But a smaller share of candidates would send more rows to the slow search, and
    how many, made-up logits can't tell: no block keeps less of its tokens than the default's, nor fewer than 64."""
    return blocks["CAPACITY"] == max(64, blocks["BLOCK"] // 64)


def _to_a_thread(numbers: int, num_warps: int) -> float:
    return numbers / (32 * num_warps)


def _tile(rows: str, columns: str, least: int, most: int) -> Callable[[Sizes, int, Sizes], bool]:
    """Tiles of so many numbers to a thread; `columns` is a block size or, rounded up to a power of 2, the shape's."""

    def is_legal(blocks: Sizes, num_warps: int, sizes: Sizes) -> bool:
        width = blocks[columns] if columns in blocks else 1 << (sizes[columns] - 1).bit_length()
        return least <= _to_a_thread(blocks[rows] * width, num_warps) <= most

    return is_legal


_EXPERTS = Space({"BLOCK_N": (32, 64, 128), "BLOCK_K": (64, 128)}, (4, 8), (3, 4), _experts)

# In the order of tuning: a kernel before those whose work its choice decides.
SPACES: Mapping[str, Space] = {
    "gdn_scan": Space({"BLOCK_V": (16, 32, 64)}, (4, 8), (2, 3, 4), _scan),
    "gdn_prepare": Space({"HEADS": (1, 2, 3, 4)}, (4, 8), is_legal=_prepare),
    "gdn_decode_step": Space({"BLOCK_V": (16, 32, 64, 128)}, (4, 8, 16), is_legal=_decode_step),
    # Four and six stages give the code of three and five: one brings entries of the block table.
    "paged_attention_decode": Space({"BLOCK_N": (16, 32, 64)}, (4, 8), (3, 5)),
    "paged_attention_combine": Space({"BLOCK_D": (32, 64, 128, 256)}, (4, 8), is_legal=_columns_of_d),
    "paged_attention_prefill": Space({"BLOCK_M": (64, 128), "BLOCK_N": (32, 64)}, (4, 8), (2, 3), _prefill),
    "moe_gate_up": _EXPERTS,
    "moe_down": _EXPERTS,
    "fp8_vectors": Space({"BLOCK_N": (4, 8, 16, 32), "GROUPS": (4, 8, 16)}, (4, 8), is_legal=_fp8_vectors),
    "fp8_tiles": Space({"BLOCK_N": (32, 64, 128)}, (4, 8), (3, 4, 5), _fp8_tiles),
    "integer_vector": Space({"BLOCK_N": (4, 8), "WORDS": (128, 256, 512)}, (1, 2, 4), is_legal=_integer_vector),
    "integer_tiles": Space({"BLOCK_N": (16, 32, 64), "BLOCK_K": (64, 128)}, (4,), (3, 4), _integer_tiles),
    "norm_linear": Space({"BLOCK_N": (4, 8, 16), "BLOCK_K": (512, 1024, 2048)}, (2, 4, 8), is_legal=_normed_products),
    "moe_combine": Space({"BLOCK_N": (256, 512, 1024, 2048)}, (4, 8), is_legal=_combine_experts),
    "qk_norm_rope_write": Space({"BLOCK_T": (2, 4, 8, 16)}, (2, 4, 8), is_legal=_tile("BLOCK_T", "D", 4, 32)),
    "causal_conv1d": Space(
        {"BLOCK_T": (16, 32, 64), "BLOCK_C": (64, 128, 256)}, (4, 8), is_legal=_tile("BLOCK_T", "BLOCK_C", 8, 32)
    ),
    "rms_norm": Space({"BLOCK_ROWS": (1, 2, 4)}, (4, 8, 16), is_legal=_tile("BLOCK_ROWS", "D", 4, 64)),
    "gated_rms_norm": Space({"BLOCK_ROWS": (4, 8, 16, 32, 64)}, (2, 4, 8), is_legal=_tile("BLOCK_ROWS", "D", 4, 32)),
    "sampling": Space({"BLOCK": (2048, 4096, 8192), "CAPACITY": (64, 128)}, (8, 16), is_legal=_sampling),
    "apply_partial_rope": Space({"BLOCK_ROWS": (8, 16, 32, 64)}, (2, 4, 8), is_legal=_tile("BLOCK_ROWS", "D", 4, 32)),
    "mrope_cos_sin": Space({"BLOCK_T": (2, 4, 8, 16)}, (1, 2, 4), is_legal=_tile("BLOCK_T", "R", 1, 16)),
}


@dataclass(frozen=True)
class Operation:
    """Where kernels are tuned: inside a public operation, with what runs before and after.

    Attributes:
        sizes: what its method of `Cases` takes.
        kernels: those that ask for a configuration in it.
        every_model: False where the checkpoints' sizes don't enter: one model is enough.
        only_mixtures: whether other models don't have it.
    """

    sizes: tuple[tuple[int, ...], ...]
    kernels: tuple[str, ...]
    every_model: bool = True
    only_mixtures: bool = False

    def models(self, models: Sequence[Shapes]) -> Sequence[Shapes]:
        """Those of `models` that have this operation in a form of their own."""
        own = [s for s in models if s.experts is not None] if self.only_mixtures else models
        return own if self.every_model else own[:1]


# What the engine passes: pieces of up to 2,048 tokens, behind whatever came before.
_PROMPTS, _STEPS, _BOTH = ((128,), (512,), (2048,)), ((1,), (8,), (32,)), ((1,), (32,), (128,), (2048,))

OPERATIONS: Mapping[str, Operation] = {
    "gated_delta_prefill": Operation(_PROMPTS, ("gdn_prepare", "gdn_scan")),
    "gdn_decode_step": Operation(_STEPS, ("gdn_decode_step",)),
    "paged_attention_decode": Operation(
        ((1, 4096), (1, 32768), (8, 4096), (32, 4096)), ("paged_attention_decode", "paged_attention_combine")
    ),
    "paged_attention_prefill": Operation(
        ((128, 32768), (512, 512), (512, 8192), (2048, 2048), (2048, 32768)),
        ("paged_attention_prefill", "paged_attention_combine"),
    ),
    "moe_experts": Operation(
        ((1,), (8,), (64,), (512,), (2048,), (8192,)), ("moe_gate_up", "moe_down", "moe_combine"), only_mixtures=True
    ),
    "fp8_linear": Operation(((1,), (4,), (16,), (64,), (512,), (2048,)), ("fp8_vectors", "fp8_tiles")),
    "integer_linear": Operation(
        tuple((rows, bits) for rows in (1, 4, 16, 64) for bits in (4, 8)),
        ("integer_vector", "integer_tiles"),
    ),
    "norm_linear": Operation(((1,), (4,)), ("norm_linear",)),
    "qk_norm_rope_write": Operation(_BOTH, ("qk_norm_rope_write",)),
    "causal_conv1d": Operation(_PROMPTS, ("causal_conv1d",)),
    "add_rms_norm": Operation(_BOTH, ("rms_norm",)),
    "rms_norm": Operation(_BOTH, ("rms_norm",)),
    "gated_rms_norm": Operation(_PROMPTS, ("gated_rms_norm",)),
    "sample": Operation(_STEPS, ("sampling",), every_model=False),
    "apply_partial_rope": Operation(((1024,), (8192,)), ("apply_partial_rope",)),
    "mrope_cos_sin": Operation(_BOTH, ("mrope_cos_sin",), every_model=False),
}


class Workload(NamedTuple):
    """An operation, a model and a size: what names a case to another process."""

    operation: str
    shapes: Shapes
    size: tuple[int, ...]

    def case(self, device: str) -> Case:
        return getattr(Cases(self.shapes, device), self.operation)(*self.size)


def workloads_of(kernel: str, models: Sequence[Shapes]) -> list[Workload]:
    """Every operation, model and size that may take a kernel."""
    return [
        Workload(name, shapes, size)
        for name, operation in OPERATIONS.items()
        if kernel in operation.kernels
        for shapes in operation.models(models)
        for size in operation.sizes
    ]
