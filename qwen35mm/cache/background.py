"""Where work that waits for files is done: the caches hand functions over and never wait themselves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    """Runs functions elsewhere, readers and writers each in the order in which they came."""

    def read(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function that somebody waits for."""
        ...

    def write(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function that nobody waits for."""
        ...


class Inline:
    """Runs them at once, in the caller's thread."""

    def read(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def write(self, function: Callable[[], T]) -> Future[T]:
        return self.read(function)
