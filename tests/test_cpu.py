"""The processor's abilities, with a PyTorch that lists them and with one that doesn't yet."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.cpu import cpu_capabilities


@pytest.mark.parametrize("has_amx", [False, True])
def test_an_older_torch_is_asked_one_by_one(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert cpu_capabilities() == {"amx_bf16": has_amx, "avx512_bf16": False}


def test_a_newer_torch_lists_more() -> None:
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this PyTorch has no list")
    assert cpu_capabilities() == dict(torch.cpu.get_capabilities())
