"""The threads that a page's work runs in, in pools apart: what is slow for one person holds up nobody else's answers.

Python's own default pool stays for what the model library and servers elsewhere do, and nothing of a page waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Threads for one kind of work; they begin with the first.

    Args:
        name: of its threads.
        num_threads: the most that work at one time.
        each: the most that one person has of them at one time, where people are named; None for all.
    """

    def __init__(self, name: str, num_threads: int, each: int | None = None) -> None:
        self._name = name
        self._num_threads = num_threads
        self._each = each
        self._process = 0
        self._executor: ThreadPoolExecutor | None = None
        self._turns: WeakValueDictionary[tuple[int, str], asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """What the function returns or raises, called in a thread. If this is cancelled, it isn't called any more; what
        was begun goes on."""
        call = functools.partial(contextvars.copy_context().run, function, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads(), call)

    async def run_for(self, person: str | None, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """`run`, with no more at one time for one person than `each`; the others' work comes before the rest of it.

        Args:
            person: None where there is only one.
        """
        if person is None or self._each is None:
            return await self.run(function, *args, **named)
        # A semaphore is of one event loop; a process may serve in several.
        key = (id(asyncio.get_running_loop()), person)
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = asyncio.Semaphore(self._each)
        async with turn:
            return await self.run(function, *args, **named)

    def _threads(self) -> ThreadPoolExecutor:
        # A process that was forked has no threads of its parent's.
        if self._executor is None or self._process != os.getpid():
            self._process = os.getpid()
            self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"qwen35mm-{self._name}")
        return self._executor


# Answers are written 15 times a second, by a database with one writer: more threads would only wait for it.
SAVING = Pool("saving", 2)
# Short questions to the database: a conversation, a list, a setting.
REQUESTS = Pool("requests", 8)
# All texts are looked through, which takes long where there are many: one search a person.
SEARCH = Pool("search", 2, each=1)
# What is sent is planned, counted and stored: a video's packets are read for it.
TURNS = Pool("turns", 4, each=2)
# What a draft costs, asked for while it is typed: the last thing to wait for.
DRAFTS = Pool("drafts", 2, each=1)
# Pixels of a prompt; decoders have threads of their own, and each medium may take hundreds of MiB.
MEDIA = Pool("media", 4)
# Rendering and tokenizing of prompts, which comes after their media, and must not wait for another's.
PROMPTS = Pool("prompts", 4)
# Schemas are checked, in a child process each, and compiled: up to seconds where somebody means harm.
GRAMMARS = Pool("grammars", 2, each=1)
# Bytes are written as they come, and looked at for what they are: never long.
UPLOADS = Pool("uploads", 4)
# Hashes of passwords, which are slow by intent and take 32 MiB each.
PASSWORDS = Pool("passwords", 2)
# Waits for the engine to have nothing to do.
IDLE = Pool("idle", 1)
# PDFs: each is a process of up to 1 GiB, for up to a minute.
DOCUMENTS = Pool("documents", 2, each=1)
# A page asks for many at once: the first frame of a video each, or a whole picture.
THUMBNAILS = Pool("thumbnails", 2, each=1)
# All sampled frames of a video, decoded as for a prompt: seconds, and for a long one its whole time limit. Or a single
# one in its own size, with all from the key frame before it.
STRIPS = Pool("strips", 2, each=1)
# Exports and imports of whole histories, which take minutes.
ARCHIVES = Pool("archives", 2, each=1)


class Asker:
    """Who waits for a piece of work: when they are gone, what was begun for them ends. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False
        self._ends: list[Callable[[], object]] = []

    def leave(self) -> None:
        """Ends what runs for them, and whatever begins later."""
        with self._lock:
            self._gone = True
            ends = list(self._ends)
        for end in ends:
            end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], Any]) -> Iterator[None]:
        """Has `end` called, from another thread, when they leave within the block; at once where they are gone."""
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
