"""Answers on ZeroGPU, which lends a GPU for one call and discards the process that had it.

The parent has the weights and reads media; it has no engine and none of its threads. Each call runs in a forked child:
an engine with one slot, stepped in place. Its cache passes from call to call through the disk tier.
"""

from qwen35mm.backends.zero_gpu.backend import ZeroGpuBackend
from qwen35mm.backends.zero_gpu.duration import DurationModel

__all__ = ["DurationModel", "ZeroGpuBackend"]
