"""How a server ends: by a signal, whenever it comes."""

from __future__ import annotations

import signal
import threading

import pytest

from qwen35mm.http import ends
from qwen35mm.http.ends import interrupt, wait_for_the_end

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals for threads here")


def test_a_signal_that_wakes_nobody_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_WAKE_S", 0.2)

    # As one that comes between the last look for signals and the sleep: it is noted, and no system call returns for it.
    def give_up(*_: object) -> None:
        raise TimeoutError

    previous = [signal.signal(signal.SIGHUP, interrupt), signal.signal(signal.SIGALRM, give_up)]
    in_another_thread = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGHUP))
    signal.alarm(60)
    in_another_thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for_the_end()
    finally:
        signal.alarm(0)
        for number, handler in zip((signal.SIGHUP, signal.SIGALRM), previous, strict=True):
            signal.signal(number, handler)
        in_another_thread.join()
