"""Stops at every step of a run: what goes to the disk is counted, and at a chosen count something happens.

A step is before and after a transaction of the manifest, before a file's bytes are put on the disk, where a kill may
also have torn them, and before a file gets or loses a name. The process that is killed is forked from the test's.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.errors import OutputError

Step = Literal["begin", "committed", "sync", "replace", "link", "unlink"]
_KILLED = 99

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that is killed is made by a fork")


@contextlib.contextmanager
def _counted(at_step: Callable[[Step, int], None]) -> Iterator[None]:
    """Calls `at_step` at every step; the number is a descriptor before `sync`, else 0."""
    with pytest.MonkeyPatch.context() as patch:
        fsync, writing = os.fsync, Manifest.writing

        def counted_fsync(descriptor: int) -> None:
            at_step("sync", descriptor)
            fsync(descriptor)

        @contextlib.contextmanager
        def counted_writing(self: Manifest, **options: bool) -> Iterator[Any]:
            at_step("begin", 0)
            with writing(self, **options) as connection:
                yield connection
            at_step("committed", 0)

        def before(function: Callable[..., Any], kind: Step) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                at_step(kind, 0)
                return function(*arguments, **options)

            return call

        patch.setattr(os, "fsync", counted_fsync)
        patch.setattr(Manifest, "writing", counted_writing)
        patch.setattr(Path, "replace", before(Path.replace, "replace"))
        patch.setattr(Path, "unlink", before(Path.unlink, "unlink"))
        patch.setattr(os, "link", before(os.link, "link"))
        yield


def killed_at(step: int, work: Callable[[], object], *, torn_bytes: int = 0) -> bool:
    """Runs `work` in a process that ends at a step, as kill -9 ends it; False where `work` came to its end before.

    Args:
        torn_bytes: so many bytes at the end of a file that was about to be put on the disk are lost.
    """
    child = os.fork()
    if child == 0:
        gc.disable()  # a collection would touch, and so copy, all that the tests' process has in memory
        status = 1
        try:
            numbers = itertools.count()

            def at_step(kind: Step, descriptor: int) -> None:
                if next(numbers) < step:
                    return
                if kind == "sync" and torn_bytes and stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
                    os.ftruncate(descriptor, max(0, found.st_size - torn_bytes))
                os._exit(_KILLED)

            with _counted(at_step):
                work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, _KILLED), "the child failed by itself"
    return status == _KILLED


def full_at(step: int, work: Callable[[], object]) -> bool:
    """Runs `work` on a disk that is full from a step on; False where `work` came to its end before."""
    numbers = itertools.count()

    def at_step(kind: Step, _: int) -> None:
        if next(numbers) < step or kind in ("committed", "unlink"):
            return
        if kind == "begin":
            raise OutputError("The disk is full.", errno.ENOSPC)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _counted(at_step):
        try:
            work()
        except OutputError as error:
            if error.errno != errno.ENOSPC:
                raise
            return True
    return False


def stops(stride: int) -> Iterator[tuple[int, int]]:
    """Steps, so far apart, each with the bytes that are torn there."""
    for step in itertools.count(0, stride):
        yield step, step % 2 * 5
        if stride == 1:
            yield step, (step + 1) % 2 * 5
