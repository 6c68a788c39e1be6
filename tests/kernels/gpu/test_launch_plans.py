"""Launches by plan: the same compiled form as Triton would choose, without asking it again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

import triton.language as tl
from triton.runtime import JITFunction

from benchmarks.launch_cost import Driver, stub_kernel
from qwen35mm_kernels.gpu import launch as launching
from qwen35mm_kernels.gpu.launch import LaunchPlans, launch
from qwen35mm_kernels.gpu.tables import Config

CONFIG = Config({"BLOCK": 64}, num_warps=4, num_stages=2)


def _kernel(x, y, num_rows, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pass


class Triton:
    """Triton without a compiler: each form that it would compile is a kernel of its own.

    Attributes:
        kernel: to be launched.
        asked: how often a launch went through Triton.
        launched: what reached a kernel's launcher: the kernel, the grid, the arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.launched, self.device = 0, [], -1
        driver = Driver()
        monkeypatch.setattr(driver, "get_current_device", lambda: self.device)
        monkeypatch.setattr(launching.driver, "_active", driver)
        monkeypatch.setattr(launching, "_plans", {})
        monkeypatch.setattr(JITFunction, "_do_compile", self._compile)
        self.kernel = JITFunction(_kernel, do_not_specialize=["num_rows"])
        run = self.kernel.run

        def count(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(self.kernel, "run", count)

    def _compile(self, key: Any, signature: Any, device: int, *others: Any) -> Any:
        compiled = stub_kernel([0])
        # After the grid: stream, function, cooperative, PDL, ...; the kernel's arguments come last, or are one tuple.
        compiled._run.launch = lambda *args: self.launched.append((compiled, args[:3], args))
        self.kernel.device_caches[device][0][key] = compiled
        return compiled

    def chosen(self, *args: Any, config: Config, **constants: Any) -> Any:
        """The form that Triton takes for a launch."""
        named = launching._named(config, constants)
        return JITFunction.run(self.kernel, *args, grid=None, warmup=True, **named)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    return Triton(monkeypatch)


def test_a_form_is_asked_for_once_and_launched_with_what_is_given(triton: Triton) -> None:
    x, y = torch.zeros(2, 64)
    for num_rows, grid in ((3, (3,)), (7, (7, 2)), (1, (1, 2, 3))):
        launch(triton.kernel, grid, x, y, num_rows, 64, 1e-6, config=CONFIG, SIZE=64)
    assert triton.asked == 1
    kernels, grids, arguments = zip(*triton.launched, strict=True)
    assert len(set(kernels)) == 1
    assert grids == ((3, 1, 1), (7, 2, 1), (1, 2, 3))
    for num_rows, args in zip((3, 7, 1), arguments, strict=True):
        given = args[-1] if isinstance(args[-1], tuple) else args[-7:]
        assert given[0] is x
        assert given[1] is y
        assert given[2:] == (num_rows, 64, 1e-6, 64, 64)


def test_whatever_is_launched_is_the_form_that_triton_takes(triton: Triton) -> None:
    """All combinations of what Triton compiles for, twice: once to keep the plans, once by them."""
    buffer = torch.zeros(256, dtype=torch.uint8)
    tensors = (
        buffer[:64].view(torch.float32),
        buffer[4:68].view(torch.float32),
        buffer[:64].view(torch.bfloat16),
        buffer[2:66].view(torch.bfloat16),
    )
    numbers = 0, 1, 16, 24, 25, 1 << 31, 1 << 32
    configs = (
        CONFIG,
        Config({"BLOCK": 64}, num_warps=8, num_stages=2),
        Config({"BLOCK": 64}, num_warps=4, num_stages=3),
        Config({"BLOCK": 128}, num_warps=4, num_stages=2),
    )
    cases: list[Any] = list(itertools.product(tensors, (*tensors, None), numbers, configs[:1], (64,)))
    cases += itertools.product(tensors[:1], tensors[:1], numbers[:2], configs, (64, True, 32))
    for _ in range(2):
        for x, y, stride, config, size in cases:
            args = x, y, 5, stride, 1e-6
            launch(triton.kernel, (2,), *args, config=config, SIZE=size)
            assert triton.launched[-1][0] is triton.chosen(*args, config=config, SIZE=size)
    assert triton.asked < len(cases) + 1
    assert len({kernel for kernel, *_ in triton.launched}) > 60


def test_blocks_of_one_size_under_another_name_are_another_form(triton: Triton) -> None:
    assert Config({"BLOCK_N": 64, "BLOCK_K": 128}).key != Config({"BLOCK_K": 64, "BLOCK_N": 128}).key
    assert Config({"BLOCK_N": 64, "BLOCK_K": 128}).key == Config({"BLOCK_K": 128, "BLOCK_N": 64}).key


def test_another_current_device_goes_through_triton(triton: Triton) -> None:
    args = torch.zeros(64), None, 3, 64, 1e-6
    for device, asked in ((-1, 1), (-1, 1), (0, 2), (-1, 2)):
        triton.device = device
        launch(triton.kernel, (1,), *args, config=CONFIG, SIZE=64)
        assert triton.asked == asked


def test_plans_are_bounded(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_PLANS", 8)
    args = torch.zeros(64), None, 3, 64, 1e-6
    plans = LaunchPlans(triton.kernel, args)
    for stride in range(50):
        plans.launch((1,), (*args[:3], stride, 1e-6), CONFIG, {"SIZE": 64})
        assert len(plans) <= 8
    assert triton.asked == len(triton.launched) == 50


def test_a_tensor_where_a_number_was_is_refused(triton: Triton) -> None:
    x = torch.zeros(64)
    launch(triton.kernel, (1,), x, None, 3, 64, 1e-6, config=CONFIG, SIZE=64)
    with pytest.raises(AssertionError):
        launch(triton.kernel, (1,), x, None, 3, x, 1e-6, config=CONFIG, SIZE=64)
