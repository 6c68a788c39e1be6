"""How long to wait before a server is asked again: pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timezone
from email.utils import parsedate_to_datetime

# A server that is loading a model or hands out turns by the minute is waited for; one that says "tomorrow" is not.
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True)
class Backoff:
    """Waits that double from `first_s` up to `max_s`, so that a server that is down isn't pressed."""

    first_s: float = 0.5
    max_s: float = 30.0

    def delay_s(self, num_failed: int, jitter: float, retry_after_s: float | None = None) -> float:
        """Seconds to wait after the `num_failed`-th failure (1, 2, ...).

        Args:
            jitter: 0 to 1; spreads requests that failed together over the upper half of the wait.
            retry_after_s: what the server asked for; never less than that is waited, up to MAX_RETRY_AFTER_S.
        """
        longest = min(self.max_s, self.first_s * 2.0 ** min(num_failed - 1, 64))
        delay = longest * (0.5 + 0.5 * jitter)
        return delay if retry_after_s is None else max(delay, min(retry_after_s, MAX_RETRY_AFTER_S))


def read_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date); None if it can't be read.

    Args:
        now_s: seconds since 1970.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        # A date without a zone is in GMT.
        date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
        seconds = date.timestamp() - now_s
    return max(seconds, 0.0) if math.isfinite(seconds) else None
