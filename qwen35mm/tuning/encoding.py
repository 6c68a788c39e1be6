"""Samples as tensors of transformers' model: the ids, pixels and positions that the engine would have.

The prompt and the media are made by the same parts as for a reply, `PromptBuilder` and `MediaProcessor`. The answer's
tokens follow the prompt as generated ones would, and its last one ends the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen35mm.config import ModelConfig
from qwen35mm.contract import EncodedMedium, Image, Video, iter_media
from qwen35mm.errors import CheckpointError
from qwen35mm.model.load import find_checkpoint, read_config
from qwen35mm.prompt import ChatTemplate, PromptBuilder
from qwen35mm.prompt.build import THINKING_START
from qwen35mm.prompt.layout import span_positions
from qwen35mm.tokenizer import Tokenizer
from qwen35mm.tuning.samples import Sample
from qwen35mm_preprocess import (
    MediaBudget,
    MediaLimits,
    MediaPlan,
    MediaProcessor,
    PreparedMedia,
    family_processing,
    read_processing,
)

_THINKING_STOP, _TURN_STOP = "</think>", "<|im_end|>"


@dataclass(frozen=True, eq=False)
class Encoded:
    """A sample as the model reads it, without pixels.

    Attributes:
        token_ids: int64 `[T]`, prompt and answer; the last one ends the answer.
        positions: M-RoPE positions, int64 `[3, T]`.
        rope_delta: see `Prompt`.
        start: index of the answer's first token.
        media: the images and videos, with complete plans.
    """

    sample: Sample
    token_ids: np.ndarray
    positions: np.ndarray
    rope_delta: int
    start: int
    media: tuple[Image | Video, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_answer_tokens(self) -> int:
        return self.num_tokens - self.start

    @property
    def plans(self) -> list[MediaPlan]:
        """The media's plans."""
        return [_plan(part) for part in self.media]


class Encoder:
    """Encodes samples for one checkpoint.

    Args:
        folder: the checkpoint's.
        device: decides how large media are, as for replies.
        budget: the most that media may cost; fields that are None take the device's.
    """

    def __init__(self, folder: Path, *, device: str, budget: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.config: ModelConfig = read_config(folder)
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self.template = ChatTemplate.from_pretrained(folder)
        has_tower = self.config.tower is not None
        image, video = read_processing(folder) if has_tower else family_processing()
        chosen = {name: value for name, value in (budget or {}).items() if value is not None}
        self.media = MediaProcessor(
            image,
            video,
            budget=MediaBudget(**{**vars(MediaBudget.for_device(device)), **chosen}),
            limits=MediaLimits(),
            # Replies are made in bfloat16 unless somebody asks otherwise.
            cache_bytes_per_token=self.config.kv_bytes_per_token(torch.bfloat16),
            blind=None if has_tower else folder.name,
        )
        self._builder = PromptBuilder(self.tokenizer, self.template, self.config)
        if _TURN_STOP not in self.tokenizer.control_ids:
            raise CheckpointError(f"The tokenizer has no {_TURN_STOP}: this is no chat model, and can't be tuned here.")

    @classmethod
    def of(cls, path_or_hub_id: str | Path, *, device: str, budget: Mapping[str, Any] | None = None) -> Encoder:
        """The encoder of a checkpoint, which is downloaded if need be. Raises CheckpointError, ConfigError."""
        return cls(find_checkpoint(path_or_hub_id), device=device, budget=budget)

    def encode(self, sample: Sample) -> Encoded:
        """A sample's ids and positions. Reads its media, so that later ones can't fail but by a change of the file.

        Raises:
            MediaError, PromptError: its media can't be read, or its messages can't become a prompt.
        """
        media = tuple(replace(part, plan=self._prepare(part).plan) for part in iter_media(sample.messages))
        plans = [_plan(part) for part in media]
        prompt = self._builder.prompt(sample.messages, plans, enable_thinking=bool(sample.reasoning))
        start = len(prompt.token_ids)
        ids = np.concatenate([prompt.token_ids, self._answer(sample, prompt.token_ids)])
        positions, rope_delta = span_positions(len(ids), prompt.spans, self.config.spatial_merge_size)
        assert rope_delta == prompt.rope_delta
        return Encoded(sample, ids, positions, rope_delta, start, media)

    def inputs(self, encoded: Encoded) -> dict[str, torch.Tensor]:
        """The keyword arguments of transformers' forward, for a batch of one. Raises MediaError."""
        ids = torch.from_numpy(encoded.token_ids.copy())[None]
        config = self.config
        inputs = {
            "input_ids": ids,
            "position_ids": torch.from_numpy(encoded.positions.copy())[:, None],
            # 1 an image's placeholder, 2 a video's.
            "mm_token_type_ids": (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int(),
        }
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            found = [self._prepare(part) for part in encoded.media if part.kind == kind]
            if found:
                inputs[pixels] = torch.from_numpy(np.concatenate([medium.pixel_values for medium in found]))
                inputs[grids] = torch.tensor([tuple(medium.plan.grid_thw) for medium in found])
        return inputs

    def _answer(self, sample: Sample, prompt_ids: np.ndarray) -> list[int]:
        """The tokens that the model should generate."""
        plain, controls = self.tokenizer.encode_plain, self.tokenizer.control_ids
        thinks = controls.get(THINKING_START) in prompt_ids[-2:].tolist() and _THINKING_STOP in controls
        thought = [*plain(f"{sample.reasoning}\n"), controls[_THINKING_STOP], *plain("\n\n")] if thinks else []
        return [*thought, *plain(sample.answer), controls[_TURN_STOP]]

    def _prepare(self, part: Image | Video) -> PreparedMedia:
        if isinstance(part.source, PreparedMedia):
            return part.source
        assert not isinstance(part.source, EncodedMedium), "only a server's answers have such media"
        plan = self.media.kept(part.plan, part.source)
        return part.planner(self.media).prepare(part.source, plan=plan, kind=part.kind, clip=part.clip)


def _plan(part: Image | Video) -> MediaPlan:
    assert part.plan is not None
    return part.plan
