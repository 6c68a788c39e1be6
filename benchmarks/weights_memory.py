"""What the family's models take in memory by how their checkpoints are stored, without any file: by their shapes alone.

    python -m benchmarks.weights_memory

Headers as each format has them go through the product's own reader and its own count, `weights_bytes`. Matrices of
layers are quantised, and in GGUF files embeddings and head, too; contexts and caches come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

from benchmarks.make_random import make_config
from qwen35mm.checkpoints.gguf_files import GgufTensor
from qwen35mm.checkpoints.gguf_sources import GgufSource
from qwen35mm.checkpoints.quantised import read_sources
from qwen35mm.checkpoints.safetensors_files import StoredTensor
from qwen35mm.checkpoints.sources import Source
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, TEXT_PREFIX, Target, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.weight_formats import AS_STORED
from qwen35mm.model.weights import weights_bytes

SIZES = ("0.8B", "4B", "9B")
GROUP = 128
Stored = Mapping[str, Source | Target]


def main() -> None:
    models = [_targets(size) for size in SIZES]
    rows: dict[str, tuple[str | None, list[Stored]]] = {
        "bf16": (None, [_plain(each) for each in models]),
        "bf16, `--weights int8`": ("int8", [_plain(each) for each in models]),
        "bf16, `--weights int4`": ("int4", [_plain(each) for each in models]),
        "FP8": (AS_STORED, [_safetensors(each, "fp8") for each in models]),
        "GPTQ, AWQ, 4 bits": (AS_STORED, [_safetensors(each, "awq") for each in models]),
        "GPTQ, 8 bits": (AS_STORED, [_safetensors(each, "gptq") for each in models]),
        **{f"GGUF, {kind}": (AS_STORED, [_gguf(each, kind) for each in models]) for kind in ("Q8_0", "Q4_0", "Q4_K")},
    }
    print("| stored as |", " | ".join(SIZES), "|")
    print("|---" * (len(SIZES) + 1) + "|")
    for name, (integers, stored) in rows.items():
        sizes = [f"{weights_bytes(each, torch.bfloat16, integers) / 1e9:.1f}" for each in stored]
        print(f"| {name} |", " | ".join(sizes), "|")


def _targets(size: str) -> list[Target]:
    config = ModelConfig.from_dict(make_config(size, "bfloat16"))
    return checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)


def _plain(targets: Iterable[Target]) -> Stored:
    return {target.name: target for target in targets}


def _is_matrix(name: str) -> bool:
    last = name.removesuffix(".weight").rpartition(".")[2]
    return name.startswith(TEXT_PREFIX) and (last.endswith("_proj") or last in ("in_proj_qkv", "in_proj_z"))


def _safetensors(targets: Iterable[Target], method: str) -> Stored:
    found: dict[str, StoredTensor] = {}

    def put(name: str, dtype: str, *shape: int) -> None:
        found[name] = StoredTensor(name, Path("model.safetensors"), dtype, shape, 0, 0)

    for target in targets:
        module = target.name.removesuffix(".weight")
        if not _is_matrix(target.name):
            put(target.name, "BF16", *target.shape)
            continue
        out, width = target.shape
        if method == "fp8":
            put(target.name, "F8_E4M3", out, width)
            put(f"{target.name}_scale_inv", "F32", -(-out // GROUP), -(-width // GROUP))
            continue
        bits = 4 if method == "awq" else 8
        words = (width, out * bits // 32) if method == "awq" else (width * bits // 32, out)
        put(f"{module}.qweight", "I32", *words)
        put(f"{module}.qzeros", "I32", width // GROUP, out * bits // 32)
        put(f"{module}.scales", "F16", width // GROUP, out)
    configs: dict[str, dict[str, Any]] = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
        "awq": {"quant_method": "awq", "bits": 4},
        "gptq": {"quant_method": "gptq", "bits": 8},
    }
    return read_sources(found, configs[method])


def _gguf(targets: Iterable[Target], kind: str) -> Stored:
    type_ = gguf.GGMLQuantizationType[kind]
    found: dict[str, Source | Target] = {}
    for target in targets:
        found[target.name] = target
        if _is_matrix(target.name) or target.name in (EMBEDDING, LM_HEAD):
            stored = StoredTensor(target.name, Path("model.gguf"), kind, target.shape, 0, 0)
            found[target.name] = GgufSource(target.name, target.shape, {"": stored}, (GgufTensor(stored, type_),))
    return found


if __name__ == "__main__":
    main()
