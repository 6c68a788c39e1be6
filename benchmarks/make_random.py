"""Writes a random checkpoint of a real size in the real layout, for benchmarks without a download.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B --dtype bfloat16 --seed 0

Sizes are those of the family's table. The tokenizer, the chat template and the processors are the bundled demo
model's, and so are the special tokens' ids; the vocabulary has its real size. One shard is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import ROOT
from qwen35mm.checkpoints.shards import INDEX_FILE
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, Target, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.load import DTYPES
from qwen35mm.tokenizer import Tokenizer

DEMO = ROOT / "assets" / "demo"
SHARD_BYTES = 1 << 30

# hidden, layers, query heads, KV heads, GDN value heads, FFN width (of an expert), vision depth, width, heads, FFN
SIZES: dict[str, tuple[int, ...]] = {
    "0.8B": (1024, 24, 8, 2, 16, 3584, 12, 768, 12, 3072),
    "2B": (2048, 24, 8, 2, 16, 6144, 24, 1024, 16, 4096),
    "4B": (2560, 32, 16, 4, 32, 9216, 24, 1024, 16, 4096),
    "9B": (4096, 32, 16, 4, 32, 12288, 27, 1152, 16, 4304),
    "27B": (5120, 64, 24, 4, 48, 17408, 27, 1152, 16, 4304),
    "35B-A3B": (2048, 40, 16, 2, 32, 512, 27, 1152, 16, 4304),
}
TIED = ("0.8B", "2B", "4B")
EXPERTS, EXPERTS_PER_TOKEN = 256, 8


def make_config(size: str, dtype: str) -> dict[str, Any]:
    """The config.json of a size, with the demo tokenizer's ids."""
    hidden, layers, heads, kv_heads, value_heads, ffn, depth, width, vision_heads, vision_ffn = SIZES[size]
    demo = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    is_moe, tied = size.endswith("A3B"), size in TIED
    text: dict[str, Any] = {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": dtype,
        "eos_token_id": demo["eos_token_id"],
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text" if is_moe else "qwen3_5_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": 248320,
    }
    if is_moe:
        text |= {
            "moe_intermediate_size": ffn,
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "shared_expert_intermediate_size": ffn,
        }
    else:
        text["intermediate_size"] = ffn
    model_type = "qwen3_5_moe" if is_moe else "qwen3_5"
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if is_moe else "Qwen3_5ForConditionalGeneration"],
        "dtype": dtype,
        "eos_token_id": demo["eos_token_id"],
        "image_token_id": demo["image_token_id"],
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": tied,
        "video_token_id": demo["video_token_id"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "intermediate_size": vision_ffn,
            "model_type": f"{model_type}_vision",
            "num_heads": vision_heads,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": demo["vision_end_token_id"],
        "vision_start_token_id": demo["vision_start_token_id"],
    }


def random_tensor(target: Target, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of a trained model's kind: decays of 0.94 to 0.997, matrices of 1 / sqrt(fan_in), norms near one."""
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
        return (
            values.uniform_(0.6, 1.4, generator=generator) if plain else values.uniform_(-0.4, 0.4, generator=generator)
        )
    if name.endswith("bias"):
        return values.normal_(0, 0.1, generator=generator)
    fan_in = math.prod(target.shape[1:]) if len(target.shape) != 3 else math.prod(target.shape[2:])
    return values.normal_(0, fan_in**-0.5, generator=generator)


def favour_digits(head: torch.Tensor) -> None:
    """Changes an output head, [ids, hidden], so that digits are the likeliest tokens whatever stands before them.

    Most ids of a random checkpoint have no text, and servers have nothing to send then. Each digit is one token, and
    text of digits has the same tokens when it comes back in the next turn's prompt.
    """
    ids = Tokenizer.from_pretrained(DEMO).encode_plain("0123456789")
    some = head[ids[:5]].clone()
    # Not zero: with tied embeddings these are the prompt's values, too, which are normed first.
    head.mul_(0.01)
    head[ids[:5]], head[ids[5:]] = some, -some


def shards(targets: list[Target], itemsize: int) -> Iterator[list[Target]]:
    """Cuts the tensors into groups of about SHARD_BYTES."""
    group: list[Target] = []
    for target in targets:
        group.append(target)
        if sum(member.numel for member in group) * itemsize >= SHARD_BYTES:
            yield group
            group = []
    if group:
        yield group


def write(size: str, out: Path, dtype: str, seed: int, *, digits: bool = False) -> int:
    """Writes the checkpoint; returns the number of its parameters. With `digits`, see `favour_digits`."""
    data = make_config(size, dtype)
    config = ModelConfig.from_dict(data)
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    groups = list(shards(targets, DTYPES[dtype].itemsize))
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
    # Last: it says that all is there.
    (out / "config.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
    return num_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.8B")
    parser.add_argument("--out", type=Path, required=True, help="a folder that doesn't exist yet, or is empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digits", action="store_true", help="one that writes digits, for servers' benchmarks")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty")
    count = write(arguments.size, arguments.out, arguments.dtype, arguments.seed, digits=arguments.digits)
    print(f"{arguments.out}: {arguments.size}, {count / 1e9:.2f} billion parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
