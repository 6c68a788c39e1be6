"""A checkpoint's config.json as frozen dataclasses: every size and token id read, none defaulted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qwen35mm.config.section import Section
from qwen35mm.config.text import TextConfig, read_text
from qwen35mm.config.vision import VisionConfig, read_vision
from qwen35mm.errors import CheckpointError, ConfigError

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")
_RECURRENT_STATE_BYTES = 4


class ElementType(Protocol):
    """What has a size in bytes: a torch.dtype or a numpy dtype (so that this module needs neither)."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the code needs from a checkpoint's config.json.

    Attributes:
        eos_token_ids: as config.json has them, perhaps none; generation_config.json may add to them.
    """

    model_type: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """Reads `folder`/config.json.

        Raises:
            CheckpointError: the file is missing or isn't a JSON object.
            ConfigError: a key is missing or a value isn't supported.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent.name or path.parent}: no config.json in this folder.") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"config.json can't be read as JSON ({type(error).__name__}).") from error
        if not isinstance(data, dict):
            raise CheckpointError("config.json must hold a JSON object.")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Checks a parsed config.json and takes what we need from it; raises ConfigError."""
        top = Section("", data)
        model_type = top.value("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            supported = " and ".join(SUPPORTED_MODEL_TYPES)
            what = f"is {model_type!r}; supported are {supported} (the multimodal Qwen3.5 checkpoints)."
            raise top.error("model_type", what)
        text_section, vision_section = top.section("text_config"), top.section("vision_config")
        for section in (top, text_section):
            _refuse_quantized(section)
        text = read_text(text_section, is_moe=model_type == "qwen3_5_moe")
        vision = read_vision(vision_section)
        if vision.out_hidden_size != text.hidden_size:
            what = f"({vision.out_hidden_size}) must equal text_config.hidden_size ({text.hidden_size})."
            raise vision_section.error("out_hidden_size", what)
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = {name: top.integer(name, minimum=0) for name in names}
        for name, token_id in ids.items():
            if token_id >= text.vocab_size:
                raise top.error(name, f"is {token_id}, outside the vocabulary of {text.vocab_size}.")
        return cls(
            model_type=model_type,
            text=text,
            vision=vision,
            # transformers' default is untied; only the top level counts there.
            tie_word_embeddings=top.flag("tie_word_embeddings", default=False),
            eos_token_ids=_read_eos(top, text_section),
            **ids,
        )

    def kv_bytes_per_token(self, dtype: ElementType) -> int:
        """Bytes of K and V that one token takes over all full-attention layers."""
        text = self.text
        return len(text.attention_layers) * 2 * text.num_key_value_heads * text.head_dim * dtype.itemsize

    def state_bytes(self, conv_dtype: ElementType) -> int:
        """Bytes of one sequence's recurrent states (always fp32) and conv states (in `conv_dtype`)."""
        text = self.text
        recurrent = text.value_dim * text.linear_key_head_dim * _RECURRENT_STATE_BYTES
        conv = text.conv_dim * (text.linear_conv_kernel_dim - 1) * conv_dtype.itemsize
        return len(text.linear_layers) * (recurrent + conv)


def _refuse_quantized(section: Section) -> None:
    quantization = section.data.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
    raise ConfigError(
        f"This checkpoint is quantized ({method}): FP8, AWQ, GPTQ and the like are not supported yet. "
        "Use the bf16 checkpoint."
    )


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
