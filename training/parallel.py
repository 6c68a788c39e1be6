"""Data-parallel training over processes of one machine; with one process, nothing happens.

On a CPU, processes of one thread each beat one process of many threads: they meet once a step instead of in every
operation, so other programs on the same cores slow them down little.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def launch(run: Callable[..., None], processes: int, folder: Path, *args: object) -> None:
    """Calls `run(*args)` in `processes` processes that know each other through a file in `folder`."""
    if processes == 1:
        run(*args)
        return
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder.resolve() / "rendezvous"
    meeting.unlink(missing_ok=True)
    spawn(_start, args=(run, processes, meeting, args), nprocs=processes)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_processes(tensors: list[torch.Tensor]) -> None:
    """Replaces every tensor by its sum over the processes, in one message."""
    if world() == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def gather(value: Any) -> list[Any]:
    """Every process's value, in the order of the processes."""
    if world() == 1:
        return [value]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value)
    return found


def any_of(value: bool) -> bool:
    """Whether it is true in one of the processes."""
    return any(gather(value))


def _start(index: int, run: Callable[..., None], processes: int, meeting: Path, args: tuple[object, ...]) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=index, world_size=processes)
    run(*args)
    dist.destroy_process_group()
