"""Random checkpoints of the real sizes, which load here and in transformers; GGUFs by the converter that is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks import make_random
from benchmarks.make_gguf import CONVERTER, VENDORED
from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CachePools
from qwen35mm.checkpoints.tensor_names import checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.model.weights import load_model
from qwen35mm.tokenizer import Tokenizer
from tests.children import ROOT, environment


@pytest.mark.parametrize(
    ("size", "billions", "kib_per_token"),
    [("0.8B", 0.85, 12), ("2B", 2.2, 12), ("4B", 4.5, 32), ("9B", 9.4, 32), ("27B", 27.4, 64), ("35B-A3B", 35.1, 20)],
)
def test_sizes_are_those_of_the_family(size: str, billions: float, kib_per_token: int) -> None:
    config = ModelConfig.from_dict(make_random.make_config(size, "bfloat16"))
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    assert sum(target.numel for target in targets) / 1e9 == pytest.approx(billions, rel=0.02)
    assert config.kv_bytes_per_token(torch.bfloat16) == kib_per_token * 1024
    demo = json.loads((make_random.DEMO / "config.json").read_text())
    assert config.image_token_id == demo["image_token_id"]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("size", ["0.8B", "35B-A3B"])
def test_a_random_checkpoint_loads_everywhere(size: str, tmp_path: Path) -> None:
    files = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        (folder := tmp_path / name).mkdir()
        make_random.write(size, folder, "bfloat16", seed)
        files.append([path.read_bytes() for path in sorted(folder.glob("*.safetensors"))])
    assert files[0] == files[1] != files[2], "the seed decides"
    assert len(files[0]) > 2
    checkpoint = tmp_path / "one"
    config = ModelConfig.from_pretrained(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32)
    cache = CachePools(config, num_slots=1, num_tokens=64, dtype=torch.float32).new_sequence()
    cache.prepare(40)
    hidden = model(prefill_batch(cache, model.embed_tokens(torch.arange(40)), torch.arange(40).expand(3, -1)))
    logits = model.logits(hidden[-1:])
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    loaded: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    assert (checkpoint / "tokenizer.json").exists()
    assert (checkpoint / "chat_template.jinja").exists()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("size", ["0.8B", "9B"])
def test_with_digits_nothing_else_is_ever_the_likeliest(size: str, tmp_path: Path) -> None:
    make_random.write(size, tmp_path, "float32", seed=0, digits=True)
    config = ModelConfig.from_pretrained(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32)
    hidden = torch.randn(200, config.text.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens = model.logits(hidden).argmax(-1).tolist()
    assert set(tokens) == set(Tokenizer.from_pretrained(make_random.DEMO).encode_plain("0123456789"))


# What make_gguf needs of the real converter: its classes, what they raise, and its program's options.
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "its own"
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
"""
PROGRAM = """
import argparse
from pathlib import Path
import gguf
from conversion.base import TextModel

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile", type=Path)
parser.add_argument("--outtype")
parser.add_argument("--no-mtp", action="store_true")
options = parser.parse_args()
if __name__ == "__main__":
    names = [TextModel().get_vocab_base_pre(tokenizer) for tokenizer in ("known", "random")]
    values = [gguf.NAME, options.model, options.outtype, str(options.no_mtp), *names]
    options.outfile.write_text("\\n".join(values))
"""


def make_gguf(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.make_gguf", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("nested", [True, False])
def test_the_converter_gets_its_options_and_a_name_for_the_tokenizer(nested: bool, tmp_path: Path) -> None:
    """The converter is llama.cpp's own, or llama-cpp-python's, where it is nested."""
    folder = tmp_path / "source" / VENDORED if nested else tmp_path / "source"
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "__init__.py").touch()
    (folder / "conversion" / "base.py").write_text(BASE)
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text("NAME = 'of the package'")
    (folder / CONVERTER).write_text(PROGRAM)
    # Paths are relative to the folder in which it is called.
    done = make_gguf("source", demo_model_path(), "out.gguf", "--outtype", "f16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "out.gguf").read_text().splitlines()
    assert found == ["of the package", str(demo_model_path().resolve()), "f16", "True", "its own", "qwen35"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = make_gguf("nowhere", demo_model_path(), tmp_path / "out.gguf")
    assert done.returncode == 2
    assert "nowhere has no convert_hf_to_gguf.py" in done.stderr
