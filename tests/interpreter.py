"""Triton's interpreter, mended for what is installed beside it, and without what takes most of its time."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any


@functools.cache
def prepare_interpreter() -> None:
    """Makes interpreted kernels run, and several times as fast."""
    from triton.runtime import interpreter

    _accept_arrays_of_one_element(interpreter)
    _patch_once(interpreter)


def _accept_arrays_of_one_element(interpreter: Any) -> None:
    """Lets interpreted kernels count to a number that they have loaded or were given.

    The interpreters of Triton 3.5 and 3.6 hold scalars in arrays [1], and NumPy 2.4 makes no whole number of one.
    Later ones know that.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index


def _patch_once(interpreter: Any) -> None:
    """Has the language's functions stay replaced by interpreted ones.

    The interpreter replaces all of them at every launch and at every call of one kernel function by another. Nothing
    else asks for them in a process that interprets.
    """
    patch = interpreter._patch_lang
    stays = SimpleNamespace(restore=lambda: None)
    patched: set[str] = set()

    def patch_for(function: Any) -> SimpleNamespace:
        # What is replaced are the modules that a function sees, by its own module's names.
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return stays

    interpreter._patch_lang = patch_for
