"""Shared by all pools: layers on several devices, copies between devices, and sizes in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from qwen35mm.config import TextConfig

# Alignment of tensors in a shared buffer; suits any dtype.
_ALIGNMENT = 256

# One device for all layers, or one for each decoder layer.
Devices = torch.device | str | Sequence[torch.device]


def layer_devices(text: TextConfig, devices: Devices) -> tuple[torch.device, ...]:
    """A device for each decoder layer, and that of the last one for a layer of multi-token prediction."""
    if isinstance(devices, (torch.device, str)):
        devices = (torch.device(devices),) * text.num_layers
    if len(devices) != text.num_layers:
        raise ValueError(f"devices must be one or one for each of {text.num_layers} layers; got {len(devices)}.")
    return (*devices, devices[-1]) if text.runs_mtp else tuple(devices)


def largest_share(text: TextConfig, placed: Sequence[torch.device], device: torch.device) -> float:
    """The share of KV, or of states if that is larger, on one of the layers' devices: 0 to 1."""
    parts = [
        sum(placed[layer_idx] == device for layer_idx in layers) / len(layers)
        for layers in (text.attention_layers, text.linear_layers)
    ]
    return max(parts)


def stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.stack on the rows' device. If they are on several, in host memory, with one transfer from each."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_device[row.device].append(index)
    if len(by_device) == 1:
        return torch.stack(list(rows))
    out = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype)
    for indices in by_device.values():
        out[torch.tensor(indices)] = torch.stack([rows[index] for index in indices]).to("cpu")
    return out


def to_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of host tensors on a GPU, by one asynchronous transfer.

    A copy from pageable memory waits for all of a GPU's pending work, and then the GPU waits for the host. A copy from
    pinned memory is queued like a launch. torch reuses the pinned memory only after the transfer has ended.
    """
    staging = _piece(tensors)
    for name, view in _views(staging, tensors).items():
        view.copy_(tensors[name])
    return _views(staging.to(device, non_blocking=True), tensors)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device (see `to_device`), or itself if it is there."""
    return tensor if tensor.device == device else to_device({"": tensor}, device)[""]


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of GPU tensors in one buffer of host memory; waits for the device once."""
    staging = _piece(tensors)
    for name, view in _views(staging, tensors).items():
        view.copy_(tensors[name], non_blocking=True)
    for device in {tensor.device for tensor in tensors.values()}:
        torch.cuda.current_stream(device).synchronize()
    # Returns pageable memory: pinned pages are never paged out.
    return _views(staging.clone(), tensors)


def _piece(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A pinned buffer that can hold copies of all tensors."""
    num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _views(piece: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A buffer's bytes as consecutive tensors with the shapes and dtypes of `like`."""
    views, start = {}, 0
    for name, tensor in like.items():
        views[name] = piece[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def mib(num_bytes: int) -> str:
    """Bytes as text, in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"
