"""From a template's text to token ids: placeholders become media spans, the rest plain text and control tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qwen35mm.config import ModelConfig
from qwen35mm.errors import PromptError
from qwen35mm.tokenizer import Tokenizer, TooManyTokensError
from qwen35mm_preprocess import GridTHW, MediaPlan, TextRun, VisionRun, mrope_positions, timestamp_text


@dataclass(frozen=True)
class Span:
    """Placeholder tokens `start` to `stop` of an image, or of one temporal patch of a video.

    Attributes:
        grid_thw: in patches; t is 1.
        digest: of the pixels; None until the medium is prepared.
        media_index: the medium's index in the prompt.
        unit_index: the temporal patch's index in the medium; 0 for an image.
    """

    start: int
    stop: int
    grid_thw: GridTHW
    digest: str | None
    media_index: int
    unit_index: int = 0


def lay_out(
    rendered: str,
    media: Sequence[MediaPlan],
    *,
    tokenizer: Tokenizer,
    config: ModelConfig,
    restore: Callable[[str], str],
    most_tokens: int | None = None,
) -> tuple[np.ndarray, tuple[Span, ...]]:
    """Token ids `[T]` int64, and their media spans.

    A video loses the template's `<|vision_start|>` and `<|vision_end|>`: its temporal patches have their own. So do the
    family's first reference code (transformers 4.57) and its own page; transformers keeps them since 5.10.

    Args:
        rendered: the template's text, with stand-ins in outside text (see `outside`).
        media: the plans, in order of appearance.
        restore: replaces the stand-ins back.
        most_tokens: tokenizing stops once the prompt is longer.

    Raises:
        PromptError: the template's placeholders don't match the media.
        TooManyTokensError: there are more than `most_tokens`.
    """
    items = tokenizer.split_controls(rendered)
    _check_placeholders(items, media, config)
    start_id, video_id, end_id = config.vision_start_token_id, config.video_token_id, config.vision_end_token_id
    ids: list[int] = []
    spans: list[Span] = []
    texts: list[str] = []
    media_index = 0

    def end_text() -> None:
        # Adjacent texts are tokenized together, as one string.
        most = None if most_tokens is None else most_tokens - len(ids)
        try:
            ids.extend(tokenizer.encode_plain("".join(texts), most))
        except TooManyTokensError as error:
            raise TooManyTokensError(len(ids) + error.at_least) from None
        texts.clear()

    def add_span(placeholder_id: int, unit_index: int) -> None:
        plan = media[media_index]
        grid_thw = GridTHW(1, plan.grid_thw.h, plan.grid_thw.w)
        digest = None if plan.unit_digests is None else plan.unit_digests[unit_index]
        stop = len(ids) + grid_thw.num_tokens(config.spatial_merge_size)
        spans.append(Span(len(ids), stop, grid_thw, digest, media_index, unit_index))
        ids.extend([placeholder_id] * (stop - len(ids)))

    for at, item in enumerate(items):
        if isinstance(item, str):
            texts.append(restore(item))
        elif item == video_id:
            assert start_id is not None, "who has the one id has all of them"
            assert end_id is not None
            for unit_index, time_s in enumerate(media[media_index].timestamps_s or ()):
                texts.append(timestamp_text(time_s))
                end_text()
                ids.append(start_id)
                add_span(item, unit_index)
                ids.append(end_id)
            media_index += 1
        elif [start_id, video_id, end_id] not in (items[at : at + 3], items[max(at - 2, 0) : at + 1]):
            end_text()
            if item == config.image_token_id:
                add_span(item, 0)
                media_index += 1
            else:
                ids.append(item)
    end_text()
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
