"""transformers' own arithmetic for media, made usable without torchvision, which its module needs only to resize."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from qwen35mm_preprocess import ImageProcessing, VideoProcessing

# By its full name: the lazy package refuses the module where torchvision is missing.
_video_module = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
_VideoProcessor: Any = _video_module.Qwen3VLVideoProcessor
# Their methods are called on stand-ins that have the few attributes that these need.
_Processor: Any = Qwen3VLProcessor
_Model: Any = Qwen3_5Model


def image_processor(processing: ImageProcessing) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        patch_size=processing.patch_size,
        temporal_patch_size=processing.temporal_patch_size,
        merge_size=processing.merge_size,
        image_mean=list(processing.image_mean),
        image_std=list(processing.image_std),
    )


def sample_frames(num_frames: int, fps: float, processing: VideoProcessing) -> list[int]:
    settings = SimpleNamespace(
        fps=processing.fps, min_frames=processing.min_frames, max_frames=processing.max_frames, num_frames=None
    )
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
    return _VideoProcessor.sample_frames(settings, metadata).tolist()


def video_size(num_frames: int, height: int, width: int, processing: VideoProcessing) -> tuple[int, int]:
    """The grid that the processor counts with, in pixels; it knows the cap on one frame as well."""
    return _video_module.smart_resize(
        num_frames,
        height,
        width,
        temporal_factor=processing.temporal_patch_size,
        factor=processing.factor,
        min_pixels=processing.min_total_pixels,
        max_pixels=processing.max_total_pixels,
    )


def num_video_patches(num_frames: int, height: int, width: int, processing: VideoProcessing) -> int:
    settings = SimpleNamespace(
        size={"shortest_edge": processing.min_total_pixels, "longest_edge": processing.max_total_pixels},
        patch_size=processing.patch_size,
        merge_size=processing.merge_size,
        temporal_patch_size=processing.temporal_patch_size,
        cap_pixels_per_frame=processing.max_frame_tokens is not None,
        max_video_tokens=processing.max_frame_tokens,
    )
    return _VideoProcessor.get_num_of_video_patches(settings, num_frames, height, width)


def timestamps(indices: Sequence[int], fps: float) -> list[float]:
    return _Processor._calculate_timestamps(SimpleNamespace(), list(indices), fps, 2)


class _Normalizer:
    """TorchvisionBackend's fused rescale and normalise over what torchvision's `normalize` computes."""

    rescale_and_normalize = TorchvisionBackend.rescale_and_normalize
    _fuse_mean_std_and_rescale_factor = TorchvisionBackend._fuse_mean_std_and_rescale_factor

    def normalize(
        self, images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool = False
    ) -> torch.Tensor:
        return images.sub(mean[:, None, None]).div(std[:, None, None])


def video_pixel_values(frames: np.ndarray, processing: VideoProcessing) -> tuple[np.ndarray, tuple[int, int, int]]:
    """pixel_values and grid_thw of resized frames, uint8 [n, H, W, 3]."""
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
    normalizer: Any = _Normalizer()
    normalized = normalizer.rescale_and_normalize(
        video, True, 1 / 255, True, processing.image_mean, processing.image_std
    )
    patches, *grid = _VideoProcessor.patchify(
        None, normalized, processing.patch_size, processing.merge_size, processing.temporal_patch_size
    )
    return patches[0].numpy(), tuple(grid)


def rope_index(
    types: Sequence[int], image_grids: Sequence[Sequence[int]], video_grids: Sequence[Sequence[int]]
) -> tuple[np.ndarray, int]:
    """Positions [3, T] and rope_delta from each token's type (0 text, 1 image, 2 video) and the grids in patches."""
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **kwargs: _Model.get_vision_position_ids(None, *args, **kwargs),
    )
    positions, delta = _Model.get_rope_index(
        model,
        input_ids=torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types], dtype=torch.int32),
        image_grid_thw=torch.tensor(image_grids) if image_grids else None,
        video_grid_thw=torch.tensor(video_grids) if video_grids else None,
    )
    return positions[:, 0].numpy(), int(delta)
