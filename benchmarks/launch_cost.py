"""Host time of a kernel's launch, without a card: our Python and Triton's, up to where its launcher calls the driver.

    python -m benchmarks.launch_cost                     every operation of a prefill, at the shapes of 0.8B

Nothing is compiled or computed: a compiled kernel is replaced by one that does nothing. What the driver, the checks of
pointers in C and the CUDA allocator take is not in these numbers. Run it with `chrt -r 5` on a busy machine.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.frame import parse, parser, report
from benchmarks.kernel_cases import SHAPES, Cases

# Operations that a piece of a prompt launches, with their sizes.
OPERATIONS = (
    ("add_rms_norm", 64),
    ("causal_conv1d", 64),
    ("gated_delta_prefill", 64),
    ("gated_rms_norm", 64),
    ("mrope_cos_sin", 64),
    ("paged_attention_prefill", 64),
    ("qk_norm_rope_write", 64),
    ("swiglu", 64),
)


class Driver:
    """Triton's driver of a Hopper card that isn't there."""

    def __init__(self) -> None:
        self.launcher_cls = lambda src, metadata: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # as a processor's tensors say

    def get_current_stream(self, device: int) -> int:
        return 0


def stub_kernel(counter: list[int]) -> Any:
    """A compiled kernel with Triton's own Python around a launcher that only counts."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    def count(*args: object) -> None:
        counter[0] += 1

    launcher: Any = object.__new__(CudaLauncher)
    for name in ("global_scratch_size", "profile_scratch_size"):
        setattr(launcher, name, 0)
    for name in ("global_scratch_align", "profile_scratch_align", "num_ctas"):
        setattr(launcher, name, 1)
    for name in ("launch_cooperative_grid", "launch_pdl", "gsan_enabled"):
        setattr(launcher, name, False)
    launcher.arg_annotations = launcher.kernel_signature = ()
    launcher.launch = count
    kernel: Any = object.__new__(CompiledKernel)
    # `module` is set, as if the kernel had been loaded.
    kernel.__dict__ |= {"module": object(), "_module_pid": None, "function": 0, "packed_metadata": (), "_run": launcher}
    kernel.name, kernel.src, kernel.metadata = "stub", SimpleNamespace(fn=None), SimpleNamespace()
    return kernel


def without_compiler(counter: list[int]) -> None:
    """From now on, this process compiles and launches nothing."""
    from triton.runtime import JITFunction, driver

    def do_compile(self: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
        kernel = self.device_caches[device][0][key] = stub_kernel(counter)
        return kernel

    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    compiler: Any = JITFunction
    compiler._do_compile = do_compile


def median_us(run: Callable[[], object], repeats: int, calls: int = 50) -> float:
    """Median microseconds of a call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return 1e6 * statistics.median(found)


@torch.inference_mode()
def main() -> None:
    arguments = parse(parser(__doc__, model=False, repeats=20))
    # Kernels become what they are as they are imported.
    os.environ["TRITON_INTERPRET"] = "0"
    counter = [0]
    without_compiler(counter)
    from qwen35mm_kernels import gpu
    from qwen35mm_kernels.gpu import launch

    def through_triton(self: Any, grid: Any, args: Any, config: Any, constants: Any) -> None:
        with launch._on_device(launch._device_of(args)):
            self._kernel[tuple(grid)](*args, **launch._named(config, constants))

    cases, rows = Cases(SHAPES["0.8B"], "cpu"), []
    for operation, size in OPERATIONS:
        run = functools.partial(getattr(cases, operation)(size).run, gpu)
        run()
        counter[0] = 0
        run()
        launches, found = counter[0], {}
        for name, how in (("through Triton", through_triton), ("by plan", launch.LaunchPlans.launch)):
            with mock.patch.object(launch.LaunchPlans, "launch", how):
                found[f"{name}, us a launch"] = median_us(run, arguments.repeats) / launches
        rows.append({"operation": operation, "launches": launches, **found})
    report("launch_cost", arguments, {"Host time": rows})


if __name__ == "__main__":
    main()
