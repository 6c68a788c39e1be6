"""What this machine's processor supports, and how many threads compute on it."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from qwen35mm.cgroups import CGROUPS, OWN_CGROUP, control_groups, read_words

logger = logging.getLogger(__name__)

# Variables with which users set the number of threads.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUS = Path("/sys/devices/system/cpu")


def cpu_capabilities() -> dict[str, Any]:
    """Instruction sets by name, and sizes; PyTorch before 2.11 reports only x86's bfloat16 arithmetic."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    # Every processor with AMX tiles multiplies bfloat16 in them.
    return {"amx_bf16": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}


def set_num_threads(asked: int | None) -> int:
    """Sets PyTorch's number of threads and returns it.

    PyTorch ignores a container's share of processor time, and without MKL it uses both hyperthreads of a core, where
    one reads memory just as fast.

    Args:
        asked: None takes one for each core that this process may use, unless the environment sets a number.
    """
    if asked is None and not any(os.environ.get(name) for name in _VARIABLES) and sys.platform != "darwin":
        # Not on a Mac: there only PyTorch knows the number of fast cores.
        asked = min(usable_cores(), max(torch.get_num_threads(), 1))
    if asked is not None and asked != torch.get_num_threads():
        logger.info("Threads on the processor: %d in place of PyTorch's %d.", asked, torch.get_num_threads())
        torch.set_num_threads(asked)
    return torch.get_num_threads()


def usable_cores(cpus: Path = _CPUS, cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Cores (not hyperthreads) that this process may run on, at most its container's share of processor time.

    Args:
        cpus: where Linux describes each CPU.
        cgroups, own_cgroup: as for `control_groups`.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # All CPUs of a core list the same siblings.
    siblings = {tuple(read_words(cpus / f"cpu{number}" / "topology" / "thread_siblings_list")) for number in allowed}
    # Other systems and sandboxes may not list them.
    known = () not in siblings
    cores = len(siblings) if known else min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))
    shares = [share for folder in control_groups("cpu", cgroups, own_cgroup) if (share := _cpu_share(folder))]
    return max(1, min([cores, *(math.ceil(share) for share in shares)]))


def _cpu_share(group: Path) -> float | None:
    """CPUs' worth of time that a control group may use, such as 1.5; None without a limit."""
    words = read_words(group / "cpu.max")
    if not words:  # version 1
        words = [*read_words(group / "cpu.cfs_quota_us"), *read_words(group / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # "max", or -1
    return int(words[0]) / int(words[1])
