"""Compiles candidates side by side before they are timed: what Triton keeps in its cache needn't be made again.

A process compiles for a compute capability, not for a card: tensors are "meta" and launches compile only. It needs no
card, and a compiler that crashes takes nothing else along.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.tuning_spaces import Workload
from qwen35mm_kernels import gpu
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config


class TargetDriver:
    """Stands in for Triton's driver: knows what to compile for (80, 90, 100, ...), and can't launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> None:
    """Turns this process into one that compiles, for 80, 90, 100, ..."""
    from triton.runtime import driver

    driver.set_active(TargetDriver(capability))  # pyright: ignore[reportArgumentType]


def _warm_up(kernel: Any, grid: Sequence[int], *args: Any, **kwargs: Any) -> None:
    kernel.warmup(*args, grid=tuple(grid), **kwargs)


@torch.inference_mode()
def compile_workloads(workloads: Sequence[Workload], configs: Mapping[tuple[str, str], Config]) -> str | None:
    """Compiles what workloads launch, in a process that `compile_for` has prepared. Why it can't be done, or None."""
    try:
        for workload in workloads:
            with trial(configs, _warm_up):
                workload.case("meta").run(gpu)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None


def processes(capability: int, count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes for `compile_workloads`."""
    # Not forked: CUDA doesn't survive that.
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(count, spawn, compile_for, (capability,))
