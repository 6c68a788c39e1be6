"""Records a function's operations and replays them without its Python code, like a CUDA graph for a CPU's decode step.

A step of 0.8B makes two hundred calls of compiled functions, and the modules around them take milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35mm_kernels.cpu.native.library import Call, noted

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Torch operations that can be recorded. If host code depends on a tensor's values, it needs other operations, so the
# function isn't recorded.
_COPIES = {"_to_copy", "clone", "contiguous", "to"}
_GLUE = _COPIES | {"argmax", "cos", "embedding", "eq", "index", "lt", "mul", "sin", "where", "zeros"}
_IN_PLACE = {"add_", "copy_", "fill_", "index_put_", "mul_", "sub_"}


# Bytes: of one piece of an arena, unless a tensor is larger, and of a tensor's alignment.
_PIECE, _ALIGNED = 1 << 20, 64


class Arena:
    """Memory that several recordings share for what their operations write, if only one of them runs at a time.

    A recording's results stay until another one runs.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._index = self._used = 0

    @property
    def num_bytes(self) -> int:
        """Allocated by now."""
        return sum(map(len, self._pieces))

    def begin(self) -> None:
        """Begins another recording, from the start of the memory."""
        self._index = self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor."""
        size = like.untyped_storage().nbytes()
        while self._index < len(self._pieces) and self._used + size > len(self._pieces[self._index]):
            self._index, self._used = self._index + 1, 0
        if self._index == len(self._pieces):
            self._pieces.append(torch.empty(max(size, _PIECE), dtype=torch.uint8))
        taken = self._pieces[self._index][self._used : self._used + size]
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return taken.view(like.dtype).as_strided(like.shape, like.stride(), taken.storage_offset() // like.itemsize)


class Recording:
    """The calls in order, with the tensors that they read and write, which stay allocated.

    A replay uses the same memory: write new inputs to the old input tensors and read results from the old outputs.
    """

    def __init__(self, calls: list[Call], tensors: list[torch.Tensor]) -> None:
        self._calls, self._tensors = calls, tensors

    @torch.inference_mode()
    def run(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)


@torch.inference_mode()
def record(function: Callable[[], object], arena: Arena | None = None) -> Recording | None:
    """Runs a function, which must depend only on tensors.

    Args:
        arena: shared with recordings that never run at the same time.

    Returns:
        The recording; None if an operation can't be recorded.
    """
    assert noted.calls is None, "a recording in a recording"
    recorder = _Recorder(arena or Arena())
    noted.calls = recorder.calls
    try:
        with recorder:
            function()
    finally:
        noted.calls = None
    return None if recorder.strange else Recording(recorder.calls, recorder.tensors)


class _Recorder(TorchDispatchMode):
    """Records torch's operations between the compiled ones.

    Attributes:
        tensors: all new tensors, which keeps their memory from being reused.
        strange: operations that can't be recorded.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        arena.begin()
        self.calls: list[Call] = []
        self.tensors: list[torch.Tensor] = []
        self.strange: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch imports its compiler at the first operation, which delays the first reply by a second.
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
            if name in _EMPTY:
                out = self._arena.take(out)
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
