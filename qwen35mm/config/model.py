"""A checkpoint's config.json as frozen dataclasses: every size and token id read, none defaulted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qwen35mm.config.section import Section
from qwen35mm.config.text import TextConfig, read_text
from qwen35mm.config.vision import VisionConfig, read_vision
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.outside_json import read_json

_TEXT_ALONE = "_text"
SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", f"qwen3_5{_TEXT_ALONE}", f"qwen3_5_moe{_TEXT_ALONE}")
# The tokens that stand for pictures and videos in a prompt, and around them, by the config.json key of their id.
MEDIA_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# By `quant_method`; `checkpoints.quantised` reads them.
QUANTIZATION_METHODS = ("fp8", "gptq", "awq", "auto-round", "compressed-tensors", "modelopt", "bitsandbytes")
_MODELOPT_FILE = "hf_quant_config.json"
_RECURRENT_STATE_BYTES = 4


class ElementType(Protocol):
    """Anything with a size in bytes: a torch.dtype or a numpy dtype, so that this module needs neither library."""

    @property
    def itemsize(self) -> int: ...


@runtime_checkable
class RowFormat(Protocol):
    """The format that keeps one head's keys or values of a token."""

    def row_bytes(self, head_dim: int) -> int: ...


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the code needs from a checkpoint's config.json.

    Attributes:
        tower: the vision tower; None for a text-only model, which has no media ids either.
        eos_token_ids: those in config.json, possibly none; generation_config.json may add to them.
        quantization: config.json's `quantization_config`; None where the tensors are floats.
    """

    model_type: str
    text: TextConfig
    tower: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, rope_scaling: str | None = None) -> ModelConfig:
        """Reads `folder`/config.json, and ModelOpt's hf_quant_config.json where it names no quantisation itself.

        Args:
            rope_scaling: replaces the file's own rope scaling: "yarn,factor=4", optionally followed by YaRN's other
                settings, or "default" for none.

        Raises:
            CheckpointError: the file is missing or isn't a JSON object.
            ConfigError: a key is missing or a value isn't supported.
        """
        path = Path(folder) / "config.json"
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent.name or path.parent}: no config.json in this folder.") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"config.json can't be read as JSON ({type(error).__name__}).") from error
        if not isinstance(data, dict):
            raise CheckpointError("config.json must hold a JSON object.")
        config = cls.from_dict(data, rope_scaling=rope_scaling)
        if config.quantization is None and (path.parent / _MODELOPT_FILE).is_file():
            return replace(config, quantization=_read_modelopt(path.parent / _MODELOPT_FILE))
        return config

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, rope_scaling: str | None = None) -> ModelConfig:
        """Checks a parsed config.json and takes the values that we need; raises ConfigError."""
        top = Section("", data)
        model_type = top.value("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            what = f"is {model_type!r}; supported are {', '.join(SUPPORTED_MODEL_TYPES)} (Qwen3.5 checkpoints)."
            raise top.error("model_type", what)
        is_text = model_type.endswith(_TEXT_ALONE)
        text_section = top if is_text else top.section("text_config")
        for key in () if is_text else ("rope_scaling", "rope_parameters"):
            rope = top.data.get(key)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default":
                raise top.error(key, "must be in text_config; transformers ignores it here.")
        is_moe = model_type.startswith("qwen3_5_moe")
        text = read_text(text_section, is_moe=is_moe, rope_scaling=rope_scaling)
        tower = None if is_text else _read_vision(top, text)
        ids = {name: None if is_text else top.integer(name, minimum=0) for name in MEDIA_TOKENS}
        for name, token_id in ids.items():
            if token_id is not None and token_id >= text.vocab_size:
                raise top.error(name, f"is {token_id}, outside the vocabulary of {text.vocab_size}.")
        return cls(
            model_type=model_type,
            text=text,
            tower=tower,
            # transformers' default is untied; only the top level counts there.
            tie_word_embeddings=top.flag("tie_word_embeddings", default=False),
            eos_token_ids=_read_eos(top, text_section),
            quantization=_read_quantization(top, text_section),
            **ids,
        )

    def with_mtp(self) -> ModelConfig:
        """A copy that runs the checkpoint's layer of multi-token prediction."""
        return replace(self, text=replace(self.text, runs_mtp=True))

    @property
    def vision(self) -> VisionConfig:
        """The vision tower of a multimodal model."""
        assert self.tower is not None, "this model reads text alone"
        return self.tower

    @property
    def media_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for pictures and videos, and around them."""
        return frozenset(id_ for name in MEDIA_TOKENS if (id_ := getattr(self, name)) is not None)

    @property
    def spatial_merge_size(self) -> int:
        """Patches along each side that merge into one prompt token."""
        return 1 if self.tower is None else self.tower.spatial_merge_size

    def kv_bytes_per_token(self, k: ElementType | RowFormat, v: ElementType | RowFormat | None = None) -> int:
        """Bytes of K and V for one token, over all full-attention layers.

        Args:
            k, v: the type of K and of V, or one of `kv_formats.FORMATS`; v defaults to k.
        """
        text = self.text
        head_bytes = 0
        for kept in (k, k if v is None else v):
            by_format = isinstance(kept, RowFormat)
            head_bytes += kept.row_bytes(text.head_dim) if by_format else text.head_dim * kept.itemsize
        return len(text.attention_layers) * text.num_key_value_heads * head_bytes

    def state_bytes(self, conv_dtype: ElementType) -> int:
        """Bytes of one sequence's recurrent states (always fp32) and conv states (in `conv_dtype`)."""
        text = self.text
        conv = text.conv_dim * (text.linear_conv_kernel_dim - 1) * conv_dtype.itemsize
        return self.recurrent_bytes + len(text.linear_layers) * conv

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one sequence's recurrent states."""
        text = self.text
        return len(text.linear_layers) * text.value_dim * text.linear_key_head_dim * _RECURRENT_STATE_BYTES


def _read_vision(top: Section, text: TextConfig) -> VisionConfig:
    section = top.section("vision_config")
    vision = read_vision(section)
    if vision.out_hidden_size != text.hidden_size:
        what = f"({vision.out_hidden_size}) must equal text_config.hidden_size ({text.hidden_size})."
        raise section.error("out_hidden_size", what)
    return vision


def _read_quantization(*sections: Section) -> Mapping[str, Any] | None:
    found = None
    for section in sections:
        quantization = section.data.get("quantization_config")
        if not isinstance(quantization, Mapping | None):
            raise section.error("quantization_config", f"must be an object; got {quantization!r}.")
        if quantization is not None:
            method = quantization.get("quant_method")
            if method not in QUANTIZATION_METHODS:
                raise ConfigError(
                    f"This checkpoint is quantised by {method!r}, which can't be read here: "
                    f"{', '.join(QUANTIZATION_METHODS)} can. Use one of those, or the bf16 checkpoint."
                )
            if found not in (None, quantization):
                raise section.error("quantization_config", "is there twice, with different values.")
            found = quantization
    return found


def _read_modelopt(path: Path) -> Mapping[str, Any]:
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} can't be read as JSON ({type(error).__name__}).") from error
    found = data.get("quantization") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} must hold an object with `quantization`.")
    return {**found, "quant_method": "modelopt"}


def _read_eos(top: Section, text: Section) -> tuple[int, ...]:
    ids: list[int] = []
    for section in (top, text):
        value = section.data.get("eos_token_id")
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is not None and token_id not in ids:
                if type(token_id) is not int or token_id < 0:
                    raise section.error("eos_token_id", f"holds {token_id!r}, not a token id.")
                ids.append(token_id)
    return tuple(ids)
