"""Triton's interpreter, mended for what is installed beside it."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def accept_arrays_of_one_element() -> None:
    """Lets interpreted kernels count to a number that they have loaded or were given.

    The interpreters of Triton 3.5 and 3.6 hold scalars in arrays [1], and NumPy 2.4 makes no whole number of one.
    Later ones know that.
    """
    from triton.runtime import interpreter

    patch_tensor: Any = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index
