from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.captioning.media import similar
from qwen35mm.captioning.media.similar import (
    SUGGESTED_MAX_DISTANCE,
    SimilarIndex,
    media_similarity,
    perceptual_hash,
    similarity,
)
from qwen35mm.evaluation import drawing, scenes
from qwen35mm_preprocess import MediaProcessor, PreparedMedia
from qwen35mm_preprocess.patches import empty_patches, write_frame


def as_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def scaled(picture: Image.Image, factor: float, resample: Image.Resampling) -> Image.Image:
    return picture.resize((round(picture.width * factor), round(picture.height * factor)), resample)


def cropped(picture: Image.Image, share: float) -> Image.Image:
    """Without this share at each side."""
    x, y = round(picture.width * share), round(picture.height * share)
    return picture.crop((x, y, picture.width - x, picture.height - y))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG 90": lambda picture: as_jpeg(picture, 90),
    "JPEG 50": lambda picture: as_jpeg(picture, 50),
    "half": lambda picture: scaled(picture, 0.5, Image.Resampling.LANCZOS),
    "third": lambda picture: scaled(picture, 1 / 3, Image.Resampling.BICUBIC),
    "double": lambda picture: scaled(picture, 2, Image.Resampling.NEAREST),
    "thumbnail": lambda picture: as_jpeg(scaled(picture, 0.4, Image.Resampling.BILINEAR), 75),
    "1% cropped": lambda picture: cropped(picture, 0.01),
    "2% cropped": lambda picture: cropped(picture, 0.02),
}


@cache
def pictures() -> dict[str, Image.Image]:
    """scikit-image's photographs and diagrams, and our samples."""
    folders = (Path(skimage.__file__).parent / "data", asset_path("samples"))
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".png", ".jpg")]
    return {path.name: Image.open(path).convert("RGB") for path in paths}


@cache
def hashes() -> dict[str, int]:
    return {name: hash_of(picture) for name, picture in pictures().items()}


def hash_of(picture: Image.Image) -> int:
    return perceptual_hash(np.asarray(picture))


def distance(one: int, other: int) -> int:
    return (one ^ other).bit_count()


# A third of its size makes grey of a chessboard's edges; the crops are 5 and 6 bits away.
MISSED = {
    "third": {"chessboard_GRAY.png", "chessboard_RGB.png"},
    "1% cropped": {"wide.jpg"},
    "2% cropped": {"coffee.png", "five-shapes.png", "gravel.png", "two-shapes.jpg", "wide.jpg"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_picture_is_near_itself(change: str) -> None:
    distances = {name: distance(hashes()[name], hash_of(CHANGES[change](p))) for name, p in pictures().items()}
    far = {name for name, bits in distances.items() if bits > SUGGESTED_MAX_DISTANCE}
    assert far <= MISSED.get(change, set())


def test_different_pictures_are_not_near() -> None:
    assert len(pictures()) > 25
    near = {
        frozenset(pair)
        for pair in itertools.combinations(hashes(), 2)
        if distance(*(hashes()[name] for name in pair)) <= SUGGESTED_MAX_DISTANCE
    }
    # The same board, as grey and as RGB; the same motorcycle, seen by the left and the right eye.
    assert near == {
        frozenset({"chessboard_GRAY.png", "chessboard_RGB.png"}),
        frozenset({"motorcycle_left.png", "motorcycle_right.png"}),
    }


def random_scenes(count: int) -> list[scenes.Picture]:
    rng = random.Random(1)
    sizes = [scenes.random_size(rng, scenes.random_aspect(rng)) for _ in range(count)]
    return [scenes.random_picture(rng, size, rng.choice((1, 2, 3))) for size in sizes]


def test_scenes_of_flat_shapes_are_hardly_ever_taken_for_one_another() -> None:
    found = [hash_of(drawing.render_picture(scene)) for scene in random_scenes(100)]
    near = [distance(a, b) <= SUGGESTED_MAX_DISTANCE for a, b in itertools.combinations(found, 2)]
    assert np.mean(near) < 0.001


def test_a_shape_of_another_colour_is_seen() -> None:
    """What a hash of brightness alone, or of its horizontal gradient, misses in most cases."""
    near = []
    for scene in random_scenes(50):
        item = max(scene.items, key=lambda item: item.radius)
        # Orange and yellow are next to red for it, as they are for people.
        near_red = ("red", "orange", "yellow")
        other = (40, 70, 210) if item.color in near_red else (40, 160, 60) if item.color == "blue" else (220, 40, 40)
        items = tuple(replace(item, rgb=other) if each is item else each for each in scene.items)
        recoloured = replace(scene, items=items)
        before, after = (hash_of(drawing.render_picture(picture)) for picture in (scene, recoloured))
        near.append(distance(before, after) <= SUGGESTED_MAX_DISTANCE)
    assert np.mean(near) <= 0.1


@pytest.mark.parametrize("rgb", [(0, 0, 0), (255, 255, 255), (200, 30, 90)])
def test_noise_decides_nothing_in_a_flat_picture(rgb: tuple[int, int, int]) -> None:
    flat = np.full((200, 300, 3), rgb, np.uint8)
    noise = np.random.default_rng(0).integers(-6, 7, flat.shape)
    noisy = (flat.astype(int) + noise).clip(0, 255).astype(np.uint8)
    assert perceptual_hash(flat) == perceptual_hash(noisy) == 0


def test_the_smallest_and_the_narrowest_picture_have_a_hash() -> None:
    for shape in ((1, 1, 3), (1, 500, 3), (2000, 2, 3)):
        assert 0 <= perceptual_hash(np.full(shape, 77, np.uint8)) < 2**64


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8, 3)), np.zeros((0, 8, 3), np.uint8)],
)
def test_pixels_of_another_kind_are_refused(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\]; got"):
        perceptual_hash(pixels)


