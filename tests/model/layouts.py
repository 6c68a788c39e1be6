"""Prompts made of text, images and videos with random contents, run through transformers and through us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.engine.batches import StepInputs, prefill_batch
from qwen35mm.model.decoder import Qwen35Model
from tests.tiny import IMAGE_ID, NUM_TEXT_IDS, VIDEO_ID, VISION_END_ID, VISION_START_ID

BLOCK_SIZE, MAX_BLOCKS = 16, 64
PATCH_DIM = 3 * 2 * 16 * 16

# A layout is a list of: n (text tokens), ("image", h, w) or ("video", t, h, w), sizes in patches.
Layout = Sequence[Any]
TEXT: Layout = [150]
ONE_IMAGE: Layout = [7, ("image", 4, 6), 20]
IMAGES: Layout = [5, ("image", 2, 8), ("image", 6, 4), 30, ("image", 10, 2), 9]
VIDEO: Layout = [6, ("video", 3, 4, 6), 11]
FOUR_TURNS: Layout = [12, ("image", 4, 4), 25, ("video", 2, 4, 2), 40, 31, ("image", 2, 6), ("video", 3, 2, 2), 8]


@dataclass(frozen=True)
class Prompt:
    """A prompt with its media: what transformers' processor would hand to its model, for a batch of one."""

    token_ids: torch.Tensor  # [T]
    token_types: torch.Tensor  # [T]: 0 text, 1 image, 2 video
    image_pixels: torch.Tensor | None
    image_grids: list[tuple[int, int, int]]
    video_pixels: torch.Tensor | None
    video_grids: list[tuple[int, int, int]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def theirs(self) -> dict[str, Any]:
        """Keyword arguments of transformers' forward."""
        inputs: dict[str, Any] = {
            "input_ids": self.token_ids[None],
            "mm_token_type_ids": self.token_types[None],
        }
        if self.image_grids:
            inputs |= {"pixel_values": self.image_pixels, "image_grid_thw": torch.tensor(self.image_grids)}
        if self.video_grids:
            inputs |= {"pixel_values_videos": self.video_pixels, "video_grid_thw": torch.tensor(self.video_grids)}
        return inputs


def make_prompt(layout: Layout, seed: int = 0) -> Prompt:
    """Random text ids and pixels in the given layout."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    types: list[int] = []
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}

    def text(count: int) -> None:
        ids.extend(torch.randint(0, NUM_TEXT_IDS, (count,), generator=generator).tolist())
        types.extend([0] * count)

    def span(count: int, token_id: int, token_type: int) -> None:
        ids.extend([VISION_START_ID, *[token_id] * count, VISION_END_ID])
        types.extend([0, *[token_type] * count, 0])

    for item in layout:
        if isinstance(item, int):
            text(item)
        elif item[0] == "image":
            _, h, w = item
            grids["image"].append((1, h, w))
            span(h * w // 4, IMAGE_ID, 1)
        else:
            _, t, h, w = item
            grids["video"].append((t, h, w))
            for _ in range(t):
                text(4)  # the timestamp
                span(h * w // 4, VIDEO_ID, 2)

    def pixels(kind: str) -> torch.Tensor | None:
        count = sum(t * h * w for t, h, w in grids[kind])
        return torch.rand((count, PATCH_DIM), generator=generator) * 2 - 1 if count else None

    return Prompt(
        torch.tensor(ids), torch.tensor(types), pixels("image"), grids["image"], pixels("video"), grids["video"]
    )


def their_positions(model: Any, prompt: Prompt) -> tuple[torch.Tensor, int]:
    """M-RoPE positions [3, T] and rope_delta by transformers' get_rope_index."""
    inputs = prompt.theirs()
    positions, deltas = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
        video_grid_thw=inputs.get("video_grid_thw"),
    )
    return positions[:, 0], int(deltas)


@torch.no_grad()
def their_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    """[T, vocab] float32."""
    model.model.rope_deltas = None
    return model(**prompt.theirs()).logits[0].float()


