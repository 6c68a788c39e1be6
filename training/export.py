"""Writes a checkpoint in the Hugging Face layout: configs, tokenizer, template and bf16 safetensors.

A training that still runs: `python -m training.export --work build/demo-training --out /tmp/demo`. The mean of two
checkpoints, one trained on from the other, is often better than both: `--mean DIR DIR --out /tmp/demo`.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForConditionalGeneration

from training.model import MAX_POSITIONS, demo_config, new_model
from training.tokenizer import save_tokenizer, token_ids

MAX_BYTES = 16 * 2**20

# A picture becomes 64 (as the family has it) to 256 tokens, a clip at most 192 and 16 temporal patches.
IMAGE_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 64 * 1024, "longest_edge": 256 * 1024},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEO_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 96 * 2048, "longest_edge": 192 * 2048},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fps": 2,
    "min_frames": 4,
    "max_frames": 32,
    "cap_pixels_per_frame": False,
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def export(model: Qwen3_5ForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes everything but the model card to `folder`; raises ValueError where it would pass 16 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded: Any = copy.deepcopy(model)
    rounded.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    ids = token_ids(tokenizer)
    generation = {
        "do_sample": False,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    save_json(folder / "generation_config.json", generation)
    save_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR)
    save_json(folder / "video_preprocessor_config.json", VIDEO_PROCESSOR)
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), folder / "chat_template.jinja")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} holds {size} bytes; at most {MAX_BYTES} are allowed: make the model smaller")


def export_state(state_path: Path, folder: Path) -> None:
    """Exports what a running or stopped training saved last."""
    state = torch.load(state_path, map_location="cpu", weights_only=True)
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    model = new_model(demo_config(token_ids(tokenizer), tokenizer.get_vocab_size()), seed=0)  # with its MTP layer
    model.load_state_dict(state["model"])
    export(model, tokenizer, folder)


def export_mean(folders: list[Path], folder: Path) -> None:
    """Exports the mean of the weights of exported checkpoints.

    Raises:
        ValueError: they have other vocabularies, or aren't what `read_weights` takes.
    """
    texts = [(each / "tokenizer.json").read_text() for each in folders]
    if len({*texts}) > 1:
        raise ValueError(f"The tokenizers in {', '.join(map(str, folders))} differ: a mean needs one vocabulary.")
    tokenizer = Tokenizer.from_str(texts[0])
    model = new_model(demo_config(token_ids(tokenizer), tokenizer.get_vocab_size()), seed=0)
    means = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    for each in folders:
        read_weights(model, each)
        for name, weight in model.state_dict().items():
            means[name] += weight / len(folders)
    model.load_state_dict(means)
    export(model, tokenizer, folder)


def read_weights(model: Qwen3_5ForConditionalGeneration, folder: Path) -> None:
    """Fills a model with the weights of an exported checkpoint.

    Raises:
        ValueError: they are another architecture's, or some are missing.
    """
    weights = load_file(folder / "model.safetensors")
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"The weights in {folder} don't fit the model that is trained: {error}") from error
    missing = sorted({*found.missing_keys} - {"lm_head.weight"})  # the embedding's, too
    if missing or found.unexpected_keys:
        raise ValueError(
            f"The weights in {folder} aren't those of the model that is trained: {missing} are missing, "
            f"{sorted(found.unexpected_keys)} are too many. Take a checkpoint that this training exported."
        )


def save_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo-training"), help="where the training's state is")
    parser.add_argument(
        "--mean", type=Path, nargs="+", metavar="DIR", help="checkpoints, instead of a training's state"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.mean:
        export_mean(arguments.mean, arguments.out)
    else:
        export_state(arguments.work / "state.pt", arguments.out)
