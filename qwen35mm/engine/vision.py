"""Encodes a prompt's media unit by unit, and places their embeddings.

A unit is one image, or a fixed number of a video's temporal patches counted from its start. Units never run in one
batch, and steps end between layers. So the features don't depend on how the work was divided, and the cache can keep a
unit's features.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.cache.chain import vision_address
from qwen35mm.engine.batches import upload
from qwen35mm.model import Qwen35Model
from qwen35mm.model.adapters import Groups
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import GridTHW, MediaPlan, Patches, PreparedMedia

UNIT_TEMPORAL_PATCHES = 8
# Patches times layers of one step; running replies wait for it. About a second of a small tower on two CPU cores.
CPU_PATCH_LAYERS = 8192
# By calculation 20 to 60 ms of the 9B tower on an H200, a few decode steps; two megapixels need two steps.
GPU_PATCH_LAYERS = 131_072


def patch_layers_per_step(device: torch.device) -> int:
    """Patches times layers of one step on a device. Features don't depend on it."""
    return GPU_PATCH_LAYERS if device.type == "cuda" else CPU_PATCH_LAYERS


@dataclass(frozen=True)
class VisionUnit:
    """Temporal patches `start` to `stop` of a medium, encoded together (an image has one)."""

    media_index: int
    start: int
    stop: int
    grid_thw: GridTHW
    address: bytes


# By media index and the unit's number in that medium.
VisionUnits = Mapping[tuple[int, int], VisionUnit]


def needed_units(
    prompt: Prompt, plans: Sequence[MediaPlan], start: int, stop: int, *, root: bytes, salt: bytes
) -> VisionUnits:
    """The units with a span in a prompt's tokens `start` to `stop`, in order.

    Args:
        plans: the prompt's media, with digests.
        root, salt: see `vision_address`.
    """
    units: dict[tuple[int, int], VisionUnit] = {}
    for span in prompt.spans:
        key = (span.media_index, span.unit_index // UNIT_TEMPORAL_PATCHES)
        if span.stop <= start or span.start >= stop or key in units:
            continue
        plan = plans[span.media_index]
        digests = plan.unit_digests
        assert digests is not None, "media in a prompt have their digests"
        first = key[1] * UNIT_TEMPORAL_PATCHES
        last = min(first + UNIT_TEMPORAL_PATCHES, plan.grid_thw.t)
        grid = GridTHW(last - first, plan.grid_thw.h, plan.grid_thw.w)
        address = vision_address(root, salt, digests[first:last], grid)
        units[key] = VisionUnit(span.media_index, first, last, grid, address)
    return units


def encode(
    model: Qwen35Model, unit: VisionUnit, medium: PreparedMedia, adapters: Groups = ()
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Runs a unit through the tower, one step's layers at a time.

    Yields:
        The number of layers run so far, and the features [tokens, hidden] after the last one.
    """
    tower, patches = model.tower, patches_of(unit, medium)
    layers_per_step = max(1, patch_layers_per_step(tower.device) // len(patches))
    with model.routes.using(adapters):
        x, rope = tower.embed(pixel_values(patches, tower.device), unit.grid_thw)
    del medium, patches
    for number, block in enumerate(tower.blocks):
        if number and number % layers_per_step == 0:
            yield number, None
        with model.routes.using(adapters):
            x = block(x, rope, unit.grid_thw.t)
    with model.routes.using(adapters):
        features = tower.merger(x)
    del x
    yield len(tower.blocks), features


def patches_of(unit: VisionUnit, medium: PreparedMedia) -> Patches:
    """A unit's patches, as views."""
    per_frame = unit.grid_thw.h * unit.grid_thw.w
    return medium.patches[unit.start * per_frame : unit.stop * per_frame]


def place(
    prompt: Prompt, units: VisionUnits, features: Mapping[bytes, torch.Tensor], embeds: torch.Tensor, start: int
) -> None:
    """Overwrites a chunk's placeholder embeddings with the units' features.

    Args:
        features: by the units' addresses.
        embeds: [T, hidden], the prompt's tokens from `start` on; written to.
    """
    stop = start + embeds.shape[0]
    first = bisect_right(prompt.spans, start, key=lambda span: span.stop)
    for span in prompt.spans[first : bisect_left(prompt.spans, stop, key=lambda span: span.start)]:
        low, high = max(span.start, start), min(span.stop, stop)
        number, place_in_unit = divmod(span.unit_index, UNIT_TEMPORAL_PATCHES)
        found = features[units[span.media_index, number].address]
        offset = place_in_unit * (span.stop - span.start) - span.start
        embeds[low - start : high - start] = found[offset + low : offset + high].to(embeds.dtype)


def pixel_values(patches: Patches, device: torch.device) -> torch.Tensor:
    """A unit's values [P, patch_dim] float32. A GPU looks them up itself: 8-bit pixels transfer faster than floats."""
    if device.type == "cpu":
        return torch.from_numpy(patches.values())
    return look_up(upload(patches.pixels, device), upload(patches.table, device), patches.temporal_patch_size)


def look_up(pixels: torch.Tensor, table: torch.Tensor, temporal_patch_size: int) -> torch.Tensor:
    """`Patches.values` on the pixels' device."""
    channels = torch.arange(table.shape[0], device=table.device)[:, None, None]
    values = table[channels, pixels.long()]
    return values.expand(-1, -1, temporal_patch_size, -1).flatten(1)
