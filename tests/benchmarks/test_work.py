"""What a model has to do, against sums by hand from the sizes of the family, and against a checkpoint's own tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from benchmarks.make_random import make_config
from benchmarks.work import (
    cache_bytes,
    prefill_flops,
    product_shapes,
    vision_flops,
    vision_shapes,
    weight_bytes,
)
from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.tensor_names import IGNORED_PREFIXES
from qwen35mm.config import ModelConfig

# As llama-bench counts the parameters of its GGUF.
NUM_PARAMETERS = 752_393_024


def config_of(size: str) -> ModelConfig:
    return ModelConfig.from_dict(make_config(size, "bfloat16"))


def test_products_are_stacked_by_their_input() -> None:
    assert product_shapes(config_of("0.8B")) == {
        (2 * 16 * 128 + 2 * 16 * 128 + 2 * 16, 1024): 18,  # q, k; v, z; b, a
        (1024, 2048): 18 + 6,  # both mixers' last product
        (2 * 8 * 256 + 2 * 2 * 256, 1024): 6,  # queries and gates; keys and values
        (2 * 3584, 1024): 24,
        (1024, 3584): 24,
    }


def test_experts_count_as_often_as_they_are_chosen() -> None:
    shapes = product_shapes(config_of("35B-A3B"))
    # The shared expert has the width of the others.
    assert (shapes[2 * 512, 2048], shapes[2048, 512]) == (40 * 9, 40 * 9)
    assert (shapes[256, 2048], shapes[1, 2048]) == (40, 40)


def test_operations_of_a_prompt() -> None:
    weights = 497_614_848  # the sum of the shapes above
    conv, state, head = 18 * 6144 * 4, 18 * 16 * 128 * 128, 248_320 * 1024
    for length, num_pairs in ((1, 1), (512, 131_328)):
        attention = 6 * 8 * 256 * num_pairs
        operations = length * (2 * weights + 2 * conv + 7 * state) + 4 * attention + 2 * head
        assert prefill_flops(config_of("0.8B"), length) == operations


def test_bytes_that_a_token_reads() -> None:
    config = config_of("0.8B")
    assert weight_bytes(config, torch.bfloat16) == 2 * NUM_PARAMETERS, "the embedding table is the head"
    state, conv = 18 * 16 * 128 * 128 * 4, 18 * 6144 * 3
    assert cache_bytes(config, 100.5, torch.float16, torch.float32) == state + 4 * conv + 100.5 * 12 * 1024
    assert cache_bytes(config, 0, torch.bfloat16, torch.bfloat16) == state + 2 * conv


def test_an_embedding_table_beside_a_head_is_not_read() -> None:
    parameters = weight_bytes(config_of("9B"), torch.float32) / 4
    assert parameters == pytest.approx(9.4e9 - 0.46e9 - 248_320 * 4096, rel=0.02), "all but the tower and the table"


def test_of_experts_those_that_are_chosen_are_read() -> None:
    read = weight_bytes(config_of("35B-A3B"), torch.bfloat16) / 2
    assert read == pytest.approx(2.95e9, rel=0.01), "the A3B of its name"


def test_the_bundled_checkpoint_has_so_many_bytes() -> None:
    with safe_open(demo_model_path() / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".visual." not in name]  # noqa: SIM118
        tensors = [file.get_tensor(name) for name in names if not name.startswith(IGNORED_PREFIXES)]
    config = ModelConfig.from_pretrained(demo_model_path())
    assert weight_bytes(config, torch.bfloat16) == sum(2 * tensor.numel() for tensor in tensors)


def test_operations_of_a_picture() -> None:
    config = config_of("0.8B")
    patches, width, inner = 64 * 64, 768, 3072
    block = 4 * width * width + 2 * width * inner
    linear = patches * (1536 * width + 12 * block) + patches // 4 * (3072 * 3072 + 3072 * 1024)
    attention = 12 * 2 * patches * patches * width
    assert vision_flops(config, 64, 64) == 2 * (linear + attention)
    shapes = {shape: count for shape, count in vision_shapes(config).items() if shape[1] != 1536}
    assert sum(rows * columns * count for (rows, columns), count in shapes.items()) == 12 * block
