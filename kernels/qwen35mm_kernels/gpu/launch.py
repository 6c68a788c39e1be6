"""How kernels are launched: on the tensors' device, with a configuration from a committed table.

There is no autotuning at run time: which blocks a kernel takes may decide how it rounds, and must not depend on timing.
`configs/` holds one table for each card that was measured; any other card takes the kernel's own default.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parent / "configs"
# A Hopper card's, for the interpreter.
_INTERPRETED_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Config:
    """How a kernel is cut.

    Attributes:
        blocks: constexpr arguments of the kernel, by name.
        num_warps: of one program.
        num_stages: of its pipelined loops.
    """

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


def config_for(kernel: str, device: torch.device, shape: str, default: Config) -> Config:
    """The measured configuration of a kernel for a shape on a device's card, else `default`.

    Args:
        shape: what decides which configuration is the fastest, as a short text such as "Hv32_V128".
    """
    entry = _table(_card(device)).get(kernel, {}).get(shape)
    return default if entry is None else Config(entry["blocks"], entry["num_warps"], entry["num_stages"])


def launch(kernel: Any, grid: Sequence[int], *args: Any, config: Config, **constants: Any) -> None:
    """Runs `kernel` over `grid`, on the device of its first tensor; nothing where a dimension of the grid is 0.

    Args:
        args: the kernel's run-time arguments, in order.
        constants: its constexpr arguments besides `config.blocks`.
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        kernel[tuple(grid)](
            *args,
            **config.blocks,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; under the interpreter, as a Hopper card."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def table_name(card: str) -> str:
    """The file name of a card's table: "NVIDIA H200" -> "nvidia_h200"."""
    return "_".join("".join(c if c.isalnum() else " " for c in card.lower()).split())


@functools.cache
def _card(device: torch.device) -> str:
    return table_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "interpreter"


@functools.cache
def _table(card: str) -> Mapping[str, Any]:
    path = CONFIGS / f"{card}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
