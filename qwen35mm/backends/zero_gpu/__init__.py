"""Answering on ZeroGPU, where a GPU is lent for one call and the process that had it is thrown away.

The parent holds the weights and reads media; it has no engine and none of its threads. Each call runs in a forked
child: an engine of one slot, stepped in place, whose cache passes through the disk tier from call to call.
"""

from qwen35mm.backends.zero_gpu.backend import ZeroGpuBackend
from qwen35mm.backends.zero_gpu.duration import DurationModel

__all__ = ["DurationModel", "ZeroGpuBackend"]
