"""How often to make a request, and how long to wait between two attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from qwen35mm.backends.remote.connection import Connection
from qwen35mm.backends.remote.deadline import Deadline
from qwen35mm.backends.remote.faults import Fault, delay_s
from qwen35mm.backends.remote.reply import Reply
from qwen35mm.backends.remote.request import without
from qwen35mm.contract import Event, Finished

_T = TypeVar("_T")


class Attempts:
    """Repeats requests to a server where that can help.

    Args:
        most: attempts of one request.
        sleep, jitter: how to wait between attempts, and a number from 0 to 1 for each wait.
    """

    def __init__(
        self,
        connection: Connection,
        most: int,
        sleep: Callable[[float], Awaitable[None]],
        jitter: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._most = most
        self._jitter = jitter
        self.sleep = sleep

    async def make(self, request: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """Makes a request, repeating it while that can help. Raises the last Fault."""
        num_failed = 0
        while True:
            try:
                return await request()
            except Fault as fault:
                num_failed += 1
                pause_s = self.pause_s(fault, num_failed, deadline)
            await self.sleep(pause_s)

    async def reply(
        self,
        path: str,
        body: bytes,
        about: dict[str, Any],
        begin: Callable[[dict[str, Any]], Reply],
        learn: Callable[[Fault, dict[str, Any]], bool],
        deadline: Deadline,
        *,
        whole: bool,
    ) -> AsyncGenerator[Event, None]:
        """The events of a streamed reply; repeats the request while that can help.

        Args:
            path, body: the request.
            about: the request's fields that a refusal may be about.
            begin: makes the Reply that collects an attempt with these fields.
            learn: whether a fault is only about fields that can be left out.
            whole: whether to yield the text only when it is complete. Then a reply that breaks off is requested again.

        Raises:
            Fault: the last attempt's.
        """
        num_failed = 0
        while True:
            reply = begin(about)
            try:
                async with contextlib.aclosing(self._connection.ask(path, body, reply, deadline)) as pieces:
                    async for piece in pieces:
                        if not whole:
                            yield piece
                for piece in reply.end():
                    if not whole:
                        yield piece
                break
            except Fault as fault:
                fault.was_begun = reply.has_text and not whole
                if not fault.was_begun and learn(fault, about):
                    about = {name: value for name, value in about.items() if name not in fault.unknown}
                    body = await asyncio.to_thread(without, body, fault.unknown)
                    continue
                num_failed += 1
                pause_s = self.pause_s(fault, num_failed, deadline)
            await self.sleep(pause_s)
        if whole:
            for piece in reply.texts():
                yield piece
        yield Finished(reply.result())

    def pause_s(self, fault: Fault, num_failed: int, deadline: Deadline) -> float:
        """Seconds until the next attempt. Raises the fault if another attempt can't help or isn't allowed."""
        self._connection.check_open()
        if not fault.is_passing or fault.was_begun:
            raise fault
        pause_s = delay_s(num_failed, self._jitter(), fault.retry_after_s)
        if num_failed >= self._most or pause_s >= deadline.left_s():
            fault.num_attempts = num_failed
            raise fault
        return pause_s
