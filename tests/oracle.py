"""transformers as the oracle: the greedy reply to a prompt and its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3_5ForConditionalGeneration

from qwen35mm.assets import demo_model_path


def load_demo_oracle() -> Any:
    """The bundled model in transformers' own class, float32."""
    return Qwen3_5ForConditionalGeneration.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def greedy_reply(
    oracle: Any, prompt_token_ids: Sequence[int], inputs: dict[str, torch.Tensor], max_new_tokens: int
) -> list[int]:
    """The tokens that `generate` adds; `inputs` holds pixel_values, image_grid_thw and their video twins."""
    ids = torch.tensor([prompt_token_ids])
    # transformers wants to be told which placeholder belongs to which kind: 1 an image, 2 a video.
    types = (ids == oracle.config.image_token_id).int() + 2 * (ids == oracle.config.video_token_id).int()
    output = oracle.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        **inputs,
    )
    return output[0, ids.shape[1] :].tolist()
