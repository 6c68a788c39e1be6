"""The vision tower's work for one request, cut so that the engine can do a little of it per step.

A unit is one image, or a fixed number of a video's temporal patches counted from its start. Units never
run beside each other and cuts fall between layers, so the features don't depend on how the work was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from qwen35mm.model.vision import VisionTower
from qwen35mm_preprocess import GridTHW, PreparedMedia

UNIT_TEMPORAL_PATCHES = 8
# Patches times layers of one step: about a second of a small tower on two CPU cores.
PATCH_LAYERS_PER_STEP = 8192


class VisionEncoding:
    """Encodes the media of one request, in order.

    Args:
        tower: the model's vision tower.
        media: with `pixel_values` of shape `[num_patches, channels * temporal * patch * patch]`, float32.
    """

    def __init__(self, tower: VisionTower, media: Sequence[PreparedMedia]) -> None:
        self._tower = tower
        units = [unit for medium in media for unit in _units(medium)]
        self._num_layers = tower.config.depth
        self.total = len(units) * self._num_layers
        self.done = 0
        self._features: list[torch.Tensor] = []
        self._work = self._run(units)

    @property
    def finished(self) -> bool:
        """Whether every unit is encoded."""
        return self.done == self.total

    def step(self) -> None:
        """Runs a few layers of the current unit."""
        next(self._work)

    def features(self) -> torch.Tensor | None:
        """All units' features `[num_vision_tokens, hidden]` in prompt order; None without media."""
        assert self.finished, "features before the last unit"
        return torch.cat(self._features) if self._features else None

    def _run(self, units: list[tuple[np.ndarray, GridTHW]]) -> Iterator[None]:
        tower = self._tower
        for pixel_values, grid_thw in units:
            state = tower.begin(torch.from_numpy(pixel_values), [grid_thw])
            layers_per_step = max(1, PATCH_LAYERS_PER_STEP // pixel_values.shape[0])
            finished = False
            while not finished:
                before = state.next_layer
                finished = tower.run_layers(state, layers_per_step)
                if finished:
                    self._features.append(tower.finish(state))
                self.done += state.next_layer - before
                yield


def _units(medium: PreparedMedia) -> Iterator[tuple[np.ndarray, GridTHW]]:
    grid = medium.plan.grid_thw
    patches_per_frame = grid.h * grid.w
    for start in range(0, grid.t, UNIT_TEMPORAL_PATCHES):
        stop = min(start + UNIT_TEMPORAL_PATCHES, grid.t)
        rows = slice(start * patches_per_frame, stop * patches_per_frame)
        yield medium.pixel_values[rows], GridTHW(stop - start, grid.h, grid.w)
