"""What libtiff says of a file goes to the log, with the file's name; by itself it writes to the standard error.

Pillow has no way to ask for that, so libtiff's own function is called, for the whole process. It is found among the
libraries that Pillow's part in C was linked with. Where it isn't, as on Windows, where libtiff is a part of that file,
everything stays as it was.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image

logger = logging.getLogger(__name__)

# A hostile file has a line for each of its pieces; more of them are of no use.
_MAX_LINES, _MAX_LINE_BYTES = 5, 500
# void (*)(const char* module, const char* format, va_list): on every platform that Pillow is built for, a va_list is
# passed as a pointer or as a word, so that it can be handed on as one.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


class _Reading(threading.local):
    """What a thread is at; libtiff says something in the thread that called it."""

    name = "a picture"
    num_lines = 0


_reading = _Reading()


@contextmanager
def named(name: str) -> Iterator[None]:
    """What libtiff says in this thread is about the file of this name."""
    _take_lines()
    before, _reading.name, _reading.num_lines = _reading.name, name, 0
    try:
        yield
    finally:
        _reading.name = before


def leave_lines() -> None:
    """Lets libtiff write to the standard error, for good: in a process that has one of its own for that."""
    give_back = _take_lines()
    if give_back is not None:
        give_back()


@functools.lru_cache(maxsize=1)
def _take_lines() -> Callable[[], object] | None:
    """Has libtiff's errors logged; what undoes that, None where it can't be done. Pillow switches warnings off."""
    try:
        set_handler = ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler
        write = ctypes.CDLL(None).vsnprintf
    except (OSError, TypeError, AttributeError):
        return None
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    write.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p)

    def log(module: bytes | None, form: bytes, values: int | None) -> None:
        _reading.num_lines += 1
        if _reading.num_lines > _MAX_LINES or not logger.isEnabledFor(logging.INFO):
            return
        text = ctypes.create_string_buffer(_MAX_LINE_BYTES)
        write(text, _MAX_LINE_BYTES, form, values)
        said = "".join(char if char.isprintable() else " " for char in text.value.decode(errors="replace"))
        where = (module or b"").decode(errors="replace")
        # Pillow calls every file so.
        logger.info("%s: %s", _reading.name, said if where in ("", "tempfile.tif") else f"{where}: {said}")

    handler = _Handler(log)
    before = set_handler(ctypes.cast(handler, ctypes.c_void_p))

    def give_back() -> None:
        set_handler(before)

    # libtiff calls it for as long as this program runs.
    give_back.handler = handler

    return give_back
