"""Writes a random checkpoint of a real size and layout, for benchmarks without a download.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B --dtype bfloat16 --seed 0

Tokenizer, chat template, processors and ids of special tokens are the bundled model's. The vocabulary has its real
size. Keeps one shard in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import ROOT
from qwen35mm.checkpoints.shards import INDEX_FILE
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, Target, checkpoint_targets, mtp_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.load import DTYPES
from qwen35mm.model_library.catalogue import SIZES, family_config
from qwen35mm.tokenizer import Tokenizer

DEMO = ROOT / "assets" / "demo"
SHARD_BYTES = 1 << 30


def make_config(size: str, dtype: str) -> dict[str, Any]:
    """The config.json of a size, with the ids of the bundled tokenizer."""
    demo = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    config = family_config(size, dtype)
    config["text_config"]["eos_token_id"] = demo["eos_token_id"]
    return config | {name: value for name, value in demo.items() if name.endswith("_token_id") and name[:3] != "pad"}


def random_tensor(target: Target, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values like those of trained models: decays of 0.94 to 0.997, matrices of 1 / sqrt(fan_in), norms near one."""
    name = target.name
    values = torch.empty(target.shape, dtype=dtype)
    if name.endswith("A_log"):
        return values.uniform_(-0.3, 0.3, generator=generator)
    if name.endswith("dt_bias"):
        # softplus of this is log-uniform between 0.003 and 0.06.
        step = torch.empty(target.shape).uniform_(-5.8, -2.8, generator=generator).exp()
        return torch.expm1(step).log().to(dtype)
    if "conv1d" in name:
        return values.uniform_(-0.5, 0.5, generator=generator)
    if "norm" in name and name.endswith("weight"):
        plain = "linear_attn.norm" in name or ".visual." in name
        return values.uniform_(0.6 if plain else -0.4, 1.4 if plain else 0.4, generator=generator)
    if name.endswith("bias"):
        return values.normal_(0, 0.1, generator=generator)
    fan_in = math.prod(target.shape[1:]) if len(target.shape) != 3 else math.prod(target.shape[2:])
    return values.normal_(0, fan_in**-0.5, generator=generator)


def favour_digits(head: torch.Tensor) -> None:
    """Changes an output head, [ids, hidden], so that digits are always the most likely tokens.

    Most ids of a random checkpoint have no text, so servers would have nothing to send. Text of digits keeps its
    tokens when it comes back in the next prompt.
    """
    ids = Tokenizer.from_pretrained(DEMO).encode_plain("0123456789")
    some = head[ids[:5]].clone()
    # Not zero: with tied embeddings these rows also embed the prompt, and a norm divides by their size.
    head.mul_(0.01)
    head[ids[:5]], head[ids[5:]] = some, -some


def write(size: str, out: Path, dtype: str, seed: int, *, digits: bool = False) -> int:
    """Writes the checkpoint; returns its number of parameters. For `digits` see `favour_digits`."""
    data = make_config(size, dtype)
    config = ModelConfig.from_dict(data)
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    targets += mtp_targets(config.text, split_experts=False)
    groups: list[list[Target]] = [[]]
    for target in targets:
        groups[-1].append(target)
        if sum(member.numel for member in groups[-1]) * DTYPES[dtype].itemsize >= SHARD_BYTES:
            groups.append([])
    groups = [group for group in groups if group]
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {target.name: random_tensor(target, DTYPES[dtype], generator) for target in group}
        if digits and (head := EMBEDDING if config.tie_word_embeddings else LM_HEAD) in tensors:
            favour_digits(tensors[head])
        save_file(tensors, out / name, {"format": "pt"})
        weight_map |= dict.fromkeys((target.name for target in group), name)
        print(f"{name}: {len(group)} tensors", file=sys.stderr, flush=True)
    num_parameters = sum(target.numel for target in targets)
    metadata = {"total_size": num_parameters * DTYPES[dtype].itemsize}
    index = {"metadata": metadata, "weight_map": weight_map}
    (out / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for path in DEMO.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, out)
    # Last, because this file completes the checkpoint.
    (out / "config.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
    return num_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.8B")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digits", action="store_true", help="make it write digits, for `serving`")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty")
    count = write(arguments.size, arguments.out, arguments.dtype, arguments.seed, digits=arguments.digits)
    print(f"{arguments.out}: {arguments.size}, {count / 1e9:.2f} billion parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
