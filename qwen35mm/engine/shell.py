"""The asynchronous shell around the engine: one worker thread steps it, any number of tasks read from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from qwen35mm.engine.engine import Engine
from qwen35mm.engine.events import Event, Finished
from qwen35mm.engine.request import Request, StepOutput
from qwen35mm.errors import EngineError, Qwen35mmError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Runs an `Engine` in a thread of its own.

    All calls into the engine happen in that thread; callers hand it commands. `close()` ends the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._listeners: dict[str, Callable[[Event | Qwen35mmError], None]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="qwen35mm-engine", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do."""
        return self._idle.is_set()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until the engine has nothing to do; False where the time was over first."""
        return self._idle.wait(timeout_s)

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """The request's events up to its `Finished`. Leaving the iterator cancels the request within one step.

        Raises:
            RequestError: the engine refuses the request.
            EngineError: the engine failed on it, or is closed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | Qwen35mmError] = asyncio.Queue()

        def deliver(event: Event | Qwen35mmError) -> None:
            # A closed loop has no reader left; its requests are cancelled by their own iterators.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._submit(lambda: self._add(request, deliver))
        try:
            while True:
                event = await events.get()
                if isinstance(event, Qwen35mmError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            with contextlib.suppress(EngineError):
                self._submit(lambda: self._cancel(request.id))

    def close(self) -> None:
        """Ends the thread after the step in hand; running requests end with an `EngineError`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _submit(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise EngineError("The engine is shut down. Start the program again.")
            self._idle.clear()
            self._commands.append(command)
            self._wake.notify()

    def _add(self, request: Request, deliver: Callable[[Event | Qwen35mmError], None]) -> None:
        try:
            self._engine.add(request)
        except Qwen35mmError as error:
            deliver(error)
        else:
            self._listeners[request.id] = deliver

    def _cancel(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def _run(self) -> None:
        try:
            while self._take_commands():
                for output in self._engine.step():
                    self._deliver(output)
            reason = "The engine was shut down."
        except Exception:
            # `Engine.step` answers for what goes wrong in a request; what comes through is a bug of ours.
            logger.exception("the engine's thread failed")
            reason = "The engine failed and has stopped; the log has the details. Start the program again."
        with self._wake:
            self._closing = True
            self._commands.clear()
        for deliver in self._listeners.values():
            deliver(EngineError(reason))
        self._idle.set()

    def _take_commands(self) -> bool:
        """Carries out what callers asked for; sleeps while there is nothing to do. False when it is time to end."""
        while True:
            with self._wake:
                while not (self._commands or self._engine.has_work or self._closing):
                    self._idle.set()
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
                if self._closing:
                    return False
            for command in commands:
                command()
            if self._engine.has_work:
                return True

    def _deliver(self, output: StepOutput) -> None:
        deliver = self._listeners.get(output.request_id)
        if deliver is None:
            return
        if isinstance(output.event, (Finished, Qwen35mmError)):
            del self._listeners[output.request_id]
        deliver(output.event)
