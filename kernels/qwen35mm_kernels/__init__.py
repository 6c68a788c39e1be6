"""The arithmetic of Qwen3.5's layers on flat, unpadded tensors. Needs only torch.

`reference` is the specification: every operation, naively, in float32. `cpu` (torch, on any device), `cpu.native` (C++)
and `gpu` (Triton) have the same functions with the same signatures; `select_backend` chooses one for a device.
Inference only: the operations work in place and give no gradients. They trust the caller's shapes.
"""

from qwen35mm_kernels.backend import select_backend
from qwen35mm_kernels.reference.attention import split_gate
from qwen35mm_kernels.reference.sampling import SamplingRows

__all__ = ["SamplingRows", "select_backend", "split_gate"]
