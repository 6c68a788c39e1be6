"""From the host to the model's device without waiting for what the device still has to do."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a device.

    A copy from ordinary memory waits until a GPU has done everything before it, and then the GPU waits for the host;
    one from pinned memory takes its turn among the launches.
    """
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
