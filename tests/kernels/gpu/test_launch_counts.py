"""How much a card is asked to run. Each is tens of microseconds of host time where it is not in a captured step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks.launch_counts import Counts, MetaEngine, as_on_a_card, count


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> None:
    """Not here: to fill a buffer is a launch."""


@pytest.fixture(scope="module")
def engines() -> list[MetaEngine]:
    """0.8B with the first layers of its 24: three with linear attention and one with full, and twice as many."""
    with torch.inference_mode(), as_on_a_card():
        return [MetaEngine("0.8B", num_layers=4 * size, num_blocks=size) for size in (1, 2)]


def more(engines: list[MetaEngine], name: str, *sizes: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """What four more layers, or another block of the tower, launch: kernels of ours, products, torch's operations."""
    found: list[Counts] = []
    for engine in engines:
        run = getattr(engine, name)
        found.append(count(lambda run=run: run(*sizes)) if name == "embed" else count(run(*sizes)))
    first, second = found
    return second.ours - first.ours, second.products - first.products, second.torch - first.torch


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("piece", (2048,), (26, 16, 3)),
        ("piece", (65,), (26, 16, 3)),
        # Attention in parts launches one more, whose lengths are filled.
        ("piece", (64, 16_384), (27, 16, 4)),
        ("step", (1,), (14, 8, 0)),
        ("step", (8,), (18, 16, 0)),
        ("embed", ((1, 64, 64),), (2, 4, 6)),
    ],
)
def test_layers_launch_what_is_known(
    name: str, sizes: tuple[int, ...], expected: tuple[int, int, int], engines: list[MetaEngine]
) -> None:
    assert more(engines, name, *sizes) == expected


def test_around_the_layers_little_is_launched(engines: list[MetaEngine]) -> None:
    for name, most in (("piece", 13), ("step", 15)):
        around = count(getattr(engines[0], name)(1)).all - sum(more(engines, name, 1))
        assert 0 < around <= most, (name, around)


def test_nothing_is_left_behind() -> None:
    from qwen35mm_kernels import cpu, select_backend

    with as_on_a_card():
        assert select_backend("meta").__name__.endswith(".gpu")
    assert select_backend("meta") is cpu
