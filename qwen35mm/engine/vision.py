"""The vision tower's work for one prompt, cut so that the engine can do a little of it per step.

A unit is one image, or a fixed number of a video's temporal patches counted from its start. Units never
run beside each other and cuts fall between layers, so the features don't depend on how the work was cut,
and a unit's features can be kept and used again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.cache import VisionCache
from qwen35mm.cache.chain import vision_address
from qwen35mm.engine.batches import upload
from qwen35mm.model.vision import VisionTower
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import GridTHW, MediaPlan, Patches, PreparedMedia

UNIT_TEMPORAL_PATCHES = 8
# Patches times layers of one step, while which running replies wait: about a second of a small tower on two CPU cores.
CPU_PATCH_LAYERS = 8192
# By reckoning 20 to 60 ms of the 9B tower on an H200, a few decode steps; a picture of two megapixels needs two steps.
GPU_PATCH_LAYERS = 131_072


def patch_layers_per_step(device: torch.device) -> int:
    """Patches times layers that one step runs on a device. No features depend on it."""
    return GPU_PATCH_LAYERS if device.type == "cuda" else CPU_PATCH_LAYERS


@dataclass(frozen=True)
class VisionUnit:
    """What the tower encodes by itself: temporal patches `start` to `stop` of a medium (an image has one)."""

    media_index: int
    start: int
    stop: int
    grid_thw: GridTHW
    address: bytes

    @property
    def key(self) -> tuple[int, int]:
        return self.media_index, self.start // UNIT_TEMPORAL_PATCHES


def needed_units(
    prompt: Prompt, plans: Sequence[MediaPlan], start: int, stop: int, *, root: bytes, salt: bytes
) -> list[VisionUnit]:
    """The units with a span that reaches into a prompt's tokens `start` to `stop`, in order.

    Args:
        plans: of the prompt's media, with their digests.
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
    return list(units.values())


class VisionWork:
    """Encodes the units of one prompt that nothing is kept of.

    Args:
        tower: the model's vision tower.
        cache: where new features are kept.
        units: what the prompt needs.
        kept: features that there are already, by address.
        media: the pixels of the other units' media, by index.
        to_keep: addresses of the units whose new features are worth keeping.
    """

    def __init__(
        self,
        tower: VisionTower,
        cache: VisionCache,
        units: Sequence[VisionUnit],
        kept: Mapping[bytes, torch.Tensor],
        media: Mapping[int, PreparedMedia],
        to_keep: Collection[bytes],
    ) -> None:
        self._tower = tower
        self._to_keep = to_keep
        self._cache = cache
        self._device = device = tower.patch_embed.weight.device
        self._patch_layers = patch_layers_per_step(device)
        self._features = {unit.key: kept[unit.address].to(device) for unit in units if unit.address in kept}
        missing = [unit for unit in units if unit.address not in kept]
        self.num_cached, self.num_encoded = len(units) - len(missing), len(missing)
        self.total = len(missing) * tower.config.depth
        self.done = 0
        self._work = self._run(missing, media)

    @property
    def finished(self) -> bool:
        """Whether every unit is encoded."""
        return self.done == self.total

    def step(self) -> None:
        """Runs a few layers of the current unit."""
        next(self._work)

    def place(self, prompt: Prompt, embeds: torch.Tensor, start: int) -> None:
        """Writes the features over the placeholders' embeddings of a piece.

        Args:
            embeds: [T, hidden] of the prompt's tokens from `start` on; written to.
        """
        stop = start + embeds.shape[0]
        for span in prompt.spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low >= high:
                continue
            features = self._features[span.media_index, span.unit_index // UNIT_TEMPORAL_PATCHES]
            offset = (span.unit_index % UNIT_TEMPORAL_PATCHES) * (span.stop - span.start) - span.start
            embeds[low - start : high - start] = features[offset + low : offset + high].to(embeds.dtype)

    def _run(self, units: Sequence[VisionUnit], media: Mapping[int, PreparedMedia]) -> Iterator[None]:
        tower = self._tower
        for unit in units:
            patches = _patches(unit, media[unit.media_index])
            state = tower.begin(pixel_values(patches, self._device), [unit.grid_thw])
            layers_per_step = max(1, self._patch_layers // len(patches))
            finished = False
            while not finished:
                before = state.next_layer
                finished = tower.run_layers(state, layers_per_step)
                if finished:
                    features = tower.finish(state)
                    self._features[unit.key] = features
                    if unit.address in self._to_keep:
                        self._cache.keep(unit.address, features)
                self.done += state.next_layer - before
                yield


def _patches(unit: VisionUnit, medium: PreparedMedia) -> Patches:
    patches_per_frame = unit.grid_thw.h * unit.grid_thw.w
    return medium.patches[unit.start * patches_per_frame : unit.stop * patches_per_frame]


def pixel_values(patches: Patches, device: torch.device) -> torch.Tensor:
    """A unit's values [P, patch_dim] float32, on a GPU looked up there: 8-bit pixels are on it sooner than floats."""
    if device.type == "cpu":
        return torch.from_numpy(patches.values())
    return look_up(upload(patches.pixels, device), upload(patches.table, device), patches.temporal_patch_size)


def look_up(pixels: torch.Tensor, table: torch.Tensor, temporal_patch_size: int) -> torch.Tensor:
    """`Patches.values` on the pixels' device."""
    channels = torch.arange(table.shape[0], device=table.device)[:, None, None]
    values = table[channels, pixels.long()]
    return values.expand(-1, -1, temporal_patch_size, -1).flatten(1)
