"""A checkpoint's config.json as frozen dataclasses: every size and token id read, none defaulted.

The keys are those of transformers' Qwen3_5Config and Qwen3_5MoeConfig. A missing key, a wrong type or an unsupported
value raises a ConfigError that names the key.
"""

from qwen35mm.config.model import MEDIA_TOKENS, SUPPORTED_MODEL_TYPES, ElementType, ModelConfig, RowFormat
from qwen35mm.config.text import LayerType, MoEConfig, RopeConfig, TextConfig, YarnConfig
from qwen35mm.config.vision import VisionConfig

__all__ = [
    "MEDIA_TOKENS",
    "SUPPORTED_MODEL_TYPES",
    "ElementType",
    "LayerType",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "RowFormat",
    "TextConfig",
    "VisionConfig",
    "YarnConfig",
]
