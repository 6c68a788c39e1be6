"""Resized 8-bit frames to the rows of `pixel_values`, normalised, and the digests that address them."""

from __future__ import annotations

import hashlib

import numpy as np

from qwen35mm_preprocess.types import GridTHW, ImageProcessing, Processing, VideoProcessing


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


class PatchWriter:
    """Fills `pixel_values` frame by frame, so that no more than one decoded frame is ever held.

    Columns are in the order channel, frame of the temporal patch, row, column; rows go through the temporal patches,
    then through the merge blocks, then through the patches of a block (transformers' `patchify`).
    """

    def __init__(self, grid_thw: GridTHW, processing: ImageProcessing | VideoProcessing) -> None:
        self.pixel_values = np.empty((grid_thw.num_patches, processing.patch_dim), np.float32)
        self._processing = processing
        self._table = normalized_values(processing)
        merge, patch = processing.merge_size, processing.patch_size
        rows, columns = grid_thw.h // merge, grid_thw.w // merge
        # [t, block row, block column, merge row, merge column, channel, frame, patch row, patch column]
        self._blocks = self.pixel_values.reshape(
            grid_thw.t, rows, columns, merge, merge, 3, processing.temporal_patch_size, patch, patch
        )
        self._frame_shape = (rows, merge, patch, columns, merge, patch, 3)

    def write(self, frame: np.ndarray, unit: int, slots: slice) -> None:
        """Writes one frame, uint8 [H, W, 3], into the slots of a temporal patch."""
        patches = frame.reshape(self._frame_shape).transpose(0, 3, 1, 4, 6, 2, 5)
        for channel in range(3):
            values = self._table[channel][patches[..., channel, :, :]]
            self._blocks[unit, ..., channel, slots, :, :] = values[..., None, :, :]


def read_frame(
    pixel_values: np.ndarray, grid_thw: GridTHW, processing: ImageProcessing | VideoProcessing, unit: int, slot: int
) -> np.ndarray:
    """The frame that `PatchWriter` wrote into a slot of a temporal patch, uint8 [H, W, 3]."""
    merge, patch = processing.merge_size, processing.patch_size
    rows, columns = grid_thw.h // merge, grid_thw.w // merge
    blocks = pixel_values.reshape(
        grid_thw.t, rows, columns, merge, merge, 3, processing.temporal_patch_size, patch, patch
    )
    # [block row, merge row, patch row, block column, merge column, patch column, channel]
    normalized = blocks[unit, ..., slot, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    frame = normalized.reshape(grid_thw.h * patch, grid_thw.w * patch, 3)
    mean, std = np.array(processing.image_mean, np.float32), np.array(processing.image_std, np.float32)
    values = (frame * std + mean) / processing.rescale_factor
    return np.rint(values).clip(0, 255).astype(np.uint8)


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
