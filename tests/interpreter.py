"""Triton's interpreter, mended for what is installed beside it, and without what takes most of its time."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any


@functools.cache
def prepare_interpreter() -> None:
    """Makes interpreted kernels run, and several times as fast."""
    from triton.language import core
    from triton.runtime import interpreter

    _accept_arrays_of_one_element(interpreter)
    _patch_once(interpreter)
    _describe_types_once(interpreter, core)


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


def _describe_types_once(interpreter: Any, core: Any) -> None:
    """Has equal types share their description, and all tensors of a type theirs.

    The interpreter makes types anew for every result, and for each a dictionary of all of NumPy's.
    """
    described: dict[Any, dict[str, Any]] = {}
    make_type, make_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def describe_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in described:
            make_type(self, element_ty, shape)
            described[key] = vars(self).copy()
        vars(self).update(described[key])

    def describe_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in described:
            make_tensor(self, handle, type)
            described[type.name] = vars(self).copy()
        vars(self).update(described[type.name], handle=handle)

    def find_dtype_once(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    core.block_type.__init__, core.tensor.__init__ = describe_type, describe_tensor
    interpreter._get_np_dtype = find_dtype_once
