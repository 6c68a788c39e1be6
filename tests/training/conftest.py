"""A tokenizer of a few hundred conversations, and a model of the demo's architecture that fits in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training.data import Encoder
from training.mixture import texts
from training.model import demo_config, new_model
from training.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "depth": 1}


@pytest.fixture(scope="package")
def encoder() -> Encoder:
    tokenizer = train_tokenizer(texts(0, 300))
    return Encoder(tokenizer, (ROOT / "training" / "chat_template.jinja").read_text())


@pytest.fixture(scope="package")
def model(encoder: Encoder) -> Any:
    """Three Gated DeltaNet layers, one of attention, and the MTP layer; float32."""
    config = demo_config(encoder.ids, encoder.tokenizer.get_vocab_size(), **TINY)
    return new_model(config, seed=0).eval()
