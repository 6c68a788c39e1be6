"""How a server ends: the signals for it, and how streams learn of it. Every end is as clean as Ctrl-C."""

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
        """Lets the code that answers this request find this object."""
        scope[_SCOPE] = self

    @staticmethod
    def of(scope: Mapping[str, Any]) -> Ending:
        """The Ending of the request's server; without one, an Ending that never comes."""
        return scope.get(_SCOPE) or Ending()


@contextlib.contextmanager
def end_signals(handler: Callable[..., object], *others: signal.Signals) -> Iterator[None]:
    """Handles SIGTERM, SIGHUP (a closed terminal) and `others` with `handler`. Only the main thread may set signals."""
    # Windows has no SIGHUP; nohup ignores it, which must stay so.
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
    """A signal handler that does the same as Ctrl-C."""
    raise KeyboardInterrupt


# Python handles a signal between two of its own steps. A signal that arrives just as the main thread falls asleep would
# wait for another one, so the thread wakes now and then.
_WAKE_S = 1.0


def wait_for_the_end() -> NoReturn:
    """Waits until a handler raises."""
    while True:
        time.sleep(_WAKE_S)
