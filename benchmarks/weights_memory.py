"""The memory of the family's weights by checkpoint format, computed from shapes. The table is in docs/models.md.

    python -m benchmarks.weights_memory

Made-up headers of each format go through the product's reader and its own `weights_bytes`. The layers' matrices are
quantised, in GGUF files also the embeddings and the head. Contexts and caches come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import torch

from benchmarks.frame import parse, parser, report
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
METHODS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 8},
}


def stored_as(format: str, targets: Iterable[Target]) -> Mapping[str, Source | Target]:
    """The tensors of a checkpoint in a format: "bf16", a key of `METHODS`, or a GGUF type."""
    if format == "bf16":
        return {target.name: target for target in targets}
    found: dict[str, StoredTensor] = {}
    sources: dict[str, Source | Target] = {}

    def put(name: str, dtype: str, *shape: int) -> StoredTensor:
        found[name] = StoredTensor(name, Path("model"), dtype, shape, 0, 0)
        return found[name]

    for target in targets:
        name, module = target.name, target.name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        is_matrix = name.startswith(TEXT_PREFIX) and (last.endswith("_proj") or last in ("in_proj_qkv", "in_proj_z"))
        if format not in METHODS:
            sources[name] = target
            if is_matrix or name in (EMBEDDING, LM_HEAD):
                tensor = GgufTensor(put(name, format, *target.shape), gguf.GGMLQuantizationType[format])
                sources[name] = GgufSource(name, target.shape, {"": tensor.stored}, (tensor,))
        elif not is_matrix:
            put(name, "BF16", *target.shape)
        else:
            out, width = target.shape
            if format == "fp8":
                put(name, "F8_E4M3", out, width)
                put(f"{name}_scale_inv", "F32", -(-out // GROUP), -(-width // GROUP))
            else:
                bits = METHODS[format]["bits"]
                words = (width, out * bits // 32) if format == "awq" else (width * bits // 32, out)
                put(f"{module}.qweight", "I32", *words)
                put(f"{module}.qzeros", "I32", width // GROUP, out * bits // 32)
                put(f"{module}.scales", "F16", width // GROUP, out)
    return read_sources(found, METHODS[format]) if format in METHODS else sources


def main() -> None:
    arguments = parse(parser(__doc__, model=False, repeats=None))
    formats = {"bf16": ("bf16", None), "bf16, `--weights int8`": ("bf16", "int8")}
    formats |= {"bf16, `--weights int4`": ("bf16", "int4"), "bf16, `--weights fp8`": ("bf16", "fp8")}
    formats |= {"FP8": ("fp8", AS_STORED)}
    formats |= {"GPTQ, AWQ, 4 bits": ("awq", AS_STORED), "GPTQ, 8 bits": ("gptq", AS_STORED)}
    formats |= {f"GGUF, {kind}": (kind, AS_STORED) for kind in ("Q8_0", "Q4_0", "Q4_K")}
    configs = [ModelConfig.from_dict(make_config(size, "bfloat16")) for size in SIZES]
    models = [checkpoint_targets(c, separate_head=not c.tie_word_embeddings, split_experts=False) for c in configs]
    rows = []
    for title, (format, integers) in formats.items():
        sizes = [weights_bytes(stored_as(format, targets), torch.bfloat16, integers) for targets in models]
        rows.append({"stored as": title} | {n: f"{b / 1e9:.1f}" for n, b in zip(SIZES, sizes, strict=True)})
    report("weights_memory", arguments, {"GB": rows})


if __name__ == "__main__":
    main()
