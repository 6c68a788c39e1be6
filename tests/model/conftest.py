"""Fixtures: tiny checkpoints and, of each, transformers' model and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from qwen35mm.config import ModelConfig
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.weights import load_model
from tests.tiny import TinyCheckpoints, TinySpec


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ours(tiny: TinyCheckpoints) -> Callable[..., Qwen35Model]:
    """ours(spec, dtype=torch.float32): our model, loaded once."""

    @cache
    def load(spec: TinySpec, dtype: torch.dtype = torch.float32) -> Qwen35Model:
        folder = tiny.folder(spec)
        return load_model(folder, ModelConfig.from_pretrained(folder), dtype=dtype)

    return load


@pytest.fixture(scope="session")
def theirs(tiny: TinyCheckpoints) -> Callable[..., Any]:
    """theirs(spec, dtype=torch.float32): transformers' model, loaded once."""

    @cache
    def load(spec: TinySpec, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForImageTextToText.from_pretrained(tiny.folder(spec), dtype=dtype).eval()

    return load
