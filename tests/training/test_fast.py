"""Packed rows through `fast` equal transformers' own forward pass of each conversation alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from training import fast, mixture
from training.data import Encoded, Encoder, collate
from training.fast import GAP, gated_delta_rule, text_states, vision_tokens
from training.media import pixel_values, vision_batch
from training.mixture import PARTS, realized

KINDS = ("recall", "picture", "clip", "pictures", "tools", "sign", "second")


@pytest.fixture(params=["processor", "card"])
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that a processor takes, and those of a card, on a processor."""
    if request.param == "card":
        monkeypatch.setattr(fast, "on_processor", lambda tensor: False)


def encoded(encoder: Encoder, kinds: tuple[str, ...]) -> list[Encoded]:
    return [encoder.encode(realized(PARTS[kind](random.Random(kind), 0.5))) for kind in kinds]


def alone(model: Any, encoder: Encoder, each: Encoded) -> dict[str, Any]:
    """What transformers' own model takes for one conversation."""
    ids = torch.from_numpy(each.ids)[None]
    types = (ids == encoder.media_ids[0]).int() + 2 * (ids == encoder.media_ids[1]).int()
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": types}
    for kind, suffix, chosen in (
        ("image", "", [m for m in each.example.media if m.times_s is None]),
        ("video", "_videos", [m for m in each.example.media if m.times_s is not None]),
    ):
        if chosen:
            inputs[f"pixel_values{suffix}"] = pixel_values(
                torch.cat([vision_batch([medium])["pixels"] for medium in chosen])
            )
            spans = [(len(m.frames), 2 * m.grid[0], 2 * m.grid[1]) for m in chosen]
            inputs[f"{kind}_grid_thw"] = torch.tensor(spans)
    return inputs


@torch.no_grad()
@pytest.mark.usefixtures("forms")
def test_packed_rows_equal_each_conversation_alone(model: Any, encoder: Encoder) -> None:
    found = encoded(encoder, KINDS)
    rows = [found[:4], found[4:]]
    length = max(sum(len(each.ids) + GAP for each in row) for row in rows) + 5
    batch = collate(encoder, rows, length)
    tokens = vision_tokens(model, batch["pixels"], batch["grids"])
    embeds = model.get_input_embeddings()(batch["input_ids"])
    is_media = torch.isin(batch["input_ids"], torch.tensor(encoder.media_ids))
    embeds = embeds.masked_scatter(is_media[..., None], tokens)
    hidden, *_ = text_states(model, embeds, batch["position_ids"], batch["segments"])
    logits = model.lm_head(hidden)
    for row, packed in enumerate(rows):
        start = 0
        for each in packed:
            stop = start + len(each.ids)
            inputs = alone(model, encoder, each)
            grids = {name: inputs[name] for name in inputs if name.endswith("grid_thw")}
            if grids:
                positions, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **grids)
                assert torch.equal(batch["position_ids"][:, row, start:stop], positions[:, 0])
            expected = model(**inputs).logits[0]
            torch.testing.assert_close(logits[row, start:stop], expected, atol=2e-4, rtol=1e-3)
            start = stop + GAP
    # Not because nothing matters: the model tells these conversations apart.
    assert logits.std() > 0.1


@torch.no_grad()
def test_a_neighbour_in_the_row_changes_nothing(model: Any, encoder: Encoder) -> None:
    one, other, last = encoded(encoder, ("chat", "recall", "tools"))

    def states(first: Encoded) -> torch.Tensor:
        start = len(first.ids) + GAP
        batch = collate(encoder, [[first, last]], start + len(last.ids))
        embeds = model.get_input_embeddings()(batch["input_ids"])
        return text_states(model, embeds, batch["position_ids"], batch["segments"])[0][0, start:]

    torch.testing.assert_close(states(one), states(other), atol=5e-5, rtol=1e-4)


def test_compiled_layers_are_two_graphs(model: Any, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each kind of layer, without a break, however many layers there are; gradients stay as they were."""
    monkeypatch.setattr(fast, "on_processor", lambda tensor: False)
    batch = collate(encoder, [encoded(encoder, ("chat", "tools"))], 512)
    embeds = model.get_input_embeddings()(batch["input_ids"])

    def gradients() -> list[torch.Tensor]:
        states, *_ = text_states(model, embeds, batch["position_ids"], batch["segments"])
        return list(torch.autograd.grad(states.square().mean(), params, retain_graph=True))

    params = list(model.model.language_model.layers.parameters())
    expected = gradients()
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(fast, "_layer", torch.compile(fast._layer, backend=counted, dynamic=False, fullgraph=True))
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-3)
    assert counted.frame_count == 2


@pytest.mark.parametrize(("length", "chunk"), [(1, 8), (63, 32), (96, 32), (70, 16), (200, 128)])
def test_the_delta_rule_is_transformers(length: int, chunk: int) -> None:
    q, k, v = (torch.randn(2, length, 3, 16) for _ in range(3))
    decay, beta = -torch.rand(2, length, 3), torch.rand(2, length, 3)
    expected, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(q, k, v, decay, beta, chunk), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [16, 32, 128])
@pytest.mark.parametrize("difference", [1.0, 0.1, 0.0])
def test_the_delta_rule_bears_keys_that_are_alike(difference: float, chunk: int) -> None:
    """As those of a picture's plain parts are; the recurrence in float64, token by token, is what it comes to."""
    q, k, v = torch.randn(3, 1, 96, 2, 16)
    k = k[:, :1] + difference * k
    decay, beta = torch.full((1, 96, 2), -0.02), torch.full((1, 96, 2), 0.95)
    exact = (x.double() for x in (q, k, v))
    expected, _ = torch_recurrent_gated_delta_rule(
        *exact, decay.double(), beta.double(), None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    found = gated_delta_rule(q, k, v, decay, beta, chunk)
    torch.testing.assert_close(found, expected.float(), atol=1e-5 * float(expected.std()) * 10, rtol=1e-4)


@torch.no_grad()
@pytest.mark.usefixtures("forms")
def test_spans_of_many_sizes_go_through_the_tower_together(model: Any) -> None:
    rng = random.Random(0)
    media = [mixture._vision_medium(rng, 0.9, 16) for _ in range(5)]
    batch = vision_batch(media)
    together = vision_tokens(model, batch["pixels"], batch["grids"])
    expected = model.model.visual(pixel_values(batch["pixels"]), grid_thw=batch["grids"]).pooler_output
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-3)
    assert len(together) == sum(len(medium.targets) for medium in media)
