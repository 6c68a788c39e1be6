"""The vision tower's graphs: what is captured and when, what makes room, and the same bits. What captures records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine import tower as towers
from qwen35mm.engine.memory import tower_graphs_bytes
from qwen35mm.engine.tower import GRAPH_PATCHES, MOST_GRAPHS, RUNS_BEFORE, Tower, TowerGraph
from qwen35mm.engine.vision import VisionUnit, encode
from qwen35mm.model import LoadedModel
from qwen35mm.model.adapters import Groups
from qwen35mm_preprocess import GridTHW, Patches, PreparedMedia
from tests.engine.exact import Chat, cache_settings, picture, results, user


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was captured and replayed, by a tower on what passes for a card. A graph writes to the same memory again."""
    told: list[str] = []
    compute_anew = TowerGraph._compute

    @torch.inference_mode()
    def compute_again(self: TowerGraph) -> None:
        out = getattr(self, "_features", None)
        compute_anew(self)
        if out is not None:
            self._features = out.copy_(self._features)

    def capture(device: torch.device, compute: Callable[[], None], memory: Any) -> Callable[[], None]:
        compute()
        told.append("captured")

        def replay() -> None:
            told.append("replayed")
            compute()

        return replay

    monkeypatch.setattr(TowerGraph, "_compute", compute_again)
    monkeypatch.setattr(towers, "capture", capture)
    monkeypatch.setattr(towers, "runs_triton", lambda device: True)
    return told


@pytest.fixture
def media(loaded: LoadedModel) -> Iterator[PreparedMedia]:
    """Pictures of one size."""
    return (Chat(loaded).media([user(Image(picture(seed)))])[0] for seed in range(100))


def unit_of(medium: PreparedMedia) -> VisionUnit:
    return VisionUnit(0, 0, medium.plan.grid_thw.t, medium.plan.grid_thw, b"")


def features_of(found: Iterator[tuple[int, torch.Tensor | None]]) -> torch.Tensor:
    *_, (_, features) = found
    assert features is not None
    return features


@torch.inference_mode()
def test_a_grid_that_comes_again_is_captured_and_keeps_its_bits(
    loaded: LoadedModel, media: Iterator[PreparedMedia], captured: list[str]
) -> None:
    tower, found = Tower(loaded.model), []
    for number in range(RUNS_BEFORE + 3):
        medium = next(media)
        features = features_of(tower.encode(unit_of(medium), medium))
        found.append((features, features_of(encode(loaded.model, unit_of(medium), medium))))
        assert captured.count("replayed") == max(number + 2 - RUNS_BEFORE, 0)
    assert captured.count("captured") == 1
    # A graph's output is overwritten by its next run: what was taken before must not change.
    assert all(torch.equal(ours, theirs) for ours, theirs in found)
    assert len({float(features.sum()) for features, _ in found}) == len(found)


def test_a_device_without_graphs_captures_nothing(loaded: LoadedModel, media: Iterator[PreparedMedia]) -> None:
    tower, medium = Tower(loaded.model), next(media)
    with torch.inference_mode():
        for _ in range(RUNS_BEFORE + 1):
            *before, (num_layers, _) = tower.encode(unit_of(medium), medium)
    assert (tower._graphs, num_layers) == ({}, loaded.model.tower.config.depth)
    assert before == []


