"""Texts through the model, with transformers as the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qwen35mm.errors import ConfigError
from qwen35mm.evaluation import passages
from qwen35mm.evaluation.passages import diverge, hidden_states, text_passages
from qwen35mm.model import LoadedModel
from tests.oracle import load_demo_oracle

TEXT = "A red circle at the top left, a blue star in the center and a green cross on the right. " * 40


def test_a_texts_perplexity_is_transformers(demo: LoadedModel) -> None:
    found = text_passages(demo, TEXT, max_tokens=700)
    assert [len(each.prompt.token_ids) for each in found] == [700]  # more than one piece of the engine
    head, hidden = demo.model.head, list(hidden_states(demo, found))
    ours = diverge(found, (head, hidden), (head, hidden))
    ids = torch.tensor(found[0].prompt.token_ids)[None]
    oracle: Any = load_demo_oracle()
    with torch.inference_mode():
        loss = float(oracle(input_ids=ids, labels=ids).loss)
    assert ours.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert (ours.num_tokens, ours.kl_max, ours.top1_percent) == (699, 0, 100)


def test_windows_begin_anew(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "WINDOW_TOKENS", 50)
    monkeypatch.setattr(passages, "_LOGITS_AT_ONCE", 960 * 20)
    # One token is left, and nothing to foretell it from.
    first, second = text_passages(demo, TEXT, max_tokens=101)
    alone = next(hidden_states(demo, [second]))
    both = list(hidden_states(demo, [first, second]))
    assert torch.equal(both[1], alone)
    assert torch.cat([first.targets, second.targets]).tolist() == [
        *first.prompt.token_ids[1:].tolist(),
        *second.prompt.token_ids[1:].tolist(),
    ]
    found = diverge([first, second], (demo.model.head, both), (demo.model.head, both))
    assert found.num_tokens == 98


def test_a_text_without_a_second_token_is_refused(demo: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="less than two tokens"):
        text_passages(demo, "a", max_tokens=100)