@torch.no_grad()
def their_greedy(model: Any, prompt: Prompt, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits that each was taken from, [count, vocab]."""
    # transformers keeps the last prompt's delta, and a prompt without media would decode with it.
    model.model.rope_deltas = None
    output = model(**prompt.theirs(), use_cache=True)
    tokens, rows = [], []
    for _ in range(count):
        rows.append(output.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        output = model(torch.tensor([[tokens[-1]]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens, torch.stack(rows)


def new_cache(model: Qwen35Model, num_slots: int = 1, num_tokens: int = 1024) -> SequenceCache:
    """An empty cache with pools of its own."""
    return new_pools(model, num_slots, num_tokens).new_sequence()


def new_pools(model: Qwen35Model, num_slots: int, num_tokens: int = 1024) -> CachePools:
    return CachePools(
        model.config, num_slots=num_slots, num_tokens=num_tokens, dtype=model.dtype, block_size=BLOCK_SIZE
    )


def our_embeds(model: Qwen35Model, prompt: Prompt) -> torch.Tensor:
    """[T, hidden] with the media's embeddings in place."""
    embeds = model.embed_tokens(prompt.token_ids)
    for token_type, pixels, grids in (
        (1, prompt.image_pixels, prompt.image_grids),
        (2, prompt.video_pixels, prompt.video_grids),
    ):
        if pixels is not None:
            embeds[prompt.token_types == token_type] = torch.cat(
                list(map(model.tower, pixels.split([t * h * w for t, h, w in grids]), grids))
            )
    return embeds


def our_prefill(
    model: Qwen35Model, prompt: Prompt, positions: torch.Tensor, cache: SequenceCache, cuts: Iterable[int] = ()
) -> torch.Tensor:
    """Logits [T, vocab] of a prefill cut at the given places."""
    return model.logits(our_prefill_of(model, our_embeds(model, prompt), positions, cache, cuts))


def our_prefill_of(
    model: Qwen35Model, embeds: torch.Tensor, positions: torch.Tensor, cache: SequenceCache, cuts: Iterable[int] = ()
) -> torch.Tensor:
    """Hidden states [T, hidden] of a prefill cut at the given places."""
    pieces = []
    for start, stop in pairwise([0, *cuts, len(embeds)]):
        cache.prepare(stop - start)
        pieces.append(model(prefill_batch(cache, embeds[start:stop].clone(), positions[:, start:stop])))
        cache.advance(stop - start)
    return torch.cat(pieces)


def our_decode(model: Qwen35Model, tokens: Sequence[int], caches: Sequence[SequenceCache | None]) -> torch.Tensor:
    """Logits [B, vocab] of one step; rows without a cache are used by nobody."""
    return model.logits(our_step(model, tokens, caches))


def our_step(model: Qwen35Model, tokens: Sequence[int], caches: Sequence[SequenceCache | None]) -> torch.Tensor:
    """Hidden states [B, hidden] of one step."""
    inputs, pools = StepInputs.unused(len(caches), MAX_BLOCKS), None
    inputs.block_table.fill_(10**6)
    for row, (token, cache) in enumerate(zip(tokens, caches, strict=True)):
        if cache is not None:
            cache.prepare(1)
            inputs.set(row, cache, token_id=token)
            pools = cache._pools
    assert pools is not None
    embeds = model.embed_tokens(inputs.numbers[0])
    hidden = model(inputs.batch(pools, embeds))
    for cache in caches:
        if cache is not None:
            cache.advance(1)
    return hidden


def our_greedy(
    model: Qwen35Model, prompt: Prompt, positions: torch.Tensor, rope_delta: int, count: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits that each was taken from, [count, vocab]."""
    cache = new_cache(model)
    cache.rope_delta = rope_delta
    row = our_prefill(model, prompt, positions, cache)[-1]
    tokens, rows = [], []
    for _ in range(count):
        rows.append(row)
        tokens.append(int(row.argmax()))
        row = our_decode(model, tokens[-1:], [cache])[0]
    return tokens, torch.stack(rows)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
