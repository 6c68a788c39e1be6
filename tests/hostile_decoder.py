"""The program of a process that reads media, but what happens over a medium may be in its name, or in its last bytes.

Tests that use the fixture `hostile_decoders` start this one.
"""

from __future__ import annotations

import base64
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen35mm.decoding import Answer, child
from qwen35mm_preprocess.say import english

COMMAND = (sys.executable, "-c", "from tests.hostile_decoder import main; main()")
STUCK, CRASH, BOMB, NONSENSE, CHATTY, RUDE = b"-stuck-", b"-crash-", b"-bomb-", b"-nonsense-", b"-chatty-", b"-rude-"
# Not before it is decoded.
LATE_CRASH = b"-late crash-"


def main() -> None:
    real = child.work

    def work(asked: child.Work, progress: Callable[[int, int], None]) -> Answer:
        about = english(asked.name).encode() + b" " + _end_of(asked.arguments[0])
        if CRASH in about or (LATE_CRASH in about and asked.function.__name__ == "_prepare"):
            os.abort()
        if STUCK in about:
            time.sleep(1000)
        if RUDE in about:
            # As a library that keeps the interpreter's lock.
            ctypes.PyDLL(None).sleep(1000)
        if NONSENSE in about:
            return Answer({"size": [1 << 40, 1 << 40]})
        if CHATTY in about:
            print("a library says something", flush=True)
            os.write(1, b"and another")
        if BOMB in about:

            def bomb(*_: Any, **__: Any) -> Answer:
                held = []
                while True:
                    # Of zeros, which take room and no memory.
                    held.append(bytes(64 << 20))

            return real(asked._replace(function=bomb), progress)
        return real(asked, progress)

    child.work = work
    child.main()


def _end_of(source: Any) -> bytes:
    if isinstance(source, Path):
        source = source.read_bytes()
    if isinstance(source, str):
        source = base64.b64decode(source.partition(",")[2])
    return source[-32:] if isinstance(source, bytes) else b""
