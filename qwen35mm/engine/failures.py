"""What a person is told when the model fails on a request."""

from __future__ import annotations

import torch

from qwen35mm.errors import EngineError
from qwen35mm.model.device_memory import shortage


def engine_error(error: Exception, device: torch.device) -> EngineError:
    """Our own errors as they are; any other without its message, which may name what is not a user's business."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        message = shortage(error, device)
    else:
        message = f"The model failed on this request ({type(error).__name__}); the log has the details. Try again."
    return EngineError(message)
