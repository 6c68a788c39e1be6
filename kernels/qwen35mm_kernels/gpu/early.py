"""Kernels of a decode step that start before the kernel before them has ended: CUDA's programmatic dependent launch.

A step is many short kernels, and a kernel's start takes as long as some of them. From Hopper on, a kernel launched with
EARLY starts when every program of the kernel before it has called `wait_for_inputs` or ended. Until its own call:

- It writes nothing. Every program calls it, also one that has nothing to do.
- It reads nothing that the kernel directly before it writes. What older kernels wrote is there, since that kernel had
  waited for them. So weights, states and a step's inputs are requested while that kernel runs.

A kernel launched without EARLY starts when all before it have ended. CUDA graphs keep both.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qwen35mm_kernels.gpu.launch import capability

FIRST_CAPABILITY = 90
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def starts_early(device: torch.device) -> bool:
    """The value of EARLY on a device."""
    return capability(device) >= FIRST_CAPABILITY and not _IS_INTERPRETED


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Waits until the kernel before this one has ended and its writes are visible. The next kernel may start now."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
