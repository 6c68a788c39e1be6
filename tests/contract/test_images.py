"""Pictures from tensors and open files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from qwen35mm.contract import Image, Message, Video
from qwen35mm.errors import PromptError
from qwen35mm_preprocess import MediaLimits, MediaSourceError
from qwen35mm_preprocess.animation import animation_frames, probe_animation

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def pixels_of(image: Image) -> np.ndarray:
    assert isinstance(image.source, PILImage.Image)
    return np.asarray(image.source)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_first", [True, False])
def test_tensors_are_read_as_what_they_must_be(dtype: torch.dtype, is_first: bool) -> None:
    values = PIXELS // 32 * 32
    tensor = torch.from_numpy(values)
    tensor = tensor if dtype == torch.uint8 else (tensor.double() / 255).to(dtype)
    tensor = tensor.permute(2, 0, 1) if is_first else tensor
    found = pixels_of(Image(tensor.requires_grad_(dtype != torch.uint8)))
    # bfloat16 has eight bits of a fraction.
    assert np.abs(found.astype(int) - values).max() <= (1 if dtype == torch.bfloat16 else 0)
    (part,) = Message("user", tensor).content
    assert isinstance(part, Image)


def test_tensors_of_one_colour_and_with_alpha() -> None:
    grey, alpha = torch.from_numpy(PIXELS[..., 0]), torch.from_numpy(np.dstack([PIXELS, PIXELS[..., :1]]))
    assert np.array_equal(pixels_of(Image(grey)), PIXELS[..., 0])
    assert np.array_equal(pixels_of(Image(grey[None])), PIXELS[..., 0])
    assert np.array_equal(pixels_of(Image(alpha)), alpha.numpy())
    assert np.array_equal(pixels_of(Image(alpha.permute(2, 0, 1))), alpha.numpy())


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(3, 5, 3, dtype=torch.uint8), "first or last"),
        (torch.full((3, 5, 7), 1.5), "between 0 and 1"),
        (torch.full((3, 5, 7), float("nan")), "between 0 and 1"),
        (torch.zeros(3, 5, 7, dtype=torch.int64), r"array of torch.int64 of shape \[3, 5, 7\]"),
        (torch.zeros(1, 3, 5, 7), r"of shape \[1, 3, 5, 7\]"),
        (torch.zeros(2, 5, 7), r"of shape \[2, 5, 7\]"),
        (torch.zeros(0, 5, 3), "between 0 and 1"),
    ],
)
def test_tensors_that_could_mean_two_things_or_none_are_refused(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        Image(tensor)


def test_frames_of_any_kind_make_a_video(tmp_path: Path) -> None:
    picture = PILImage.fromarray(PIXELS)
    picture.save(path := tmp_path / "a.png")
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    video = Video.from_frames([picture, PIXELS, tensor, path, path.read_bytes()], fps=4)
    assert isinstance(video.source, bytes)
    read = list(animation_frames(video.source, range(5), MediaLimits(), "srgb"))
    assert all(np.array_equal(np.asarray(frame), PIXELS) for _, frame in read)
    assert np.array_equal(probe_animation(video.source, MediaLimits()).times_s, [0, 0.25, 0.5, 0.75, 1])
    with pytest.raises(MediaSourceError, match="no such file"):
        Video.from_frames([tmp_path / "b.png"])


def test_open_files_are_read_from_their_start(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    PILImage.fromarray(PIXELS).save(path)
    written = io.BytesIO()
    PILImage.fromarray(PIXELS).save(written, "PNG")  # it now stands at its end
    assert Image(written).source == path.read_bytes() == Video(written).source
    with path.open("rb") as file:
        assert Image(file).source == path.read_bytes()
    with path.open("r", encoding="latin-1") as file, pytest.raises(PromptError, match="mode 'rb'"):
        Image(file)  # pyright: ignore[reportArgumentType]
