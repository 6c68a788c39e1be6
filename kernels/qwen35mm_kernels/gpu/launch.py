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
from typing import Any, NamedTuple

import torch

from qwen35mm_kernels.gpu.tables import Config, Table, read_table, table_path

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


def launch(kernel: Any, grid: Sequence[int], *args: Any, config: Config, **constants: Any) -> None:
    """Runs `kernel` over `grid` on the device of its first tensor. Does nothing if a dimension of the grid is 0.

    Args:
        args: the kernel's run-time arguments, in order.
        constants: its constexpr arguments besides `config.blocks`.
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    active = _trial.get()
    run = kernel[tuple(grid)] if active is None or active.run is None else functools.partial(active.run, kernel, grid)
    with on_device:
        run(
            *args,
            **config.blocks,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )


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
