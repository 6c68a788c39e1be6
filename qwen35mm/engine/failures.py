"""What a person is told when the model fails on a request."""

from __future__ import annotations

import re

import torch

from qwen35mm.errors import EngineError
from qwen35mm.model.device_memory import shortage

# Libraries, Triton and CUDA itself have errors of their own for it.
_NO_MEMORY = re.compile(r"CUBLAS_STATUS_ALLOC_FAILED|CUDA(\]:| error:) out of memory")


def engine_error(error: Exception, device: torch.device) -> EngineError:
    """Our own errors as they are; any other without its message, which may name what is not a user's business."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
        message = shortage(error, device)
    elif isinstance(error, torch.AcceleratorError):
        # CUDA refuses everything from then on.
        message = "The GPU has failed, and this program can't use it any more; the log has the details. Start it again."
    else:
        message = f"The model failed on this request ({type(error).__name__}); the log has the details. Try again."
    return EngineError(message)
