"""The family's models on the Hugging Face Hub, with what they take: known before a byte of them is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Layouts are padded, and running states come on top.
_MARGIN = 1.05


@dataclass(frozen=True)
class HubModel:
    """A model that can be downloaded.

    Attributes:
        hub_id: such as `Qwen/Qwen3.5-2B`.
        weights_bytes: by format, as `qwen35mm.model.weights.weights_bytes` counts them; `bf16` is what is downloaded.
        kv_token_bytes: of one token, in bfloat16.
    """

    hub_id: str
    weights_bytes: dict[str, int]
    kv_token_bytes: int

    def format_that_fits(self, formats: Sequence[str], *, memory_bytes: int, context_length: int) -> str | None:
        """The first of these formats whose weights the memory holds, with one whole context; None where none fits."""
        kv_bytes = self.kv_token_bytes * context_length
        fitting = (each for each in formats if self.weights_bytes[each] * _MARGIN + kv_bytes <= memory_bytes)
        return next(fitting, None)


def _model(name: str, bf16: int, int8: int, int4: int, kv_token_bytes: int) -> HubModel:
    return HubModel(f"Qwen/Qwen3.5-{name}", {"bf16": bf16, "int8": int8, "int4": int4}, kv_token_bytes)


HUB_MODELS = (
    _model("0.8B", 1_705_971_840, 1_001_623_680, 753_111_168, 12_288),
    _model("2B", 4_426_483_328, 2_663_892_608, 1_978_123_904, 12_288),
    _model("4B", 9_078_531_072, 5_140_227_072, 3_357_647_872, 32_768),
    _model("9B", 18_819_627_488, 10_432_330_208, 6_976_223_712, 32_768),
    _model("27B", 54_713_457_120, 29_523_057_120, 17_359_575_520, 65_536),
    _model("35B-A3B", 70_214_363_872, 37_744_552_672, 20_935_879_392, 20_480),
)
# The largest one that is worth its time: on a processor every weight is read for every token.
SUGGESTED_ON_CPU, SUGGESTED_ON_GPU = HUB_MODELS[1], HUB_MODELS[3]
