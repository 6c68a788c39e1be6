"""For `tune_kernels`: the candidates of each kernel that asks `launch.config_for`, its operations, and compilation."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_cases import Case, Cases, Shapes
from qwen35mm_kernels import gpu
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config

# A rule says whether a kernel supports (block sizes with num_warps, numbers in the shape's name, num_warps).
Sizes = Mapping[str, int]
Rule = Callable[[Sizes, Sizes, int], bool]


@dataclass(frozen=True)
class Space:
    """The candidates for one kernel: all combinations that `is_legal`. Some may exceed a card's shared memory.

    Attributes:
        blocks: the values to try for each block size.
        num_stages: for a kernel with a pipelined loop; None keeps the default's.
    """

    blocks: Mapping[str, Sequence[int]]
    num_warps: Sequence[int]
    num_stages: Sequence[int] | None = None
    is_legal: Rule = lambda blocks, sizes, num_warps: True

    def candidates(self, shape: str, default: Config) -> list[Config]:
        """All except the default, in a fixed order."""
        sizes, found = sizes_of(shape), []
        stages = (default.num_stages,) if self.num_stages is None else self.num_stages
        for *values, num_warps, num_stages in itertools.product(*self.blocks.values(), self.num_warps, stages):
            blocks = dict(zip(self.blocks, values, strict=True))
            config = Config(blocks, num_warps, num_stages)
            if config != default and self.is_legal(blocks, sizes, num_warps):
                found.append(config)
        return found


def sizes_of(shape: str) -> dict[str, int]:
    """ "Hk16_Hv32_K128_16" -> {"Hk": 16, "Hv": 32, "K": 128}."""
    return {name: int(number) for name, number in re.findall(r"([A-Za-z]+)(\d+)", shape)}


def _each(numbers: int, num_warps: int) -> float:
    """Numbers of a tile per thread."""
    return numbers / (32 * num_warps)


def _tile(rows: str, columns: str, least: int, most: int) -> Rule:
    """Tiles with `least` to `most` numbers a thread. `columns`: a block size, or a shape's size rounded up to 2^n."""

    def is_legal(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
        width = blocks[columns] if columns in blocks else 1 << (sizes[columns] - 1).bit_length()
        return least <= _each(blocks[rows] * width, num_warps) <= most

    return is_legal


def _scan(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
    """As many columns per warp as its registers hold and the matrix units need. 128 columns spill on Hopper."""
    block_v = blocks["BLOCK_V"]
    return block_v <= min(sizes["K"], sizes["V"]) and num_warps in {16: (4,), 32: (4, 8), 64: (8,)}[block_v]


def _decode_step(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
    """With fewer than four numbers per thread the kernel is wrong (see `gdn_step._default`); more than 64 spill."""
    return blocks["BLOCK_V"] <= sizes["V"] and 4 <= _each(sizes["K"] * blocks["BLOCK_V"], num_warps) <= 64


def _experts(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
    """Memory limits tiles of 16 rows, so 4 warps suffice. Registers for the sums limit larger tiles."""
    rows, columns = sizes["M"], blocks["BLOCK_N"]
    if rows == 16:
        return num_warps == 4
    return columns >= 64 and rows * columns <= 2048 * num_warps and (blocks["BLOCK_K"] == 64 or columns == 64)


def _fp8_tiles(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
    """The registers hold two sums: of a group, and of all."""
    return num_warps == 4 if sizes["M"] == 16 else 32 <= _each(sizes["M"] * blocks["BLOCK_N"], num_warps) <= 64


_EXPERTS = Space({"BLOCK_N": (32, 64, 128), "BLOCK_K": (64, 128)}, (4, 8), (3, 4), _experts)


def _integers(blocks: Sizes, sizes: Sizes, num_warps: int) -> bool:
    """16 rows of a matrix to a warp, which the matrix units take from its registers. 128 rows of x need more warps."""
    if blocks["BLOCK_N"] != 16 * num_warps:
        return False
    return blocks["BLOCK_K"] == 128 if sizes["M"] == 16 else num_warps >= (4 if sizes["M"] == 64 else 8)


_INTEGERS = Space({"BLOCK_N": (32, 64, 128), "BLOCK_K": (64, 128)}, (2, 4, 8), (3, 4, 6), _integers)

# In tuning order: a kernel comes before those that depend on its configuration.
SPACES: Mapping[str, Space] = {
    "gdn_scan": Space({"BLOCK_V": (16, 32, 64)}, (4, 8), (2, 3, 4), _scan),
    # The value heads of a program share a key head.
    "gdn_prepare": Space({"HEADS": (1, 2, 3, 4)}, (4, 8), None, lambda b, s, _: s["Hv"] // s["Hk"] % b["HEADS"] == 0),
    "gdn_decode_step": Space({"BLOCK_V": (16, 32, 64, 128)}, (4, 8, 16), None, _decode_step),
    # Four and six stages compile to the same code as three and five.
    "paged_attention_decode": Space({"BLOCK_N": (16, 32, 64)}, (4, 8), (3, 5)),
    "paged_attention_combine": Space(
        {"BLOCK_D": (32, 64, 128, 256)}, (4, 8), None, lambda b, s, _: b["BLOCK_D"] <= s["D"]
    ),
    # With 4 warps, sums of 128 rows spill.
    "paged_attention_prefill": Space(
        {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64)},
        (4, 8),
        (2, 3),
        lambda b, _, warps: b["BLOCK_M"] == 64 or warps == 8,
    ),
    "moe_gate_up": _EXPERTS,
    "moe_down": _EXPERTS,
    # A thread requests 32 or 64 bytes of weights before it computes.
    "fp8_vectors": Space(
        {"BLOCK_N": (4, 8, 16, 32), "GROUPS": (4, 8, 16)},
        (4, 8),
        None,
        lambda b, _, warps: 32 <= _each(b["BLOCK_N"] * b["GROUPS"] * 128, warps) <= 64,
    ),
    **dict.fromkeys(
        ("fp8_tiles", "fp8_gate_up", "fp8_down"), Space({"BLOCK_N": (32, 64, 128)}, (4, 8), (3, 4, 5), _fp8_tiles)
    ),
    # Four words per thread: otherwise every step moves x through shared memory.
    "integer_vector": Space(
        {"BLOCK_N": (4, 8), "WORDS": (128, 256, 512)}, (1, 2, 4), None, lambda b, _, warps: b["WORDS"] == 128 * warps
    ),
    "integer_tiles": _INTEGERS,
    "integer_gate_up": _INTEGERS,
    "integer_down": _INTEGERS,
    # Eight columns (16 bytes) per thread: the sums and x meet in its registers.
    "norm_linear": Space(
        {"BLOCK_N": (4, 8, 16), "BLOCK_K": (512, 1024, 2048)},
        (2, 4, 8),
        None,
        lambda b, _, warps: b["BLOCK_K"] == 256 * warps,
    ),
    "moe_combine": Space(
        {"BLOCK_N": (256, 512, 1024, 2048)},
        (4, 8),
        None,
        lambda b, s, warps: _each(b["BLOCK_N"], warps) >= 2 and b["BLOCK_N"] < 2 * s["K"],
    ),
    "qk_norm_rope_write": Space({"BLOCK_T": (2, 4, 8, 16)}, (2, 4, 8), None, _tile("BLOCK_T", "D", 4, 32)),
    "causal_conv1d": Space(
        {"BLOCK_T": (16, 32, 64), "BLOCK_C": (64, 128, 256)}, (4, 8), None, _tile("BLOCK_T", "BLOCK_C", 8, 32)
    ),
    "rms_norm": Space({"BLOCK_ROWS": (1, 2, 4)}, (4, 8, 16), None, _tile("BLOCK_ROWS", "D", 4, 64)),
    "gated_rms_norm": Space({"BLOCK_ROWS": (4, 8, 16, 32, 64)}, (2, 4, 8), None, _tile("BLOCK_ROWS", "D", 4, 32)),
    # Draws don't depend on these sizes. With fewer kept candidates more rows would need the slow search, which random
    # logits don't show. So no block keeps a smaller share than the default's.
    "sampling": Space(
        {"BLOCK": (2048, 4096, 8192), "CAPACITY": (64, 128)},
        (8, 16),
        None,
        lambda b, *_: b["CAPACITY"] == max(64, b["BLOCK"] // 64),
    ),
    "apply_partial_rope": Space({"BLOCK_ROWS": (8, 16, 32, 64)}, (2, 4, 8), None, _tile("BLOCK_ROWS", "D", 4, 32)),
    "mrope_cos_sin": Space({"BLOCK_T": (2, 4, 8, 16)}, (1, 2, 4), None, _tile("BLOCK_T", "R", 1, 16)),
}


class Operation(NamedTuple):
    """A public operation in which kernels are tuned, including everything that runs before and after them.

    Attributes:
        kernels: the kernels that ask for a configuration there.
        sizes: arguments for its method of `Cases`.
        models: "all", "mixtures", or "one" if the checkpoint's sizes don't matter.
    """

    kernels: tuple[str, ...]
    sizes: Sequence[tuple[int, ...]]
    models: str = "all"


def _sizes(*numbers: int) -> list[tuple[int, ...]]:
    return [(number,) for number in numbers]


# The engine prefills chunks of up to 2,048 tokens, after any number of others.
_PROMPTS, _STEPS, _BOTH = _sizes(128, 512, 2048), _sizes(1, 8, 32), _sizes(1, 32, 128, 2048)
_BEHIND = [(128, 32768), (512, 512), (512, 8192), (2048, 2048), (2048, 32768)]
_SLOTS = [(1, 4096), (1, 32768), (8, 4096), (32, 4096)]

OPERATIONS: Mapping[str, Operation] = {
    "gated_delta_prefill": Operation(("gdn_prepare", "gdn_scan"), _PROMPTS),
    "gdn_decode_step": Operation(("gdn_decode_step",), _STEPS),
    "paged_attention_decode": Operation(("paged_attention_decode", "paged_attention_combine"), _SLOTS),
    "paged_attention_prefill": Operation(("paged_attention_prefill", "paged_attention_combine"), _BEHIND),
    "moe_experts": Operation(
        ("moe_gate_up", "moe_down", "moe_combine"), _sizes(1, 8, 64, 512, 2048, 8192), models="mixtures"
    ),
    "integer_experts": Operation(
        ("integer_gate_up", "integer_down", "moe_combine"),
        [(tokens, bits) for tokens in (1, 8, 512, 4096) for bits in (4, 8)],
        models="mixtures",
    ),
    "fp8_experts": Operation(
        ("fp8_gate_up", "fp8_down", "moe_combine"), _sizes(1, 8, 64, 512, 2048, 8192), models="mixtures"
    ),
    "fp8_linear": Operation(("fp8_vectors", "fp8_tiles"), _sizes(1, 4, 16, 64, 512, 2048)),
    "integer_linear": Operation(
        ("integer_vector", "integer_tiles"), [(rows, bits) for rows in (1, 4, 16, 64) for bits in (4, 8)]
    ),
    "norm_linear": Operation(("norm_linear",), [(1,), (4,), (1, True), (4, True)]),
    "qk_norm_rope_write": Operation(("qk_norm_rope_write",), _BOTH),
    "causal_conv1d": Operation(("causal_conv1d",), _PROMPTS),
    "add_rms_norm": Operation(("rms_norm",), _BOTH),
    "rms_norm": Operation(("rms_norm",), _BOTH),
    "gated_rms_norm": Operation(("gated_rms_norm",), _PROMPTS),
    "sample": Operation(("sampling",), _STEPS, models="one"),
    "apply_partial_rope": Operation(("apply_partial_rope",), _sizes(1024, 8192)),
    "mrope_cos_sin": Operation(("mrope_cos_sin",), _BOTH, models="one"),
}


class Workload(NamedTuple):
    """An operation, a model and a size: identifies a case for another process."""

    operation: str
    shapes: Shapes
    size: tuple[int, ...]

    def case(self, device: str) -> Case:
        return getattr(Cases(self.shapes, device), self.operation)(*self.size)


def workloads_of(kernel: str, models: Sequence[Shapes]) -> list[Workload]:
    """All operations, models and sizes that may launch a kernel."""
    chosen = {"all": models, "one": models[:1], "mixtures": [each for each in models if each.experts is not None]}
    return [
        Workload(name, shapes, size)
        for name, operation in OPERATIONS.items()
        if kernel in operation.kernels
        for shapes in chosen[operation.models]
        for size in operation.sizes
    ]


class TargetDriver:
    """Replaces Triton's driver: compiles for a compute capability (80, 90, 100, ...) and can't launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiler_processes(capability: int, count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes for `compile_workloads`. They need no card, and a crash of the compiler ends only one of them.

    Triton's cache keeps what they compile for the process that measures.
    """
    # CUDA doesn't survive a fork.
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(count, spawn, _compile_for, (capability,))


def _compile_for(capability: int) -> None:
    from triton.runtime import driver

    driver.set_active(TargetDriver(capability))  # pyright: ignore[reportArgumentType]


def warm_up(kernel: Any, grid: Sequence[int], *args: Any, **kwargs: Any) -> None:
    """For `trial`: compiles a kernel instead of launching it."""
    kernel.warmup(*args, grid=tuple(grid), **kwargs)


@torch.inference_mode()
def compile_workloads(workloads: Sequence[Workload], configs: Mapping[tuple[str, str], Config]) -> str | None:
    """Compiles what the workloads launch. Returns why that failed, or None."""
    try:
        for workload in workloads:
            with trial(configs, warm_up):
                workload.case("meta").run(gpu)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None
