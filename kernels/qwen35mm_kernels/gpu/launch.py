"""Launches kernels on the tensors' device with a configuration from a committed table.

There is no autotuning at run time: block sizes may change rounding, so they must not depend on timing. `configs/` has
one table for each measured card. Other cards use the kernel's default.

Some releases of Triton type a kernel called from a kernel as never returning: such lines have `pyright: ignore`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, cast

import torch
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from qwen35mm_kernels.gpu.tables import Config, Table, read_table, table_path

P = ParamSpec("P")

# The interpreter poses as a Hopper card.
_INTERPRETED_CAPABILITY = 90
_INTERPRETED_SHARED_BYTES = 227 << 10


def config_for(kernel: str, device: torch.device, shape: str, default: Config) -> Config:
    """The measured configuration of a kernel for a shape on a device's card, else `default`.

    Args:
        shape: the sizes that determine the fastest configuration, as a short text such as "Hv32_V128".

    Raises:
        ValueError: the card's table is malformed, or has unknown blocks.
    """
    active = _trial.get()
    if active is not None:
        active.asked[kernel, shape] = default
        return active.configs.get((kernel, shape), default)
    config = _table(device).get((kernel, shape))
    if config is None:
        return default
    if config.blocks.keys() != default.blocks.keys():
        path = table_path(torch.cuda.get_device_name(device))
        raise ValueError(
            f"{path}, {kernel}, {shape}: blocks must be {list(default.blocks)}, got {list(config.blocks)}."
        )
    return config


def configured(choose: Callable[P, Config]) -> Callable[P, Config]:
    """Keeps what `choose` returns, by its arguments, which must be hashable. In a `trial` it is asked each time."""
    kept = functools.cache(choose)

    @functools.wraps(choose)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> Config:
        return (kept if _trial.get() is None else choose)(*args, **kwargs)

    return chosen


def launch(kernel: Any, grid: Sequence[int], *args: Any, config: Config, **constants: Any) -> None:
    """Runs `kernel` over `grid` on the device of its first tensor. Does nothing if a dimension of the grid is 0.

    Args:
        args: the kernel's run-time arguments, in order.
        constants: its constexpr arguments besides `config.blocks`.
    """
    if 0 in grid:
        return
    active = _trial.get()
    if active is not None or not isinstance(kernel, JITFunction):
        replaced = None if active is None else active.run
        run = kernel[tuple(grid)] if replaced is None else functools.partial(replaced, kernel, grid)
        with _on_device(_device_of(args)):
            run(*args, **_named(config, constants))
        return
    plans = _plans.get(kernel)
    if plans is None:
        plans = _plans[kernel] = LaunchPlans(kernel, args)
    plans.launch(grid, args, config, constants)


class LaunchPlans:
    """A kernel's compiled forms, found by less than Triton looks at.

    Triton's own way to a compiled kernel reads environment variables and makes texts of all options. Here its form is
    found by the numbers themselves, and for tensors by what Triton compiles for: type, device, and whether they begin
    at 16 bytes. An argument has one type in all calls, besides None for tensors.

    Args:
        args: those of a first launch: they show which are tensors.
    """

    def __init__(self, kernel: JITFunction, args: Sequence[Any]) -> None:
        self._kernel = kernel
        self._tensors = [i for i, arg in enumerate(args) if arg is None or isinstance(arg, torch.Tensor)]
        others = [i for i in range(len(args)) if i not in self._tensors]
        # What a kernel isn't compiled for needs no plan of its own: no length has one.
        decisive = [i for i in others if not kernel.params[i].do_not_specialize]
        # An index twice, so that the result is a tuple.
        self._numbers = itemgetter(*decisive, decisive[0]) if decisive else lambda args: ()
        self._first = next(i for i in self._tensors if args[i] is not None)
        self._plans: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def launch(self, grid: Sequence[int], args: Sequence[Any], config: Config, constants: Mapping[str, Any]) -> None:
        """As the function of this name."""
        device = args[self._first].get_device()
        tensors: list[Any] = []
        for i in self._tensors:
            if (x := args[i]) is not None:
                tensors += x.dtype, x.get_device(), x.data_ptr() & 15 == 0
            else:
                tensors.append(None)
        key = (*tensors, *self._numbers(args), *constants.values(), *constants, config.key)
        plan, active = self._plans.get(key), cast("Any", driver.active)
        if plan is None or active.get_current_device() != device:
            self._launch_anew(key, grid, args, config, constants)
            return
        compiled, rest = plan
        compiled[(*grid, 1, 1)](*args, *rest, stream=active.get_current_stream(device))

    def _launch_anew(
        self,
        key: tuple[Any, ...],
        grid: Sequence[int],
        args: Sequence[Any],
        config: Config,
        constants: Mapping[str, Any],
    ) -> None:
        """By Triton, which may compile first."""
        assert not any(isinstance(arg, torch.Tensor) for i, arg in enumerate(args) if i not in self._tensors)
        named = _named(config, constants)
        with _on_device(_device_of(args)):
            compiled = self._kernel[tuple(grid)](*args, **named)
        if not isinstance(compiled, CompiledKernel):
            return
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = compiled, tuple(named[name] for name in self._kernel.arg_names[len(args) :])


_plans: dict[JITFunction, LaunchPlans] = {}
# Of a kernel. Forms differ by shapes, which are few; this bounds what nobody foresaw.
_MAX_PLANS = 1024


def _named(config: Config, constants: Mapping[str, Any]) -> dict[str, Any]:
    """All named arguments of a launch by Triton."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if constants.get("EARLY"):
        options["launch_pdl"] = True
    return {**config.blocks, **constants, **options}


def _device_of(args: Sequence[Any]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, torch.Tensor))


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability: 90 for 9.0; 90 under the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory available to one program."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; a Hopper card's 132 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Some releases of Triton type their own `cdiv` as a kernel's constant, not an int."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1). Not Triton's, for the same reason as `cdiv`."""
    return 1 << (n - 1).bit_length()


class _Trial(NamedTuple):
    configs: Mapping[tuple[str, str], Config]
    run: Callable[..., object] | None
    asked: Table


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(configs: Mapping[tuple[str, str], Config], run: Callable[..., object] | None = None) -> Iterator[Table]:
    """For tuning: inside the context, this thread uses `configs`, else defaults, and reads no table.

    Args:
        configs: by kernel and shape.
        run: called with the kernel, its grid and its arguments instead of a launch, for example to only compile.

    Yields:
        The defaults of all kernels and shapes requested so far.
    """
    asked: Table = {}
    token = _trial.set(_Trial(configs, run, asked))
    try:
        yield asked
    finally:
        _trial.reset(token)


@functools.cache
def _table(device: torch.device) -> Table:
    return read_table(table_path(torch.cuda.get_device_name(device))) if device.type == "cuda" else {}
