"""How much a card is asked to run. Each is tens of microseconds of host time where it is not in a captured step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks.launch_counts import (
    META,
    BareEngine,
    Counts,
    as_on_a_card,
    count,
    count_replay,
    halves,
    replayed_step,
    replayed_tower,
    shallow,
)


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> None:
    """Not here: to fill a buffer is a launch."""


@pytest.fixture(scope="module")
def engines() -> list[BareEngine]:
    """0.8B with the first layers of its 24: three with linear attention and one with full, and twice as many."""
    with torch.inference_mode(), as_on_a_card():
        return [BareEngine(shallow("0.8B", 4 * size, size)) for size in (1, 2)]


def counts(engine: BareEngine, name: str, *sizes: Any) -> Counts:
    if name == "embed":
        return count(lambda: engine.embed(*sizes))
    if name == "step":
        return count(engine.step(*sizes).compute)
    with engine.piece(*sizes) as run:
        return count(run)


def more(engines: list[BareEngine], name: str, *sizes: Any) -> tuple[int, int, int]:
    """What four more layers, or another block of the tower, launch: kernels of ours, products, torch's operations."""
    first, second = (counts(engine, name, *sizes) for engine in engines)
    return second.ours - first.ours, second.products - first.products, second.torch - first.torch


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("piece", (2048,), (26, 16, 0)),
        # Attention of few rows may be in parts, which one more adds.
        ("piece", (65,), (27, 16, 0)),
        ("piece", (64, 16_384), (27, 16, 0)),
        ("step", (1,), (22, 0, 0)),
        ("step", (4,), (22, 0, 0)),
        ("step", (8,), (18, 16, 0)),
        ("embed", ((1, 64, 64),), (2, 4, 6)),
    ],
)
def test_layers_launch_what_is_known(
    name: str, sizes: tuple[Any, ...], expected: tuple[int, int, int], engines: list[BareEngine]
) -> None:
    assert more(engines, name, *sizes) == expected


@pytest.mark.parametrize("length", [1, 512, 2048])
def test_a_captured_piece_is_few_calls(length: int, engines: list[BareEngine]) -> None:
    """Its inputs, its embeddings, their copy and the graph, whatever the layers; then the first token as before."""
    for engine in engines:
        last = torch.empty(1, engine.config.text.hidden_size, dtype=torch.bfloat16, device=META)
        with as_on_a_card(), engine.piece(length, captured=True) as run:
            assert count(run).all - count(functools.partial(engine.first_token, last)).all == 4


def test_around_the_layers_little_is_launched(engines: list[BareEngine]) -> None:
    for name, most in (("piece", 14), ("step", 17)):
        around = counts(engines[0], name, 1).all - sum(more(engines, name, 1))
        assert 0 < around <= most, (name, around)


def test_nothing_is_left_behind() -> None:
    from qwen35mm_kernels import cpu, select_backend

    with as_on_a_card():
        assert select_backend("meta").__name__.endswith(".gpu")
    assert select_backend("meta") is cpu


def test_a_captured_step_is_a_graph_for_each_part_and_few_copies(engines: list[BareEngine]) -> None:
    """The step's numbers go to each device, then cosines, sines and hidden states from part to part, then tokens."""
    whole = count_replay(lambda: replayed_step(engines[1], 1))
    assert (whole.graphs, whole.all) == (1, 3)
    with torch.inference_mode(), as_on_a_card():
        split = BareEngine(shallow("0.8B", 8, 1), device=halves(META, 8))
    parts = count_replay(lambda: replayed_step(split, 1))
    assert (parts.graphs, parts.all) == (3, 3 + 2 + 4 + 2 + 1)


def test_a_grid_that_came_often_is_a_graph_and_few_copies(engines: list[BareEngine]) -> None:
    """Pixels and their table go into the graph's memory, and features are copied out of it."""
    for engine in engines:
        found = count_replay(lambda engine=engine: replayed_tower(engine, (1, 64, 64)))
        assert (found.graphs, found.all) == (1, 1 + 2 + 1)
