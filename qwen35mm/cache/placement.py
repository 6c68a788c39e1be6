"""What all pools share: layers that may lie on several devices, and sizes in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from qwen35mm.config import TextConfig

# One device for all layers, or one for each decoder layer.
Devices = torch.device | str | Sequence[torch.device]


def layer_devices(text: TextConfig, devices: Devices) -> tuple[torch.device, ...]:
    """A device for each decoder layer."""
    if isinstance(devices, (torch.device, str)):
        return (torch.device(devices),) * text.num_layers
    if len(devices) != text.num_layers:
        raise ValueError(f"devices must be one or one for each of {text.num_layers} layers; got {len(devices)}.")
    return tuple(devices)


def largest_share(text: TextConfig, placed: Sequence[torch.device], device: torch.device) -> float:
    """The part of all KV, or of all states if that is more, that lies on one of the layers' devices: 0 to 1."""
    parts = [
        sum(placed[layer_idx] == device for layer_idx in layers) / len(layers)
        for layers in (text.attention_layers, text.linear_layers)
    ]
    return max(parts)


def stack(rows: Sequence[torch.Tensor], *, on_host: bool = True) -> torch.Tensor:
    """torch.stack, with one transfer from each device.

    Args:
        on_host: whether the result is in host memory; rows of several devices go there in any case.
    """
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_device[row.device].append(index)
    if len(by_device) == 1:
        stacked = torch.stack(list(rows))
        return stacked.to("cpu") if on_host else stacked
    out = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype)
    for indices in by_device.values():
        out[torch.tensor(indices)] = torch.stack([rows[index] for index in indices]).to("cpu")
    return out


def mib(num_bytes: int) -> str:
    """Bytes for a person."""
    return f"{num_bytes / 2**20:,.1f} MiB"
