"""One reply in progress: a task that stores the backend's events, then shows them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.stats import Tally
from qwen35mm.chat.store.records import Call, Node, dump_calls
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.contract import (
    Backend,
    Event,
    Finished,
    GenerationRequest,
    MediaPlanned,
    Progress,
    TextDelta,
    ToolCall,
)
from qwen35mm.errors import (
    ContextTooLongError,
    ConversationDataError,
    NotFoundError,
    Qwen35mmError,
    RequestError,
    StorageError,
    report_bug,
)
from qwen35mm.pools import SAVING
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

# 15 updates a second look fluent and leave the processor to the model.
UPDATE_INTERVAL_S = 1 / 15


class Steps(Protocol):
    """What is done before the model replies: tools are looked up and called."""

    async def run(self, work: Work, reply: Reply) -> None:
        """Puts the results into the work's path and request, and tells the reply how far it is.

        Stores what it did also when it is cancelled or fails.
        """
        ...

    def skip(self, reply: Reply) -> None:
        """In place of `run`: the reply is stopped before it begins."""
        ...


@dataclass(eq=False)
class Work:
    """What a reply is made from.

    Attributes:
        node: the reply's message, already in the store; new text is appended to its text.
        path: the messages in the prompt, for the plans of their media.
        request: for the backend; ends with the reply so far if that is continued. Requests of temporary chats are
            retained in memory only.
        steps: extend `path` and `request` first; None if there is nothing to do.
        digests: of the tools in the request, by their names.
    """

    owner: str
    node: Node
    path: tuple[Node, ...]
    request: GenerationRequest
    steps: Steps | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def conversation_id(self) -> str:
        assert self.request.conversation is not None, "a chat's requests name their conversation"
        return self.request.conversation

    @property
    def temporary(self) -> bool:
        """Whether it must not be written to a disk."""
        return self.request.retain == "memory"


class Reply:
    """One reply in progress. Used only in the event loop.

    Attributes:
        node: the message as written so far.
        shown: the message as stored so far, which is what the page shows.
        progress: progress until the next text; None while text comes.
        doing: what its steps do now; None while the model works.
        num_results: results of calls that it has stored.
        tally: its token counts.
        too_long: whether it failed because its prompt doesn't fit.
        unsaved: why its newest state could not be stored, for the page; None if it is stored, or the message was
            deleted.
        watchers: each is set at every change.

    Args:
        on_done: called once, after the final state is stored.
    """

    def __init__(
        self, work: Work, store: ConversationStore, backend: Backend, on_done: Callable[[Reply], None]
    ) -> None:
        self.work = work
        self.node = self.shown = self._stored = work.node
        self.progress: Progress | None = None
        self.doing: Said | None = None
        self.num_results = 0
        self.tally = Tally()
        self.too_long = False
        self.unsaved: Said | None = None
        self.watchers: set[asyncio.Event] = set()
        self._store = store
        self._backend = backend
        self._on_done = on_done
        self._thinking_since_s: float | None = None
        self._pinned: dict[str, Node] = {}
        self._saving = threading.Lock()
        self._dirty = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begun = self._stopped = False

    @property
    def done(self) -> bool:
        """Whether the reply is complete, stopped or failed, and its final state stored."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Begins the work, in the context of a page's event, by which a Space counts GPU time."""
        if self._task is None:
            self._task = asyncio.create_task(self._work())
            self._task.add_done_callback(self._end)

    async def stop(self) -> None:
        """Stops the work at once and returns when the final state is stored. The text so far stays."""
        self.start()
        assert self._task is not None
        # Cancels only once, since a second time would hit the final save; and only after the first step, since a task
        # that is cancelled before it stores nothing.
        if not self._stopped:
            self._stopped = True
            if self._begun:
                self._task.cancel()
        await asyncio.wait({self._task})

    async def store_missed(self) -> None:
        """Tries again to store the newest state; afterwards `unsaved` is None if that worked."""
        if self.unsaved is not None:
            await self._save()

    async def _work(self) -> None:
        self._begun = True
        saving = asyncio.create_task(self._save_regularly())
        try:
            if not self._stopped:
                await self._follow()
            elif self.work.steps is not None:
                self.work.steps.skip(self)
        except Qwen35mmError as error:
            self.too_long = isinstance(error, ContextTooLongError)
            files = [attachment for node in self.work.path for attachment in node.attachments]
            self.node = replace(self.node, status="failed", error=with_names(said_of(error), files))
        except Exception as error:
            self.node = replace(self.node, status="failed", error=report_bug(logger, "a reply failed", error))
        finally:
            # From here on `stop` waits for the end and cancels nothing.
            self._stopped = True
            saving.cancel()
            self._end_thinking()
            self.progress = self.doing = None
            # A continued reply that got no further keeps its earlier statistics.
            self.node = replace(self.node, stats=self.tally.stats() or self.node.stats)
            if self.node.status == "running":
                self.node = replace(self.node, status="stopped")
            # At shutdown the server cancels every task again; the save must still finish.
            await asyncio.shield(self._save())

    def do(self, words: Said) -> None:
        """Tells what a step does now."""
        self.doing = words
        self._tell()

    def keep(self, result: Node) -> None:
        """Has a call's result stored."""
        self._pinned[result.id] = result
        self.num_results += 1
        self._dirty.set()

    async def _follow(self) -> None:
        if self.work.steps is not None:
            await self.work.steps.run(self.work, self)
            self.doing = None
        events = self._backend.stream(self.work.request)
        try:
            async for event in events:
                self._take(event)
                self._dirty.set()
        finally:
            await events.aclose()

    def _take(self, event: Event) -> None:
        self.tally.take(event)
        if isinstance(event, TextDelta):
            self.progress = None
            if event.channel == "reasoning":
                self._thinking_since_s = self._thinking_since_s or time.monotonic()
                self.node = replace(self.node, reasoning=self.node.reasoning + event.text)
            else:
                self._end_thinking()
                self.node = replace(self.node, text=self.node.text + event.text)
        elif isinstance(event, Progress):
            self.progress = event
        elif isinstance(event, MediaPlanned):
            # They are read. What comes next, a server may not tell for a while.
            self.progress = None
            self._take_plans(event)
        elif isinstance(event, Finished):
            reason = event.result.finish_reason
            status = {"stop": "finished", "length": "length"}.get(reason, "stopped")
            calls = self._own(event.result.tool_calls) if reason == "stop" else ()
            self.node = replace(self.node, status=status, calls=calls)

    def _own(self, made: Sequence[ToolCall]) -> tuple[Call, ...]:
        """Calls as they are stored: under ids of ours, since a server's may be there twice.

        Raises RequestError for what can't be stored: the chat would never end.
        """
        calls = tuple(
            Call(f"call_{new_id()[:16]}", call.name, dict(call.arguments), self.work.digests.get(call.name))
            for call in made
        )
        try:
            dump_calls(calls)
        except ConversationDataError:
            words = say("The model called a tool with values that aren't JSON. Regenerate the answer.")
            raise RequestError(words) from None
        return calls

    def _take_plans(self, event: MediaPlanned) -> None:
        """Stores each medium's plan with its message, so that later prompts see the same pixels.

        Adds notes about what was reduced in new media and in the question's.
        """
        plans = iter(event.plans)
        told = [note for node in self.work.path for note in node.notes]
        question = next((node for node in reversed(self.work.path) if node.role == "user"), None)
        fresh: dict[Said, None] = {}
        for node in self.work.path:
            files = tuple(file if file.kind == "text" else replace(file, plan=next(plans)) for file in node.attachments)
            if files != node.attachments:
                self._pinned[node.id] = replace(node, attachments=files)
            if node is question or node.id in self._pinned:
                for note in (note for file in files if file.plan for note in file.plan.notes):
                    fresh[with_names(note, files)] = None
        files = [attachment for node in self.work.path for attachment in node.attachments]
        for warning in event.warnings:
            fresh[with_names(warning, files)] = None
        notes = tuple(note for note in fresh if note not in told)
        self.node = replace(self.node, notes=(*self.node.notes, *notes))

    def _end_thinking(self) -> None:
        if self._thinking_since_s is not None:
            seconds = (self.node.thinking_s or 0.0) + time.monotonic() - self._thinking_since_s
            self.node = replace(self.node, thinking_s=seconds)
            self._thinking_since_s = None

    async def _save_regularly(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._save()
            await asyncio.sleep(UPDATE_INTERVAL_S)

    async def _save(self) -> None:
        """Stores, then shows: what a person has seen survives if the process is killed."""
        self.shown = await SAVING.run(self.store_newest)
        self._tell()

    def store_newest(self) -> Node:
        """Stores the newest state and returns it for the page; afterwards `unsaved` is None if that worked.

        Callable from any thread; the last call stores the newest state.
        """
        with self._saving:
            node = self.node
            try:
                for node_id in list(self._pinned):
                    self._store.update(self.work.owner, self._pinned[node_id])
                    del self._pinned[node_id]
                if node != self._stored:
                    self._store.update(self.work.owner, node)
            except NotFoundError:
                # Deleted meanwhile: nothing to store.
                self._pinned, self._stored, self.unsaved = {}, node, None
            except StorageError as error:
                # A full disk doesn't stop the reply, but the page shows it. The next save stores what is missing.
                if self.unsaved is None:
                    logger.warning("a reply could not be stored: %s", error)
                self.unsaved = said_of(error)
            else:
                self._stored, self.unsaved = node, None
            return node

    def _end(self, _: asyncio.Task[None]) -> None:
        self._tell()
        self._on_done(self)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher.set()
