"""The family's proportions, and its MTP layer trained beside transformers' model."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from qwen35mm.evaluation.scenes import COLORS, SHAPES
from training.data import IGNORE, Encoder, collate
from training.fast import GAP, vision_tokens
from training.losses import VisionHeads, answer_loss
from training.media import CLASSES, KNOWN
from training.mixture import PARTS, realized
from training.model import demo_config, new_model


def batch_of(encoder: Encoder, *kinds: str) -> dict[str, Any]:
    encodeds = [encoder.encode(realized(PARTS[kind](random.Random(kind), 0.3))) for kind in kinds]
    return collate(encoder, [encodeds], sum(len(each.ids) + GAP for each in encodeds))


def test_proportions_are_the_familys(encoder: Encoder) -> None:
    config = demo_config(encoder.ids, 1280)
    text: Any = config.text_config
    assert text.linear_key_head_dim == text.linear_value_head_dim == 64
    assert text.tie_word_embeddings
    assert text.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    widths = (
        text.head_dim,
        text.linear_key_head_dim,
        config.vision_config.hidden_size // config.vision_config.num_heads,
    )
    assert all(width & (width - 1) == 0 for width in widths)
    assert (
        2 * sum(text.rope_parameters["mrope_section"]) == text.head_dim * text.rope_parameters["partial_rotary_factor"]
    )
    with torch.device("meta"):
        size = sum(p.numel() for p in new_model(config, 0).parameters())
    assert 2 * size < 15 * 2**20


def test_decays_and_taps_begin_where_they_can_learn(model: Any) -> None:
    """With transformers' own beginning, states forget at once and positions aren't learned."""
    net = model.model.language_model.layers[0].linear_attn
    steps = F.softplus(net.dt_bias)
    assert 0.0009 < steps.min() < steps.max() < 0.11
    assert net.conv1d.weight.abs().max() > 0.4
    assert model.lm_head.weight is model.get_input_embeddings().weight


@torch.no_grad()
def test_the_mtp_layer_foretells_the_token_after_the_next(model: Any, encoder: Encoder) -> None:
    """Written anew for one conversation, token by token, from transformers' own hidden states."""
    batch = batch_of(encoder, "chat")
    loss, shown, _ = answer_loss(model, batch, None, mtp_weight=0.5)
    ids = batch["input_ids"][:, :-GAP]
    hidden = model.model(input_ids=ids).last_hidden_state[0]
    embeds = model.get_input_embeddings()(ids)[0]
    mtp = model.mtp

    def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + norm.weight)

    joined = torch.cat([normed(mtp.pre_fc_norm_embedding, embeds[1:]), normed(mtp.pre_fc_norm_hidden, hidden[:-1])], -1)
    x = (joined @ mtp.fc.weight.T)[None]
    rotary = model.model.language_model.rotary_emb(x, torch.arange(x.shape[1]).expand(3, 1, -1))
    mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
    logits = model.lm_head(normed(mtp.norm, mtp.layers[0](x, position_embeddings=rotary, attention_mask=mask)[0]))
    losses = []
    for place in range(ids.shape[1] - 2):
        this, after = (int(batch["answers"][0, place + i]) for i in (0, 1))
        if this == after >= 0:
            losses.append(F.cross_entropy(logits[place], ids[0, place + 2]))
    assert losses
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(shown["mtp"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, shown["loss"] + 0.5 * expected, atol=1e-4, rtol=1e-4)


def test_only_its_weight_makes_the_mtp_layer_learn(model: Any, encoder: Encoder) -> None:
    for weight in (0.0, 0.3):
        model.zero_grad(set_to_none=True)
        answer_loss(model, batch_of(encoder, "chat", "recall"), None, weight)[0].backward()
        learned = {name for name, param in model.named_parameters() if param.grad is not None}
        mtp = {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
        assert (mtp <= learned) if weight else not mtp & learned
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def test_an_answer_is_right_where_every_token_is_the_likeliest(model: Any, encoder: Encoder) -> None:
    batch = batch_of(encoder, "chat", "recall")
    _, _, wrong = answer_loss(model, batch, None)
    assert len(wrong) == len(batch["skills"])
    assert (wrong > 0).all()
    # What the model itself holds for likeliest is right, all but one token of one answer.
    hidden = model.model(input_ids=batch["input_ids"][:, : int((batch["segments"] == 1).sum())]).last_hidden_state
    guesses = model.lm_head(hidden)[0].argmax(-1)
    own = batch["labels"].clone()
    first = (batch["segments"][0] == 1) & (own[0] != IGNORE)
    own[0, first] = guesses[first[: len(guesses)].nonzero()[:, 0]]
    own[0, ~first] = IGNORE
    _, _, wrong = answer_loss(model, batch | {"labels": own}, None)
    assert (wrong == 0).sum() == len(set(batch["answers"][0, first].tolist())) + sum(
        n not in batch["answers"][0, first] for n in range(len(batch["skills"]))
    )


@torch.no_grad()
def test_the_loss_is_the_mean_by_weight(model: Any, encoder: Encoder) -> None:
    batch = batch_of(encoder, "chat", "recall")
    learned = batch["labels"] != IGNORE
    parts = torch.rand(learned.shape) < 0.5
    losses = [answer_loss(model, batch | {"weights": part.float()}, None)[0] for part in (parts, ~parts)]
    shares = [(part & learned).sum() for part in (parts, ~parts)]
    weighted = answer_loss(model, batch | {"weights": torch.where(parts, 3.0, 1.0)}, None)[0]
    whole = 3 * losses[0] * shares[0] + losses[1] * shares[1]
    torch.testing.assert_close(weighted, whole / (3 * shares[0] + shares[1]))


def test_the_checkpoint_has_the_familys_names(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = "mtp.layers.0."
    assert {name for name in names if name.startswith("mtp.")} == {
        "mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight",
        *(f"{layer}self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"{layer}mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")),
    }  # fmt: skip
    assert "lm_head.weight" not in names
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1


def known(before: list[list[int]], **columns: list[int]) -> torch.Tensor:
    """As `media.to_know` has it; -1 in all columns that aren't given."""
    found = torch.full((len(before), len(KNOWN)), -1)
    found[:, :2] = torch.tensor(before)
    for name, values in columns.items():
        found[:, list(KNOWN).index(name.replace("_", " "))] = torch.tensor(values)
    return found


@torch.no_grad()
def test_what_has_changed_counts_most_of_what_was_before() -> None:
    heads = VisionHeads(16)
    for param in (*heads.before.parameters(), heads.changed.bias, *heads.known.parameters()):
        torch.nn.init.zeros_(param)
    torch.nn.init.ones_(heads.changed.weight)
    colors, shapes = len(COLORS) + 1, len(SHAPES) + 1
    now = torch.tensor([[1, 1], [1, 1], [0, 0], [2, 2]])
    before = known([[1, 1], [2, 1], [0, 0], [-1, -1]])
    heads.before.bias[2] = heads.before.bias[colors + 1] = 1.0  # guesses colour 2 and shape 1 everywhere
    loss, shown = heads.compared(torch.zeros(4, 16), torch.zeros(4, 16), before, now)
    assert (shown["before"], shown["changed"]) == (1.0, 0.0)
    others = [math.log(math.e + count - 1) for count in (colors, shapes)]
    wrong, right = others, [each - 1 for each in others]
    unchanged, changed, empty = wrong[0] + right[1], sum(right), sum(wrong)
    # The decoder's second half knows nothing of it, of as many colours and shapes.
    expected = (unchanged + 3 * changed + 0.1 * empty) / 4.1 + 0.4 * (math.log(colors) + math.log(shapes))
    assert loss.item() == pytest.approx(expected + math.log(2))  # whether it has changed is an even guess
    late = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 16)
    loss, shown = heads.compared(torch.zeros(4, 16), late, before, now)
    assert (shown["before"], shown["changed"]) == (1.0, 1.0)
    assert loss.item() == pytest.approx(expected + math.log(1 + math.exp(-16)))
    # Where nothing was before, nothing has changed.
    loss, shown = heads.compared(torch.zeros(4, 16), late, torch.full_like(before, -1), now)
    assert (shown["before"].isnan(), shown["changed"].isnan()) == (True, True)
    assert loss.item() == pytest.approx((1 * 16 + 2.1 * math.log(1 + math.exp(-16))) / 3.1)


@torch.no_grad()
def test_times_numbers_and_counts_are_asked_for_where_there_are_any() -> None:
    """Each adds its cross-entropy over the tokens that have it; those of what has changed count three times."""
    heads = VisionHeads(16)
    for param in heads.parameters():
        torch.nn.init.zeros_(param)
    late = torch.zeros(2, 16)
    late[1, 0] = 1.0
    first = dict(zip(KNOWN, itertools.accumulate(KNOWN.values(), initial=0), strict=False))
    # The second token, which has changed, says 12.3 seconds; both say that two media came before theirs.
    for name, digit in (("tens of seconds", 1), ("seconds", 2), ("tenths of seconds", 3)):
        heads.known.weight[first[name] + digit, 0] = 2.0
    heads.known.bias[first["medium"] + 2] = 1.0
    now, before = torch.tensor([[1, 1], [2, 1]]), [[1, 1], [1, 1]]
    times = {"tens_of_seconds": [1, 1], "seconds": [2, 2], "tenths_of_seconds": [3, 3]}
    none = heads.compared(late, late, known(before), now)[0]
    loss, shown = heads.compared(late, late, known(before, **times), now)
    assert (shown["timed"], shown["medium"], shown["counted"].isnan()) == (1.0, 0.0, True)
    right = math.log(math.exp(2) + 9) - 2
    assert (loss - none).item() == pytest.approx(3 * 0.4 * (math.log(10) + 3 * right) / 4, rel=1e-5)
    shown = heads.compared(late, late, known(before, **times | {"tenths_of_seconds": [3, 4]}), now)[1]
    assert shown["timed"] == 0.0  # a time is right as a whole
    loss, shown = heads.compared(late, late, known(before, medium=[2, 1]), now)
    assert (shown["medium"], shown["timed"].isnan()) == (0.5, True)
    count = KNOWN["medium"]
    other = math.log(math.e + count - 1)
    assert (loss - none).item() == pytest.approx(0.4 * (other - 1 + 3 * other) / 4, rel=1e-5)
    counts = {"so_far": [0, -1], "so_far_of_its_color": [0, -1], "so_far_of_its_shape": [0, -1]}
    assert heads.compared(late, late, known(before, **counts), now)[1]["counted"] == 1.0
    counts["so_far"] = [1, -1]
    assert heads.compared(late, late, known(before, **counts), now)[1]["counted"] == 0.0


def test_heads_that_do_not_teach_learn_all_the_same() -> None:
    heads = VisionHeads(16)
    heads.teach = False
    tokens, early, late = (torch.ones(2, 16, requires_grad=True) for _ in range(3))
    targets = torch.zeros(2, len(CLASSES), dtype=torch.long)
    now = torch.tensor([[1, 1], [2, 1]])
    before = known(now.flip(0).tolist())
    loss = heads(tokens, targets, torch.zeros(2, 4))[0] + heads.compared(early, late, before, now)[0]
    loss.backward()
    assert all(param.grad is not None and param.grad.abs().max() > 0 for param in heads.parameters())
    assert tokens.grad is early.grad is late.grad is None


def test_what_was_before_teaches_the_decoders_first_half(model: Any, encoder: Encoder) -> None:
    """Its loss reaches every layer up to the first of full attention (here the last one), and nothing after it."""
    batch = batch_of(encoder, "difference", "clip")
    heads = VisionHeads(model.lm_head.in_features)
    tokens = vision_tokens(model, batch["pixels"], batch["grids"])
    losses = [answer_loss(model, batch, tokens, heads=each)[0] for each in (heads, None)]
    (losses[0] - losses[1]).backward()
    decoder = model.model.language_model
    reached = [layer.mlp.down_proj.weight.grad.abs().max().item() for layer in decoder.layers]
    assert min(reached) > 1e3 * decoder.norm.weight.grad.abs().max().item()
    assert min(reached) > 1e-6
    model.zero_grad(set_to_none=True)


def test_what_has_changed_is_told_before_the_last_layer_of_full_attention(model: Any, encoder: Encoder) -> None:
    batch = batch_of(encoder, "difference", "clip")
    heads = VisionHeads(model.lm_head.in_features)
    torch.nn.init.zeros_(heads.before.weight)  # passes nothing on
    tokens = vision_tokens(model, batch["pixels"], batch["grids"])
    losses = [answer_loss(model, batch, tokens, heads=each)[0] for each in (heads, None)]
    (losses[0] - losses[1]).backward()
    *reached, last = [layer.mlp.down_proj.weight.grad.abs().max().item() for layer in model.model.language_model.layers]
    assert hasattr(model.model.language_model.layers[-1], "self_attn")
    assert min(reached) > 1e3 * last
    assert min(reached) > 1e-6
    model.zero_grad(set_to_none=True)
