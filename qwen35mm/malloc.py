"""Memory that was freed, back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_freed() -> None:
    """Gives freed memory back: glibc otherwise keeps hundreds of MiB. Does nothing with another C library."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
