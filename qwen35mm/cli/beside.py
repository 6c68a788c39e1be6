"""`qwen35mm` as another program's child, such as the review page's: it ends as by Ctrl-C when its input ends.

So it never outlives that program, however that one ends.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from typing import IO

from qwen35mm.cli import main as run


def main() -> None:
    end_with(sys.stdin.buffer)
    run()


def end_with(stream: IO[bytes]) -> None:
    """Interrupts the main thread at the end of a stream."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while stream.read(1 << 16):
                pass
        _thread.interrupt_main()

    threading.Thread(target=watch, daemon=True).start()
