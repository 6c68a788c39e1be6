"""What a function computes, noted once and computed again without its Python: a CPU's graph of a decode step.

A step of 0.8B is two hundred calls of compiled functions, and the modules around them take milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35mm_kernels.cpu.native.library import Call, noted

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# What torch may do beside the compiled operations. Whatever a function does on the host by what it finds in a tensor,
# it does with other operations than these: then it isn't recorded.
_COPIES = {"_to_copy", "clone", "contiguous", "to"}
_GLUE = _COPIES | {"cos", "embedding", "eq", "index", "lt", "mul", "sin", "where", "zeros"}
_IN_PLACE = {"copy_", "fill_", "index_put_"}


class Recording:
    """Calls in their order, with the memory that they read and write, which is kept.

    What the function reads is read where it lay: new inputs are written there, and results lie where they lay.
    """

    def __init__(self, calls: list[Call], tensors: list[torch.Tensor]) -> None:
        self._calls, self._tensors = calls, tensors

    @torch.inference_mode()
    def run(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)


@torch.inference_mode()
def record(function: Callable[[], object]) -> Recording | None:
    """Runs a function, which must depend on nothing but tensors.

    Returns:
        What it computed; None where torch did what can't be recorded.
    """
    assert noted.calls is None, "a recording in a recording"
    recorder = _Recorder()
    noted.calls = recorder.calls
    try:
        with recorder:
            function()
    finally:
        noted.calls = None
    return None if recorder.strange else Recording(recorder.calls, recorder.tensors)


class _Recorder(TorchDispatchMode):
    """Notes torch's operations among the compiled ones.

    Attributes:
        tensors: all that were made, so that their memory is nobody else's.
        strange: operations that can't be recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.tensors: list[torch.Tensor] = []
        self.strange: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else PyTorch imports its compiler at the first operation: a second of the first answer.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), func.overloadpacket.__name__
        if name in _IN_PLACE:
            self.calls.append((functools.partial(func, **kwargs), args))
        elif not isinstance(out, torch.Tensor):
            if not func.is_view:
                self.strange.add(name)
        elif not any(isinstance(value, torch.Tensor) and _share(out, value) for value in args):
            self.tensors.append(out)
            if name in _COPIES:
                self.calls.append((out.copy_, args[:1]))
            elif name in _GLUE:
                self.calls.append((functools.partial(_again, out, func, kwargs), args))
            elif name not in _EMPTY:
                self.strange.add(name)
        elif not func.is_view:
            self.strange.add(name)
        return out


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _again(out: torch.Tensor, func: Any, kwargs: dict[str, Any], *args: Any) -> None:
    out.copy_(func(*args, **kwargs))
