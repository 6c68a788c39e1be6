"""What a run did so far; read by the progress bar while the run writes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Numbers of items, unless a name says otherwise. Each item that was found ends in exactly one of the fates.

    Attributes:
        num_found: items that the scan gave.
        scanned: whether the scan is over.
        num_captioned: the model wrote a caption. A fate.
        num_shared: took the caption of a near-duplicate, or of the same bytes under another name. A fate.
        num_recalled: a kept caption went to an output that lacked it. A fate.
        num_present: every output had it. A fate.
        num_kept: somebody else's caption stays. A fate.
        num_failed: in this run. A fate.
        num_failed_before: the same work failed, in an earlier run or for another item of this one, and isn't tried
            again. A fate.
        num_left: a stop came first. A fate.
        num_prompt_tokens, num_generated_tokens: of this run's captions.
        num_retries: replies that weren't as they had to be.
        slots_idle_s: seconds that slots waited for media, added up over the slots.
        slots_s: seconds that slots were there, added up.
    """

    num_found: int = 0
    scanned: bool = False
    num_captioned: int = 0
    num_shared: int = 0
    num_recalled: int = 0
    num_present: int = 0
    num_kept: int = 0
    num_failed: int = 0
    num_failed_before: int = 0
    num_left: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_retries: int = 0
    slots_idle_s: float = 0.0
    slots_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def num_done(self) -> int:
        """Items whose caption was written in this run."""
        return self.num_captioned + self.num_shared + self.num_recalled

    @property
    def num_skipped(self) -> int:
        """Items that needed nothing."""
        return self.num_present + self.num_kept

    @property
    def num_over(self) -> int:
        """Items that met their fate."""
        return self.num_done + self.num_skipped + self.num_failed + self.num_failed_before + self.num_left

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started_s

    @property
    def items_per_s(self) -> float:
        """Captions that the model wrote, a second."""
        return self.num_captioned / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end, if the rest is like what was; None while the scan goes on or nothing was captioned."""
        if not self.scanned or not self.num_captioned:
            return None
        num_met = self.num_over
        return (self.num_found - num_met) * self.elapsed_s / num_met if num_met else None
