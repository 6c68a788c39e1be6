"""Models that can be downloaded: what they take is what their shapes say, and whether that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.checkpoints.tensor_names import checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.weights import weights_bytes
from qwen35mm.model_library import HUB_MODELS, HubModel
from qwen35mm.model_library.installed import find_model
from tests.model_library.test_switch import Make, make, other

__all__ = ["make", "other"]

GIB = 1 << 30


@pytest.mark.parametrize("model", HUB_MODELS, ids=lambda model: model.hub_id)
def test_sizes_are_those_of_the_shapes(model: HubModel) -> None:
    config = ModelConfig.from_dict(make_config(model.hub_id.removeprefix("Qwen/Qwen3.5-"), "bfloat16"))
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    stored = {target.name: target for target in targets}
    sizes = {name: weights_bytes(stored, torch.bfloat16, None if name == "bf16" else name) for name in ("bf16", "int8")}
    assert {name: model.weights_bytes[name] for name in sizes} == sizes
    assert model.weights_bytes["int4"] == weights_bytes(stored, torch.bfloat16, "int4")
    text = config.text
    num_attention = text.layer_types.count("full_attention")
    assert model.kv_token_bytes == 2 * 2 * num_attention * text.num_key_value_heads * text.head_dim


def test_the_readmes_table_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    from benchmarks import ROOT, weights_memory

    weights_memory.main()
    _, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    readme = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text("utf-8").splitlines()]
    known = {cells[0]: cells[3] for cells in readme if len(cells) == 5}
    assert len(rows) == 9
    assert {name: " / ".join(sizes) for name, *sizes in rows}.items() <= known.items()


async def test_what_fits_is_told_before_it_is_downloaded(make: Make, other: Path) -> None:
    small, middle, *_ = HUB_MODELS
    switch = make()
    for free_gib, formats, suggestion in (
        (100, ("bf16", "bf16"), middle),
        (3, ("bf16", "int8"), middle),
        (2.2, ("bf16", "int4"), middle),
        (1, ("int8", None), small),
        (0.01, (None, None), None),
    ):
        switch._available = lambda _, free_gib=free_gib: int(free_gib * GIB)
        assert (switch.format_that_fits(small), switch.format_that_fits(middle)) == formats
        assert switch.suggestion() is suggestion
    assert switch.format_that_fits(HUB_MODELS[-1]) is None
    reason = switch.refusal(replace(find_model(other), usable=False, reason="It is damaged."))
    assert str(reason) == "'other' can't be used: It is damaged."
    assert switch.refusal(find_model(other)) is None
    switch._available = lambda _: -GIB
    assert "other doesn't fit" in str(switch.refusal(find_model(other)))