@torch.inference_mode()
def test_a_tower_that_cannot_be_captured_is_launched(
    loaded: LoadedModel, media: Iterator[PreparedMedia], captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        captured.append("failed")
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(towers, "capture", fail)
    tower = Tower(loaded.model)
    for _ in range(RUNS_BEFORE + 3):
        medium = next(media)
        expected = features_of(encode(loaded.model, unit_of(medium), medium))
        assert torch.equal(features_of(tower.encode(unit_of(medium), medium)), expected)
    assert captured == ["failed"]


def test_replies_about_pictures_of_one_grid_are_as_before(
    loaded: LoadedModel, captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, params = Chat(loaded), SamplingParams(temperature=0.0, max_tokens=5)
    requests = [chat.request([user(Image(picture(seed)), "What?")], params=params) for seed in range(RUNS_BEFORE + 2)]
    found = results(Engine(loaded, EngineSettings(context_length=512), cache_settings(loaded)), *requests)
    assert captured.count("replayed") == 3
    monkeypatch.setattr(towers, "runs_triton", lambda device: False)
    expected = results(Engine(loaded, EngineSettings(context_length=512), cache_settings(loaded)), *requests)
    assert {id_: each.token_ids for id_, each in found.items()} == {id_: e.token_ids for id_, e in expected.items()}


class Kinds:
    """A tower whose graphs compute nothing."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TowerGraph, "_compute", lambda self: None)
        self.tower = Tower(loaded.model)

    def see(self, height: int, width: int = 32, times: int = 1, frames: int = 1, adapters: Groups = ()) -> list[bool]:
        """Whether each of some units of a grid has a graph."""
        pixels = np.empty((height * width, 3, frames, 4), np.uint8)
        patches = Patches(pixels, np.empty((3, 256), np.float32), 2)
        grid = GridTHW(1, height, width)
        return [self.tower.graph_of(patches, grid, adapters) is not None for _ in range(times)]


@pytest.fixture
def kinds(loaded: LoadedModel, captured: list[str], monkeypatch: pytest.MonkeyPatch) -> Kinds:
    return Kinds(loaded, monkeypatch)


LATE = [False] * (RUNS_BEFORE - 1) + [True] * 2


def test_what_decides_a_graph_has_one_of_its_own(kinds: Kinds, captured: list[str]) -> None:
    others: list[dict[str, Any]] = [{}, {"width": 30}, {"frames": 2}, {"adapters": ((3, None),)}]
    for how in others:
        assert kinds.see(32, times=len(LATE), **how) == LATE
    assert captured == ["captured"] * 4


def test_graphs_make_room_when_they_are_not_used(kinds: Kinds) -> None:
    heights = range(2, 2 * MOST_GRAPHS + 2, 2)
    for height in heights:
        assert kinds.see(height, times=len(LATE))[-1]
    # All are in use: pictures of ever other grids don't take each other's places.
    assert not any(kinds.see(40, times=20))
    for _ in range(20):
        for height in heights[1:]:
            assert kinds.see(height) == [True]
    assert kinds.see(40) == [True]
    assert {kind.grid_thw.h for kind in kinds.tower._graphs} == {*heights[1:], 40}
    assert kinds.see(heights[0], times=3) == [False] * 3


def test_large_units_have_no_graph_and_all_together_are_bounded(kinds: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(kinds.see(130, times=9)), "more than half of all patches"
    assert kinds.see(128, times=len(LATE)) == LATE
    assert kinds.see(126, times=len(LATE)) == LATE
    assert not any(kinds.see(4, times=9))
    assert sum(kind.grid_thw.num_patches for kind in kinds.tower._graphs) <= GRAPH_PATCHES
    # A unit of several steps: replies would wait for all of it.
    monkeypatch.setattr(towers, "GPU_PATCH_LAYERS", 31 * 32)
    assert not any(kinds.see(32, times=9))


def test_other_grids_are_forgotten(kinds: Kinds) -> None:
    for height in range(2, 130, 2):
        for width in range(2, 36, 2):
            kinds.see(height, width)
    assert len(kinds.tower._num_runs) <= 1024
    assert len(kinds.tower._graphs) == 0


def test_their_memory_is_known() -> None:
    for size, least, most in (("0.8B", 200, 300), ("9B", 280, 400)):
        config = ModelConfig.from_dict(make_config(size, "bfloat16"))
        assert least < tower_graphs_bytes(config, torch.bfloat16) / 2**20 < most
