"""Makes a checkpoint folder for a GGUF file: writes its header as the small files of other checkpoints.

The folder lies in the user's cache and refers to the weight files, which stay where they are. It is made once for each
version of a file: the file's size and modification time are part of the folder's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwen35mm.checkpoints.gguf_files import GgufFile
from qwen35mm.checkpoints.other_programs import ollama_model_of
from qwen35mm.checkpoints.shards import GGUF_ARCHITECTURES, GGUF_NOTE, gguf_parts, gguf_stem, some
from qwen35mm.config import MEDIA_TOKENS
from qwen35mm.errors import CheckpointError
from qwen35mm.folders import user_folder
from qwen35mm_preprocess import ImageProcessing, VideoProcessing

_FORMAT = 3
# How to split a text into words, by `tokenizer.ggml.pre`; from the family's tokenizer.json files.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{letters}+|\p{N}"
    r"| ?[^\s{others}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "qwen2": _WORDS.replace("{letters}", r"\p{L}").replace("{others}", r"\p{L}"),
    "qwen35": _WORDS.replace("{letters}", r"[\p{L}\p{M}]").replace("{others}", r"\p{L}\p{M}"),
}
# llama.cpp's token types.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def gguf_folder(path: Path) -> Path:
    """The folder for a model in GGUF files.

    Args:
        path: the file with the text model, or the first of several. The vision tower's (`mmproj`) is searched beside
            it; without one the model is text-only.

    Raises:
        CheckpointError: a file is damaged, missing, or of another family.
        MissingExtraError: the package `gguf` isn't installed.
    """
    folder, paths = _place(path)
    if not folder.is_dir():
        _make(folder, [GgufFile(each) for each in paths])
    return folder


def _place(path: Path) -> tuple[Path, list[Path]]:
    texts = gguf_parts(path)
    tower = _tower(texts[0])
    paths = [*texts, *([] if tower is None else [tower])]
    looks = [f"{each.resolve()} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in paths]
    key = hashlib.sha256(json.dumps([_FORMAT, looks]).encode()).hexdigest()[:16]
    cache = user_folder("cache")
    if cache is None:
        raise CheckpointError("A GGUF file needs a folder for the files made from its header: set HOME.")
    return cache / "gguf" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', gguf_stem(texts[0]))}-{key}", paths


def _make(folder: Path, files: list[GgufFile]) -> None:
    text = files[0]
    if text.architecture not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{text.path.name} holds a model of the architecture {text.architecture!r}; only "
            f"{some(list(GGUF_ARCHITECTURES))} can be read. Use a Qwen3.5, 3.6 or 3.8 model."
        )
    tower = next((file for file in files if file.architecture == "clip"), None)
    tokens = text.values(str, "tokenizer.ggml.tokens")
    written: dict[str, Any] = {
        "config.json": config_of(text, tower, has_head=any("output.weight" in file.tensors for file in files)),
        "tokenizer.json": _tokenizer(text, tokens),
        "generation_config.json": {"eos_token_id": text.value(int, "tokenizer.ggml.eos_token_id"), **_sampling(text)},
        GGUF_NOTE: {"files": [str(file.path.absolute()) for file in files]},
    }
    if tower is not None:
        written["preprocessor_config.json"] = _processing(
            tower,
            tower.value(int, "clip.vision.image_min_pixels", ImageProcessing.min_pixels),
            tower.value(int, "clip.vision.image_max_pixels", ImageProcessing.max_pixels),
        )
        pixels = VideoProcessing.min_total_pixels, VideoProcessing.max_total_pixels
        written["video_preprocessor_config.json"] = _processing(tower, *pixels)
    part = folder.parent / f"{secrets.token_hex(8)}.part"
    part.mkdir(parents=True)
    for name, values in written.items():
        (part / name).write_text(json.dumps(values, ensure_ascii=False), "utf-8")
    (part / "chat_template.jinja").write_text(text.value(str, "tokenizer.chat_template"), "utf-8")
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not folder.is_dir():
            raise


def config_of(text: GgufFile, tower: GgufFile | None, *, has_head: bool = False) -> dict[str, Any]:
    """Converts a file's header to a config.json; raises CheckpointError.

    Args:
        tower: the file with the vision tower; None makes a text-only model.
        has_head: whether the output head has its own weights.
    """
    sizes = {
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "max_position_embeddings": "context_length",
    }
    is_moe = text.architecture.endswith("moe")
    experts = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    sizes |= experts if is_moe else {"intermediate_size": "feed_forward_length"}
    values: dict[str, Any] = {ours: _whole(text, theirs) for ours, theirs in sizes.items()}
    if _whole(text, "attention.value_length") != values["head_dim"]:
        raise CheckpointError(f"{text.path.name}: its keys and values differ in width, which Qwen3.5's don't.")
    num_mtp_layers = text.value(int, text.own("nextn_predict_layers"), 0)
    num_layers = _whole(text, "block_count") - num_mtp_layers
    sections = text.values(int, text.own("rope.dimension_sections"))[:3]
    rope = {
        **_rope_scaling(text),
        "rope_theta": _short(text.value(float, text.own("rope.freq_base"))),
        "partial_rotary_factor": _whole(text, "rope.dimension_count") / max(values["head_dim"], 1),
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    kind = "qwen3_5_moe" if is_moe else "qwen3_5"
    values |= {
        "model_type": f"{kind}_text",
        "vocab_size": text.tensors["token_embd.weight"].stored.shape[0] if "token_embd.weight" in text.tensors else 0,
        "num_hidden_layers": num_layers,
        "mtp_num_hidden_layers": num_mtp_layers,
        "linear_value_head_dim": _whole(text, "ssm.inner_size") // max(values["linear_num_value_heads"], 1),
        "layer_types": _layer_types(text, num_layers),
        "rms_norm_eps": _short(text.value(float, text.own("attention.layer_norm_rms_epsilon"))),
        "rope_parameters": rope,
        "hidden_act": "silu",
    }
    top = {"tie_word_embeddings": not has_head, "eos_token_id": text.value(int, "tokenizer.ggml.eos_token_id")}
    if tower is None:
        return values | top
    tokens = text.values(str, "tokenizer.ggml.tokens")
    ids = {name: tokens.index(token) for name, token in MEDIA_TOKENS.items() if token in tokens}
    return {"model_type": kind, "text_config": values, "vision_config": _vision(tower), **ids, **top}


def _rope_scaling(text: GgufFile) -> dict[str, Any]:
    """llama.cpp's context extension in config.json's form."""

    def number(key: str, default: float = 0.0) -> float:
        return _short(text.value(float, text.own(f"rope.scaling.{key}"), default))

    rope_type = text.value(str, text.own("rope.scaling.type"), "none")
    if rope_type == "none":
        return {"rope_type": "default"}
    # No file of the family has these, and transformers has nothing similar.
    foreign = {"yarn_ext_factor": (0.0, 1.0, -1.0), "yarn_attn_factor": (0.0, 1.0, -1.0), "yarn_log_multiplier": (0.0,)}
    for key, usual in foreign.items():
        if number(key) not in usual:
            raise CheckpointError(f"{text.path.name}: rope.scaling.{key} is {number(key):g}, which isn't supported.")
    factor = number("factor")
    found = {
        "factor": factor,
        "original_max_position_embeddings": text.value(int, text.own("rope.scaling.original_context_length"), 0),
        "beta_fast": number("yarn_beta_fast"),
        "beta_slow": number("yarn_beta_slow"),
        # llama.cpp multiplies YaRN's own factor by it.
        "attention_factor": number("attn_factor") * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    }
    return {"rope_type": rope_type, **{key: value for key, value in found.items() if value}}


def _vision(tower: GgufFile) -> dict[str, Any]:
    def whole(key: str) -> int:
        return tower.value(int, f"clip.vision.{key}")

    if any(tower.values(bool, "clip.vision.is_deepstack_layers", [])):
        raise CheckpointError(
            f"{tower.path.name} has a vision tower of another family: Qwen3.5's has no deepstack layers."
        )
    position = tower.tensors.get("v.position_embd.weight")
    return {
        "depth": whole("block_count"),
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_heads": whole("attention.head_count"),
        "in_channels": 3,
        "patch_size": whole("patch_size"),
        "temporal_patch_size": 2,
        "spatial_merge_size": whole("spatial_merge_size"),
        "num_position_embeddings": 0 if position is None else position.stored.shape[0],
        "out_hidden_size": whole("projection_dim"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _processing(tower: GgufFile, least: int, most: int) -> dict[str, Any]:
    """Settings for reading media. Few files have a picture's pixel limits, and none a video's."""
    mean, std = (tower.values(float, f"clip.vision.image_{what}") for what in ("mean", "std"))
    patch, merge = (tower.value(int, f"clip.vision.{what}") for what in ("patch_size", "spatial_merge_size"))
    size = {"shortest_edge": least, "longest_edge": most}
    sides = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": merge}
    return {**sides, "image_mean": mean, "image_std": std, "size": size}


def _layer_types(text: GgufFile, num_layers: int) -> list[str]:
    interval = text.value(int, text.own("full_attention_interval"), 4)
    if interval < 1 or not 0 < num_layers <= 1024:
        raise CheckpointError(
            f"{text.path.name}: {num_layers} layers with attention in each {interval}th can't exist. Download it again."
        )
    by_interval = [bool((index + 1) % interval) for index in range(num_layers)]
    recurrent = text.values(bool, text.own("attention.recurrent_layers"), by_interval)[:num_layers]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def _tokenizer(text: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """A tokenizer.json like that of the family's own checkpoints."""
    model, words = text.value(str, "tokenizer.ggml.model"), text.value(str, "tokenizer.ggml.pre")
    if model != "gpt2" or words not in _PATTERNS:
        raise CheckpointError(
            f"{text.path.name} has a tokenizer {model!r} with words {words!r}, and only gpt2 with "
            f"{some(list(_PATTERNS))} can be read. Use another file of the model."
        )
    kinds = text.values(int, "tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{text.path.name} has {len(tokens):,} tokens of {len(kinds):,} kinds: download it again."
        )
    controls = {index for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    vocab = {token: index for index, token in enumerate(tokens) if index not in controls and kinds[index] != _UNUSED}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": tokens[index], **flags, "special": bool(kinds[index] == _CONTROL)}
        for index in sorted(controls)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PATTERNS[words]}, "behavior": "Isolated", "invert": False}
    merges = [merge.split(" ", 1) for merge in text.values(str, "tokenizer.ggml.merges")]
    known = set(tokens)
    if len(known) != len(tokens) or not all(len(pair) == 2 and known.issuperset(pair) for pair in merges):
        raise CheckpointError(
            f"{text.path.name}: a token is listed twice, or a merge names an unknown token. Download it again."
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def _sampling(text: GgufFile) -> Mapping[str, Any]:
    """The sampling defaults, which newer files have."""
    names = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    found = {ours: text.value(float, f"general.sampling.{theirs}") for ours, theirs in names.items()
             if text.has(f"general.sampling.{theirs}")}  # fmt: skip
    return {"do_sample": True, **{name: _short(value) for name, value in found.items()}} if found else {}


def _tower(text: Path) -> Path | None:
    """The vision tower's file beside a text model's: the one whose name has most in common with it."""
    if (model := ollama_model_of(text)) is not None:
        return model.tower

    def words(path: Path) -> set[str]:
        return set(re.findall(r"[a-z0-9.]+", path.stem.lower()))

    found = [path for path in text.parent.glob("*.gguf") if "mmproj" in path.name.lower()]
    return max(found, key=lambda path: (len(words(text) & words(path)), path.name), default=None)


def _whole(file: GgufFile, key: str) -> int:
    """A number; from an array by layers the largest, because layers without attention have 0."""
    key = file.own(key)
    return max(file.values(int, key), default=0) if file.is_array(key) else file.value(int, key)


def _short(value: float) -> float:
    """A 32-bit float as the shortest number that rounds to it: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))
