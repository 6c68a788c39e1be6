"""A GPU's memory in words, with a GPU that only answers how much it has."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.errors import ConfigError
from qwen35mm.model.devices import check_fits, shortage

GIB = 1 << 30
CARD = torch.device("cuda:0")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """GiB that are free on each of two cards with 24."""
    free_gib = [20, 4]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def mem_get_info(device: torch.device | int) -> tuple[int, int]:
        index = device if isinstance(device, int) else device.index or 0
        return free_gib[index] * GIB, 24 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return free_gib


def test_what_fits_is_not_spoken_of(free: list[int]) -> None:
    check_fits("A model", 19 * GIB, CARD)
    check_fits("A model", 1000 * GIB, torch.device("cpu"))


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(free: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fits("Qwen3.5-27B", 52 * GIB, CARD)
    message = str(caught.value)
    assert "Qwen3.5-27B takes 52.0 GiB of weights" in message
    assert "cuda:0 has 20.0 GiB free of 24.0 GiB" in message
    assert ". Close what else uses the card" in message


def test_another_card_that_has_room_is_named(free: list[int]) -> None:
    free[:] = [4, 20]
    with pytest.raises(ConfigError, match=r"There is room on cuda:1 \(--device cuda:1\)\."):
        check_fits("A model", 10 * GIB, CARD)


def test_a_shortage_says_what_was_asked_for_and_what_is_free(free: list[int]) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
    assert "2.50 GiB were asked for, 20.0 GiB are free of 24.0 GiB" in shortage(error, CARD)
    assert "more was asked for than there was" in shortage(torch.OutOfMemoryError("?"), CARD)
    assert shortage(error, torch.device("cpu")).startswith("Memory ran out while this was computed.")
