"""The end of a server: the signals that ask for it, and how streams learn of it. Each end is as clean as Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

_SCOPE = "qwen35mm.ending"


class Ending:
    """Whether a server is ending. Requests find it in their scope."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def enter(self, scope: Any) -> None:
        """Has what answers this request find it."""
        scope[_SCOPE] = self

    @staticmethod
    def of(scope: Mapping[str, Any]) -> Ending:
        """The one of a request's server; one that never comes where nobody has said."""
        return scope.get(_SCOPE) or Ending()


@contextlib.contextmanager
def end_signals(handler: Callable[..., object], *others: signal.Signals) -> Iterator[None]:
    """Has `handler` answer what a service manager, or closing the terminal, sends, and `others`; in the main thread,
    since no other may set signals."""
    # Windows has no SIGHUP; nohup ignores it, and that stands.
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    taken = [number for name in names if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
    is_main = threading.current_thread() is threading.main_thread()
    previous = [(number, signal.signal(number, handler)) for number in (*taken, *others) if is_main]
    try:
        yield
    finally:
        for number, old in previous:
            signal.signal(number, old)


def interrupt(*_: object) -> None:
    """A handler by which a signal is as Ctrl-C."""
    raise KeyboardInterrupt


def wait_for_the_end() -> NoReturn:
    """Waits until a handler raises."""
    # Python answers a signal between two of its own steps. One that comes as the main thread is about to sleep would
    # wait for another to wake it, so it looks up every second.
    while True:
        time.sleep(1.0)
