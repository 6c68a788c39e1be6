"""The types of keys and values in the cache, as people write them: `int8`, or `k=int8,v=int4`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qwen35mm.config import TextConfig
from qwen35mm.errors import ConfigError
from qwen35mm_kernels.kv_formats import FORMATS, GROUP, PLAIN, KVFormats

AUTO = "auto"


def kv_formats_of(text: str, dtype: torch.dtype) -> KVFormats:
    """The formats of K and V that a text names; `auto` is the model's dtype.

    Raises:
        ConfigError: the text names no formats.
    """
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    names = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(parts) == 1 and not names:
        names = {"k": parts[0], "v": parts[0]}
    known = {AUTO: PLAIN[dtype], **FORMATS}
    if set(names) != {"k", "v"} or len(parts) > 2 or not set(names.values()) <= known.keys():
        raise ConfigError(
            f"Keys and values can be kept as {', '.join(known)}, or separately, as in k=int8,v=int4; got {text!r}."
        )
    return known[names["k"]], known[names["v"]]


def check_kv_formats(formats: KVFormats, text: TextConfig, devices: Sequence[torch.device]) -> None:
    """Checks that a model can keep its keys and values in these formats.

    Args:
        devices: of its layers.

    Raises:
        ConfigError: the head dimension is no multiple of a group or can't be rotated, or a GPU lacks kernels.
    """
    for format in formats:
        if not format.fits(text.head_dim):
            if format.is_rotated:
                raise ConfigError(
                    f"{format.name} rotates heads, for which their dimensions must be a power of two from {GROUP} on, "
                    f"and this model's have {text.head_dim}. Take int8 or bf16."
                )
            raise ConfigError(
                f"{format.name} keeps keys and values in groups of {GROUP}, and this model's heads have "
                f"{text.head_dim} dimensions. Take bf16 or f16."
            )
        on_cards = any(device.type != "cpu" for device in devices)
        if not format.on_cards and on_cards:
            known = ", ".join(name for name, each in FORMATS.items() if each.on_cards)
            raise ConfigError(
                f"{format.name} works only on a CPU. On a GPU keys and values can be kept as {known}. Take one of "
                "these, or --device cpu."
            )
        if on_cards and format.bits and format.row_bytes(text.head_dim) % 4:
            raise ConfigError(
                f"A GPU reads rows of {format.name} four bytes at a time, for which heads need a multiple of 64 "
                f"dimensions, and this model's have {text.head_dim}. Take bf16 or f16."
            )
