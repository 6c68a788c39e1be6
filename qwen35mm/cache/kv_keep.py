"""How many keys and values of a finished segment are kept, as people write it: `0.5`, or `text=1,media=0.5`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen35mm.errors import ConfigError
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, Prompt, Segment

# The prompt's first tokens: attention rests on them, whatever they say (StreamingLLM, arXiv:2309.17453).
NUM_SINKS = 4
# Rows of a sequence that no plan shortens: a segment that isn't finished, the tail, and some of the reply.
WHOLE_ROWS = 8_192
# Shares are whole numbers of these, so that their products are exact.
_PARTS = 10_000
# A segment rounds up once for text and once for media.
_ROUNDED = 2


@dataclass(frozen=True)
class KVKeep:
    """Shares of a segment's text tokens and media tokens that keep their keys and values, above 0 and up to 1."""

    text: float = 1.0
    media: float = 1.0

    @classmethod
    def of(cls, text: str) -> KVKeep:
        """The shares that a text names.

        Raises:
            ConfigError: the text names none, or one is out of range.
        """
        parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
        named = dict(part.split("=", 1) for part in parts if "=" in part)
        if len(parts) == 1 and not named:
            named = {"text": parts[0], "media": parts[0]}
        shares = {name: _share(value) for name, value in named.items()}
        if set(shares) != {"text", "media"} or len(parts) > len(shares) or None in shares.values():
            raise ConfigError(
                "The share of keys and values to keep is a number above 0 and up to 1 (1 keeps all), or one for each "
                f"kind, as in text=1,media=0.5; got {text!r}."
            )
        return cls(**{name: share for name, share in shares.items() if share is not None})

    def __str__(self) -> str:
        return f"{self.text:g}" if self.text == self.media else f"text={self.text:g},media={self.media:g}"

    @property
    def evicts(self) -> bool:
        """Whether anything is evicted."""
        return min(self.text, self.media) < 1

    def kept(self, num_text: int, num_media: int) -> tuple[int, int]:
        """How many of a segment's text tokens and media tokens are kept: shares, rounded up."""
        return _part(self.text, num_text), _part(self.media, num_media)

    def rows(self, prompt: Prompt) -> tuple[int, ...]:
        """The rows of each of a prompt's segments."""
        if not self.evicts:
            return tuple(segment.stop - segment.start for segment in prompt.segments)
        return tuple(sum(self.kept(*self._sizes(prompt, segment))) for segment in prompt.segments)

    def all_rows(self, prompt: Prompt) -> int:
        """The rows of a prompt with its tail, which stays whole."""
        return sum(self.rows(prompt)) + len(prompt.token_ids) - prompt.tail_start

    def most_rows(self, num_tokens: int, min_segment: int = DEFAULT_MIN_SEGMENT) -> int:
        """The most rows that a sequence of so many tokens is given.

        It holds every prompt of up to `num_tokens` tokens. A long reply may need more rows, as its own are all kept.

        Args:
            min_segment: least tokens of a segment.
        """
        share = max(self.text, self.media)
        if share == 1:
            return num_tokens
        old = max(num_tokens - WHOLE_ROWS, 0)
        return min(num_tokens, _part(share, old) + _ROUNDED * -(-old // min_segment) + WHOLE_ROWS)

    @staticmethod
    def _sizes(prompt: Prompt, segment: Segment) -> tuple[int, int]:
        num_media = sum(
            min(prompt.spans[index].stop, segment.stop) - max(prompt.spans[index].start, segment.start)
            for index in segment.span_indices
        )
        return segment.stop - segment.start - num_media, num_media


OFF = KVKeep()


def media_mask(prompt: Prompt, segment: Segment) -> np.ndarray:
    """[n] bool: which of a segment's tokens are placeholders of media."""
    mask = np.zeros(segment.stop - segment.start, dtype=bool)
    for index in segment.span_indices:
        span = prompt.spans[index]
        mask[max(span.start - segment.start, 0) : span.stop - segment.start] = True
    return mask


def _part(share: float, count: int) -> int:
    return -(-count * round(share * _PARTS) // _PARTS)


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 1 / _PARTS <= share <= 1 else None