@pytest.mark.parametrize("num_frames", [1, 3])
def test_the_index_finds_what_a_naive_search_finds(num_frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that it grows a few times.
    monkeypatch.setattr(similar, "_INITIAL_CAPACITY", 32)
    rng = random.Random(num_frames)
    index: SimilarIndex[int] = SimilarIndex(6)
    kept: list[list[int]] = []

    def packed(frames: list[int]) -> int:
        return int("1" + "".join(f"{frame:016x}" for frame in frames), 16)

    def changed(frames: list[int]) -> list[int]:
        return [frame ^ sum(1 << bit for bit in rng.sample(range(64), rng.randint(0, 8))) for frame in frames]

    found = 0
    for number in range(300):
        frames = (
            changed(rng.choice(kept))
            if kept and rng.random() < 0.5
            else [rng.getrandbits(64) for _ in range(num_frames)]
        )
        near = [
            (sum(map(distance, frames, other)), at)
            for at, other in enumerate(kept)
            if all(distance(*pair) <= 6 for pair in zip(frames, other, strict=True))
        ]
        assert index.find(packed(frames)) == (min(near)[1] if near else None)
        found += bool(near)
        index.add(packed(frames), number)
        kept.append(frames)
    assert found > 20


def test_the_first_added_wins_among_equals() -> None:
    index: SimilarIndex[str] = SimilarIndex(2)
    assert index.find(1 << 64) is None
    index.add(1 << 64 | 0b01, "first")
    index.add(1 << 64 | 0b10, "second")
    index.add(1 << 64 | 0b01, "third")
    assert index.find(1 << 64 | 0b00) == "first"
    assert index.find(1 << 64 | 0b10) == "second"


def test_an_image_is_not_near_a_video() -> None:
    index: SimilarIndex[str] = SimilarIndex(64)
    black = np.zeros((8, 8, 3), np.uint8)
    index.add(similarity([black]), "image")
    assert index.find(similarity([black] * 3)) is None
    assert index.find(similarity([black])) == "image"


def test_every_frame_has_to_be_near() -> None:
    frames = [np.asarray(pictures()[name]) for name in ("astronaut.png", "coffee.png", "rocket.jpg", "chelsea.png")]
    index: SimilarIndex[str] = SimilarIndex(SUGGESTED_MAX_DISTANCE)
    index.add(similarity(frames[:3]), "video")
    assert index.find(similarity(frames[:3])) == "video"
    for at in range(3):
        assert index.find(similarity([frames[3] if i == at else frames[i] for i in range(3)])) is None


@pytest.mark.parametrize("max_distance", [-1, 65])
def test_a_distance_that_makes_no_sense(max_distance: int) -> None:
    with pytest.raises(ValueError, match="0 to 64 bits"):
        SimilarIndex(max_distance)


def test_a_prepared_medium_is_hashed_as_its_pixels_are() -> None:
    processor = MediaProcessor.from_pretrained(demo_model_path())
    picture = asset_path("samples") / "two-shapes.jpg"
    prepared = processor.prepare(picture, kind="image")
    from_model = media_similarity(prepared, processor.image_processing)
    assert distance(from_model, similarity([np.asarray(pictures()["two-shapes.jpg"])])) <= 1


def test_a_video_is_hashed_by_its_first_middle_and_last_frame() -> None:
    processor = MediaProcessor.from_pretrained(demo_model_path())
    processing = processor.video_processing
    plan = processor.prepare(asset_path("samples") / "moves-right.mp4", kind="video").plan
    height, width = plan.size
    num_frames = plan.grid_thw.t * processing.temporal_patch_size
    assert num_frames > 4
    frames = [np.asarray(p.resize((width, height))) for p in itertools.islice(pictures().values(), num_frames)]
    patches = empty_patches(plan.grid_thw, processing)
    for number, frame in enumerate(frames):
        unit, slot = divmod(number, processing.temporal_patch_size)
        write_frame(frame, patches, plan.grid_thw, processing, unit, slot)
    middle = plan.grid_thw.t // 2 * processing.temporal_patch_size
    expected = similarity([frames[0], frames[middle], frames[-1]])
    assert media_similarity(PreparedMedia(plan, patches), processing) == expected
