"""A download's progress as a person reads it: how much is here, how fast it goes, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from qwen35mm_preprocess.say import Said, say, size

# The speed is that of the last seconds, known from the first one on.
_SPAN_S = 10.0
_STEP_S = 0.5
_LEAST_S = 1.0
# Without a byte for so long, it waits for the network.
_SILENT_S = 4.0


class DownloadProgress:
    """What `download` reports, from its thread, as words and a share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = self._total = 0
        self._reported_s = clock()
        # Times and bytes, oldest first.
        self._seen: deque[tuple[float, int]] = deque()

    def report(self, done: int, total: int) -> None:
        """Takes the bytes here, and all of them."""
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= _STEP_S:
            self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _SPAN_S:
            self._seen.popleft()
        # Last: `describe` runs in another thread, and reads nothing without a total.
        self._done, self._reported_s, self._total = done, now, total

    def describe(self) -> dict[str, Any]:
        """The parts of a change's state that this knows."""
        if not self._total:
            return {"detail": "", "share": None}
        detail = say("{done} of {total}", done=size(self._done), total=size(self._total))
        speed = self._bytes_per_s()
        if self._clock() - self._reported_s > _SILENT_S:
            detail = say("{amount} · waiting for the network", amount=detail)
        elif speed:
            left = _time_left((self._total - self._done) / speed)
            detail = say("{amount} · {speed}/s · {left}", amount=detail, speed=size(speed), left=left)
        return {"detail": detail, "share": self._done / self._total}

    def _bytes_per_s(self) -> float | None:
        """None if it is too early to tell."""
        then, done = self._seen[0]
        seconds = self._clock() - then
        return max(self._done - done, 0) / seconds if seconds >= _LEAST_S else None


def _time_left(seconds: float) -> Said:
    if seconds < 60:
        return say("less than a minute left")
    minutes = round(seconds / 60)
    if minutes < 90:
        return say("{n} {n|minute|minutes} left", n=minutes)
    return say("{n} {n|hour|hours} left", n=round(minutes / 60))
