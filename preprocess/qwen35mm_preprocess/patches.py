"""Resized 8-bit frames to the rows of `pixel_values`, what normalises them, and the digests that address them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from qwen35mm_preprocess.types import GridTHW, ImageProcessing, Processing, VideoProcessing

# What is looked up at a time stays in a core's cache.
_ROWS_AT_ONCE = 64


def normalized_values(processing: ImageProcessing | VideoProcessing) -> np.ndarray:
    """float32 [3, 256]: what each 8-bit value of each channel becomes.

    A table gives every bit of transformers' arithmetic, which differs by kind: Qwen2VLImageProcessorPil rescales in
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
    """The patches of a medium as 8-bit pixels, in the order of `pixel_values`: an eighth of an image's floats.

    pixels               uint8 [P, 3, F, patch_size**2]: channel, frame of the temporal patch, row and column; F is 1
                         where all frames of a temporal patch are the same, as those of an image are
    table                float32 [3, 256]: what each value of each channel becomes, as `normalized_values` gives it
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
        """`pixel_values`, float32 [P, 3 * temporal_patch_size * patch_size**2], made anew at each call."""
        num_patches, num_channels, _, area = self.pixels.shape
        values = np.empty((num_patches, num_channels, self.temporal_patch_size, area), np.float32)
        for start in range(0, num_patches, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            for channel, table in enumerate(self.table):
                values[rows, channel] = table.take(self.pixels[rows, channel])
        return values.reshape(num_patches, -1)


class PatchWriter:
    """Cuts frame by frame into patches, so that no more than one decoded frame is ever held.

    Rows go through the temporal patches, then through the merge blocks, then through the patches of a block
    (transformers' `patchify`).

    Args:
        num_frames: frames of a temporal patch that differ; None: all of them.
    """

    def __init__(
        self, grid_thw: GridTHW, processing: ImageProcessing | VideoProcessing, num_frames: int | None = None
    ) -> None:
        merge, patch, temporal = processing.merge_size, processing.patch_size, processing.temporal_patch_size
        num_frames = num_frames or temporal
        pixels = np.empty((grid_thw.num_patches, 3, num_frames, patch**2), np.uint8)
        self.patches = Patches(pixels, normalized_values(processing), temporal)
        rows, columns = grid_thw.h // merge, grid_thw.w // merge
        # [t, block row, block column, merge row, merge column, channel, frame, patch row, patch column]
        self._blocks = pixels.reshape(grid_thw.t, rows, columns, merge, merge, 3, num_frames, patch, patch)
        self._frame_shape = (rows, merge, patch, columns, merge, patch, 3)

    def write(self, frame: np.ndarray, unit: int, slot: int = 0) -> None:
        """Writes one frame, uint8 [H, W, 3], into a slot of a temporal patch."""
        self._blocks[unit, ..., slot, :, :] = frame.reshape(self._frame_shape).transpose(0, 3, 1, 4, 6, 2, 5)


def read_frame(patches: Patches, grid_thw: GridTHW, processing: Processing, unit: int, slot: int) -> np.ndarray:
    """The frame that `PatchWriter` wrote into a slot of a temporal patch, uint8 [H, W, 3]."""
    merge, patch = processing.merge_size, processing.patch_size
    num_frames = patches.pixels.shape[2]
    rows, columns = grid_thw.h // merge, grid_thw.w // merge
    blocks = patches.pixels.reshape(grid_thw.t, rows, columns, merge, merge, 3, num_frames, patch, patch)
    # [block row, merge row, patch row, block column, merge column, patch column, channel]
    frame = blocks[unit, ..., min(slot, num_frames - 1), :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return frame.reshape(grid_thw.h * patch, grid_thw.w * patch, 3)


class UnitDigest:
    """SHA-256 of the frames of one unit (an image, or a temporal patch), their size and the processing."""

    def __init__(self, processing: Processing, size: tuple[int, int]) -> None:
        self._hash = hashlib.sha256(f"qwen35mm unit {processing.fingerprint()} {size[0]}x{size[1]}".encode())

    def update(self, frame: np.ndarray) -> None:
        """Adds a frame, uint8 [H, W, 3]."""
        self._hash.update(frame.tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def media_digest(unit_digests: tuple[str, ...]) -> str:
    """The digest of a whole medium: its only unit's, or SHA-256 over those of all its units."""
    if len(unit_digests) == 1:
        return unit_digests[0]
    return hashlib.sha256(" ".join(("qwen35mm units", *unit_digests)).encode()).hexdigest()
