"""Turns resized 8-bit frames into rows of `pixel_values`, with the normalising table and the digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from qwen35mm_preprocess.types import GridTHW, ImageProcessing, Processing, VideoProcessing

# So many rows fit into a core's cache.
_ROWS_AT_ONCE = 64


def normalized_values(processing: ImageProcessing | VideoProcessing) -> np.ndarray:
    """float32 [3, 256]: the normalised value of each 8-bit value of each channel.

    The table matches transformers' arithmetic bit for bit. It differs by kind: Qwen2VLImageProcessorPil rescales in
    float64, rounds to float32 and then normalises; Qwen3VLVideoProcessor folds the rescaling into mean and std.
    """
    mean = np.array(processing.image_mean, np.float32)[:, None]
    std = np.array(processing.image_std, np.float32)[:, None]
    values = np.arange(256)
    if isinstance(processing, ImageProcessing):
        rescaled = (values.astype(np.float64) * processing.rescale_factor).astype(np.float32)
        return (rescaled - mean) / std
    scale = np.float32(1.0 / processing.rescale_factor)
    return (values.astype(np.float32) - mean * scale) / (std * scale)


@dataclass(frozen=True, eq=False)
class Patches:
    """A medium's patches as 8-bit pixels, in the order of `pixel_values`. They take an eighth of an image's floats.

    pixels               uint8 [P, 3, F, patch_size**2]: channel, frame of the temporal patch, row and column; F is 1
                         if all frames of a temporal patch are equal, as in an image
    table                float32 [3, 256] from `normalized_values`
    temporal_patch_size  frames of a temporal patch
    """

    pixels: np.ndarray
    table: np.ndarray
    temporal_patch_size: int

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: slice) -> Patches:
        """Some of the patches, as views."""
        return replace(self, pixels=self.pixels[rows])

    def values(self) -> np.ndarray:
        """`pixel_values`, float32 [P, 3 * temporal_patch_size * patch_size**2]. Each call makes a new array."""
        num_patches, num_channels, _, area = self.pixels.shape
        values = np.empty((num_patches, num_channels, self.temporal_patch_size, area), np.float32)
        for start in range(0, num_patches, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            for channel, table in enumerate(self.table):
                values[rows, channel] = table.take(self.pixels[rows, channel])
        return values.reshape(num_patches, -1)


def empty_patches(
    grid_thw: GridTHW, processing: ImageProcessing | VideoProcessing, num_frames: int | None = None
) -> Patches:
    """Empty patches for `write_frame`, so that only one decoded frame is in memory at a time.

    Args:
        num_frames: differing frames in a temporal patch; None means all of them.
    """
    temporal = processing.temporal_patch_size
    pixels = np.empty((grid_thw.num_patches, 3, num_frames or temporal, processing.patch_size**2), np.uint8)
    return Patches(pixels, normalized_values(processing), temporal)


def write_frame(
    frame: np.ndarray, patches: Patches, grid_thw: GridTHW, processing: Processing, unit: int, slot: int = 0
) -> None:
    """Cuts a frame, uint8 [H, W, 3], into a slot of a temporal patch."""
    merge, patch = processing.merge_size, processing.patch_size
    cut = frame.reshape(grid_thw.h // merge, merge, patch, grid_thw.w // merge, merge, patch, 3)
    _blocks(patches, grid_thw, processing)[unit, ..., slot, :, :] = cut.transpose(0, 3, 1, 4, 6, 2, 5)


def read_frame(patches: Patches, grid_thw: GridTHW, processing: Processing, unit: int, slot: int) -> np.ndarray:
    """The frame that `write_frame` wrote into a slot of a temporal patch, uint8 [H, W, 3]."""
    blocks = _blocks(patches, grid_thw, processing)
    frame = blocks[unit, ..., min(slot, blocks.shape[6] - 1), :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return frame.reshape(grid_thw.h * processing.patch_size, grid_thw.w * processing.patch_size, 3)


def _blocks(patches: Patches, grid_thw: GridTHW, processing: Processing) -> np.ndarray:
    """[t, block row, block column, merge row, merge column, channel, frame, patch row, patch column], as a view.

    Rows are ordered by temporal patch, then merge block, then patch in the block (transformers' `patchify`).
    """
    merge, patch = processing.merge_size, processing.patch_size
    blocks = (grid_thw.t, grid_thw.h // merge, grid_thw.w // merge)
    return patches.pixels.reshape(*blocks, merge, merge, 3, -1, patch, patch)


def unit_digest(processing: Processing, size: tuple[int, int], frames: Iterable[np.ndarray]) -> str:
    """SHA-256 of one unit (an image or a temporal patch): its frames (uint8 [H, W, 3]), size and processing."""
    digest = hashlib.sha256(f"qwen35mm unit {processing.fingerprint()} {size[0]}x{size[1]}".encode())
    for frame in frames:
        digest.update(frame.tobytes())
    return digest.hexdigest()


def media_digest(unit_digests: tuple[str, ...]) -> str:
    """The digest of a whole medium: its only unit's digest, or SHA-256 over all units' digests."""
    if len(unit_digests) == 1:
        return unit_digests[0]
    return hashlib.sha256(" ".join(("qwen35mm units", *unit_digests)).encode()).hexdigest()
