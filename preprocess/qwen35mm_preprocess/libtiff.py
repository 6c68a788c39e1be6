"""Logs libtiff's errors with the file's name. By default, libtiff writes them to standard error.

Pillow has no option for this, so libtiff's own function is called, for the whole process. It is looked up among the
libraries linked to Pillow's C extension. If it isn't found, nothing changes; on Windows, libtiff is linked statically.
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

# A hostile file can cause any number of errors. The first few are enough.
_MAX_LINES, _MAX_LINE_BYTES = 5, 500
# void (*)(const char* module, const char* format, va_list): on all platforms of Pillow, a va_list is passed as a
# pointer or a word, so it can be forwarded as a pointer.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


class _Reading(threading.local):
    """The file that a thread reads. libtiff reports errors in the calling thread."""

    name = "a picture"
    num_lines = 0


_reading = _Reading()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Logs libtiff's errors in this thread under this file name."""
    _take_lines()
    before, _reading.name, _reading.num_lines = _reading.name, name, 0
    try:
        yield
    finally:
        _reading.name = before


def has_failed() -> bool:
    """Whether libtiff has reported an error about the file that this thread reads; False where it can't be asked."""
    return _reading.num_lines > 0


def leave_lines() -> None:
    """Makes libtiff write to standard error from now on, for a process that has its own for this."""
    give_back = _take_lines()
    if give_back is not None:
        give_back()


@functools.lru_cache(maxsize=1)
def _take_lines() -> Callable[[], object] | None:
    """Logs libtiff's errors; returns the function that undoes it, or None if impossible. Pillow disables warnings."""
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
        # Pillow uses this name for every file.
        logger.info("%s: %s", _reading.name, said if where in ("", "tempfile.tif") else f"{where}: {said}")

    handler = _Handler(log)
    before = set_handler(ctypes.cast(handler, ctypes.c_void_p))

    def give_back() -> None:
        set_handler(before)

    # Keeps the handler alive: libtiff may call it until the program ends.
    give_back.handler = handler

    return give_back
