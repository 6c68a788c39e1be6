"""From a template's text to token ids: placeholders become media spans, everything else plain text and controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qwen35mm.config import ModelConfig
from qwen35mm.errors import PromptError
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import GridTHW, MediaPlan, TextRun, VisionRun, mrope_positions, timestamp_text


@dataclass(frozen=True)
class Span:
    """The placeholder tokens `start` to `stop` of an image, or of one temporal patch of a video.

    Attributes:
        grid_thw: in patches; t is 1.
        digest: of the pixels; None until the medium is prepared.
        media_index: which medium of the prompt.
        unit_index: which temporal patch of it; 0 for an image.
    """

    start: int
    stop: int
    grid_thw: GridTHW
    digest: str | None
    media_index: int
    unit_index: int = 0


@dataclass(frozen=True)
class _Placeholder:
    """A span before its place is known."""

    token_id: int
    media_index: int
    unit_index: int


_Piece = str | int | _Placeholder


def lay_out(
    rendered: str,
    media: Sequence[MediaPlan],
    *,
    tokenizer: Tokenizer,
    config: ModelConfig,
    restore: Callable[[str], str],
    keep_video_marks: bool = False,
) -> tuple[np.ndarray, tuple[Span, ...]]:
    """Token ids `[T]` int64, and the media spans in them.

    Args:
        rendered: the template's text, with stand-ins for what came from outside (see `outside`).
        media: the plans, in order of appearance.
        restore: takes the stand-ins out again.
        keep_video_marks: see `build_prompt`.

    Raises:
        PromptError: the template wrote other placeholders than there are media.
    """
    items = tokenizer.split_controls(rendered)
    _check_placeholders(items, media, config)
    pieces = _expand(items, media, config, restore, keep_video_marks)
    ids: list[int] = []
    spans: list[Span] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode_plain(piece)
        elif isinstance(piece, int):
            ids.append(piece)
        else:
            span = _span(piece, media[piece.media_index], len(ids), config.vision.spatial_merge_size)
            ids += [piece.token_id] * (span.stop - span.start)
            spans.append(span)
    return np.array(ids, dtype=np.int64), tuple(spans)


def span_positions(num_tokens: int, spans: Sequence[Span], merge_size: int) -> tuple[np.ndarray, int]:
    """M-RoPE positions `[3, T]` int64 of a prompt with these spans, and its rope_delta."""
    runs: list[TextRun | VisionRun] = []
    at = 0
    for span in spans:
        runs += [TextRun(span.start - at), VisionRun.from_grid(span.grid_thw, merge_size)]
        at = span.stop
    positions, rope_delta = mrope_positions([*runs, TextRun(num_tokens - at)])
    assert positions.shape == (3, num_tokens), "the runs cover the prompt"
    return positions, rope_delta


def _check_placeholders(items: Sequence[str | int], media: Sequence[MediaPlan], config: ModelConfig) -> None:
    kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    written = [kinds[item] for item in items if isinstance(item, int) and item in kinds]
    planned = [plan.kind for plan in media]
    if written != planned:
        raise PromptError(
            f"The model's chat template wrote {_count(written)} where the messages hold {_count(planned)}: "
            "it can't be used for these messages."
        )


def _count(kinds: Sequence[str]) -> str:
    if not kinds:
        return "no media"
    return ", ".join(kinds) if len(kinds) <= 8 else f"{len(kinds)} media"


def _expand(
    items: Sequence[str | int],
    media: Sequence[MediaPlan],
    config: ModelConfig,
    restore: Callable[[str], str],
    keep_video_marks: bool,
) -> list[_Piece]:
    """One placeholder for each unit; adjacent texts joined, as they would be in one string."""
    start_id, end_id = config.vision_start_token_id, config.vision_end_token_id
    pieces: list[_Piece] = []
    media_index = 0
    drop_end = False
    for at, item in enumerate(items):
        if drop_end:
            drop_end = False
        elif isinstance(item, str):
            _append_text(pieces, restore(item))
        elif item == config.image_token_id:
            pieces.append(_Placeholder(item, media_index, 0))
            media_index += 1
        elif item == config.video_token_id:
            wrapped = pieces[-1:] == [start_id] and items[at + 1 : at + 2] == [end_id]
            if wrapped and not keep_video_marks:
                pieces.pop()
                drop_end = True
            for unit_index, time_s in enumerate(media[media_index].timestamps_s or ()):
                _append_text(pieces, timestamp_text(time_s))
                pieces += [start_id, _Placeholder(item, media_index, unit_index), end_id]
            media_index += 1
        else:
            pieces.append(item)
    return pieces


def _append_text(pieces: list[_Piece], text: str) -> None:
    if pieces and isinstance(pieces[-1], str):
        text = pieces.pop() + text  # pyright: ignore[reportOperatorIssue]
    pieces.append(text)


def _span(piece: _Placeholder, plan: MediaPlan, start: int, merge_size: int) -> Span:
    grid_thw = GridTHW(1, plan.grid_thw.h, plan.grid_thw.w)
    digest = plan.unit_digests[piece.unit_index] if plan.unit_digests is not None else None
    stop = start + grid_thw.num_tokens(merge_size)
    return Span(start, stop, grid_thw, digest, piece.media_index, piece.unit_index)
