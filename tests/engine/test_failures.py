"""What a person is told when the model fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.safetensors_files import DTYPES, read_headers
from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.engine import Engine
from qwen35mm.engine.request import damage, engine_error
from qwen35mm.errors import EngineError
from qwen35mm.model import load
from qwen35mm_preprocess.say import english
from tests.engine.exact import Chat, user

CPU = torch.device("cpu")


def test_our_own_errors_stay_as_they_are() -> None:
    error = EngineError("in words")
    assert engine_error(error, CPU) is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_every_kind_of_a_shortage_is_told_as_one(error: Exception) -> None:
    assert str(engine_error(error, CPU)).startswith("Memory ran out while this was computed.")


def test_a_card_that_failed_needs_another_start() -> None:
    message = str(engine_error(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), CPU))
    assert "until it is started again" in message
    assert "illegal" not in message


def test_others_are_named_without_their_words() -> None:
    message = str(engine_error(KeyError("a secret"), CPU))
    assert "KeyError" in message
    assert "secret" not in message


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_damaged_weights_are_named(weights: str, tmp_path: Path) -> None:
    """Values that are no numbers would choose a token without a word."""
    folder = tmp_path / "damaged"
    shutil.copytree(demo_model_path(), folder)
    (shard,) = find_shards(folder)
    stored = next(
        each for each in read_headers([shard]).values() if each.name.endswith("layers.3.mlp.down_proj.weight")
    )
    with shard.open("r+b") as file:
        file.seek(stored.start)
        file.write(torch.full((1,), torch.nan, dtype=DTYPES[stored.dtype]).view(torch.uint8).numpy().tobytes())
    loaded = load(folder, weights=weights)
    engine = Engine(loaded)
    request = Chat(loaded).request([user("hello")])
    engine.add(request)
    (event,) = [output.event for _ in range(40) for output in engine.step() if isinstance(output.event, Exception)]
    assert isinstance(event, EngineError)
    assert str(event) == (
        f"The model computed values that are not finite. Weights of damaged are damaged: {stored.name}. "
        "Download it again."
    )
    engine.check_integrity()


def test_a_checkpoint_that_is_whole_or_gone_is_not_called_damaged(tmp_path: Path) -> None:
    assert "Its weights are finite" in english(damage(demo_model_path(), None))
    assert "can't be read" in english(damage(tmp_path, None))
