"""Separate thread pools for a page's kinds of work, so that one person's slow work delays nobody else's answers.

Python's default pool is left to the model library and to remote servers; nothing of a page waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Threads for one kind of work; they start with the first call.

    Args:
        name: of its threads.
        num_threads: most threads at a time.
        each: most threads at a time for one named person; None for all.
    """

    def __init__(self, name: str, num_threads: int, each: int | None = None) -> None:
        self._name = name
        self._num_threads = num_threads
        self._each = each
        self._process = 0
        self._executor: ThreadPoolExecutor | None = None
        self._turns: WeakValueDictionary[tuple[int, str], asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """Calls the function in a thread, returns its result. Cancelling prevents only a call that hasn't started."""
        return await asyncio.wrap_future(self._begin(function, *args, **named))

    async def run_for(self, person: str | None, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """`run` with at most `each` calls at a time for one person; other people's calls come before the rest.

        Args:
            person: None if there is only one.
        """
        if person is None or self._each is None:
            return await self.run(function, *args, **named)
        # A semaphore belongs to one event loop; a process may serve in several.
        key = (id(asyncio.get_running_loop()), person)
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = asyncio.Semaphore(self._each)
        await turn.acquire()
        try:
            running = self._begin(function, *args, **named)
        except BaseException:
            turn.release()
            raise
        # A thread goes on without whoever waited for it, and until then it is theirs.
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(turn.release))
        return await asyncio.wrap_future(running)

    def _begin(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        return self._threads().submit(contextvars.copy_context().run, function, *args, **named)

    def _threads(self) -> ThreadPoolExecutor:
        # A forked process has none of its parent's threads.
        if self._executor is None or self._process != os.getpid():
            self._process = os.getpid()
            self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"qwen35mm-{self._name}")
        return self._executor


# Answers are saved 15 times a second, in a database with one writer: more threads would only wait for it.
SAVING = Pool("saving", 2)
# Short database queries: a conversation, a list, a setting.
REQUESTS = Pool("requests", 8)
# Searches all texts, which may take long: one search a person.
SEARCH = Pool("search", 2, each=1)
# Plans, counts and stores what is sent; reads a video's packets.
TURNS = Pool("turns", 4, each=2)
# Counts a draft's cost while it is typed: the least urgent work.
DRAFTS = Pool("drafts", 2, each=1)
# A prompt's pixels; decoders have their own threads, and each medium may take hundreds of MiB.
MEDIA = Pool("media", 4, each=3)
# Renders and tokenizes prompts after their media; must not wait for another's media.
PROMPTS = Pool("prompts", 4, each=2)
# Checks schemas, each in a child process, and compiles them: up to seconds for a malicious one.
GRAMMARS = Pool("grammars", 2, each=1)
# Writes bytes as they arrive and detects their type: always short.
UPLOADS = Pool("uploads", 4)
# Hashes passwords, which is slow on purpose and takes 32 MiB each.
PASSWORDS = Pool("passwords", 2)
# Waits until the engine is idle.
IDLE = Pool("idle", 1)
# Reads PDFs, each in a process with up to 1 GiB, for up to a minute.
DOCUMENTS = Pool("documents", 2, each=1)
# A page requests many at once: a video's first frame, or a whole picture.
THUMBNAILS = Pool("thumbnails", 2, each=1)
# All sampled frames of a video, decoded as for a prompt: seconds, or a long video's whole time limit. Or one frame in
# its own size, decoded from the key frame before it.
STRIPS = Pool("strips", 2, each=1)
# Exports and imports of whole histories, which take minutes.
ARCHIVES = Pool("archives", 2, each=1)


class Asker:
    """Someone who waits for work; when they leave, the work started for them ends. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False
        self._ends: list[Callable[[], object]] = []

    def leave(self) -> None:
        """Ends their running work and whatever starts later."""
        with self._lock:
            self._gone = True
            ends = list(self._ends)
        for end in ends:
            end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], Any]) -> Iterator[None]:
        """Calls `end`, from another thread, if they leave within the block; at once if they have left."""
        with self._lock:
            self._ends.append(end)
            gone = self._gone
        if gone:
            end()
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
