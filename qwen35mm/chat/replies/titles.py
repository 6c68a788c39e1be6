"""Titles that the model writes while it is idle.

A conversation's title is the beginning of its first question until an answer is finished. Then a short request, apart
from the conversation's prompt and cache, asks for a better one. Any request for an answer cancels it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re

from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.replies.reply import Reply
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.contract import Backend, Finished, GenerationRequest, Message, Text
from qwen35mm.errors import NotFoundError, Qwen35mmError, report_bug
from qwen35mm.pools import IDLE, REQUESTS

logger = logging.getLogger(__name__)

PREFERENCE = "titles"
# A person who reads an answer may be about to ask again.
QUIET_S = 2.0
# The longest wait of a thread for the engine, since it can't be cancelled.
_LOOK_S = 1.0
_MAX_PENDING = 64
_SHOWN_CHARS = 1_000
_MAX_TOKENS = 32
_MAX_CHARS = 80
_MAX_WORDS = 12
_ASK = (
    "Write a title for this conversation: at most six words, in the language of the question, without quotation marks. "
    "Answer with the title alone."
)
# Decoration and labels before a title.
_LABEL = re.compile(r"[\s#*_`\"'“„«]*((title|titel|titre|título|标题)[*_]*\s*[:：])?", re.IGNORECASE)
_AROUND = " \t*_`\"'“”„«»‹›「」.。"


class Titles:
    """Writes titles for the replies' conversations, one at a time. Used only in the event loop.

    Args:
        quiet_s: seconds between a reply and the request, and between checks that the engine is idle.
    """

    def __init__(
        self, store: ConversationStore, backend: Backend, replies: Replies, *, quiet_s: float = QUIET_S
    ) -> None:
        self._store = store
        self._backend = backend
        self._replies = replies
        self._quiet_s = quiet_s
        # The newest reply of each conversation.
        self._pending: dict[tuple[str, str], Reply] = {}
        self._worker: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[str | None] | None = None
        replies.asked, replies.ended = self.make_way, self._ended

    @property
    def enabled(self) -> bool:
        """Whether the model writes titles. The demo's would be about shapes, and some backends charge for requests."""
        return self._backend.idles and not self._backend.is_demo

    def are_pending(self, owner: str) -> bool:
        """Whether one of a person's conversations may get a new title soon."""
        return any(each == owner for each, _ in self._pending)

    def make_way(self) -> None:
        """Cancels the current request; it runs again when the engine is idle."""
        if self._asking is not None:
            self._asking.cancel()

    async def rest(self) -> None:
        """`make_way`, and waits until the request has ended."""
        self.make_way()
        if self._asking is not None:
            await asyncio.wait({self._asking})

    def _ended(self, reply: Reply) -> None:
        work, node = reply.work, reply.node
        if not self.enabled or work.temporary or node.status != "finished" or not node.text.strip():
            return
        self._pending[work.owner, work.conversation_id] = reply
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._pending:
            key, reply = next(iter(self._pending.items()))
            try:
                if await REQUESTS.run(self._is_wanted, *key):
                    await self._until_quiet()
                    self._asking = asyncio.create_task(self._ask(reply))
                    await asyncio.wait({self._asking})
                    if self._asking.cancelled():
                        continue
                    await REQUESTS.run(self._store.give_title, *key, self._asking.result())
            except Qwen35mmError as error:
                logger.info("a conversation keeps its title: %s", error)
            except Exception as error:
                report_bug(logger, "a title could not be written", error)
            finally:
                self._asking = None
            # A newer reply may be pending meanwhile.
            if self._pending.get(key) is reply:
                del self._pending[key]

    def _is_wanted(self, owner: str, conversation_id: str) -> bool:
        with contextlib.suppress(NotFoundError):
            titled = self._store.conversation(owner, conversation_id).titled
            return not titled and self._store.preferences(owner).get(PREFERENCE, True) is not False
        return False

    async def _until_quiet(self) -> None:
        """Returns when no reply is in progress, and the engine has computed the last one's history."""
        while True:
            await asyncio.sleep(self._quiet_s)
            is_idle = not self._replies.are_wanted and await IDLE.run(self._backend.wait_idle, _LOOK_S)
            if is_idle and not self._replies.are_wanted:
                return

    async def _ask(self, reply: Reply) -> str | None:
        """The model's title; None if it gives none."""
        question = next((node.text for node in reversed(reply.work.path) if node.role == "user"), "")
        shown = [("Question", question), ("Answer", reply.node.text)]
        parts = [_ASK, *(f"{name}: {text.strip()[:_SHOWN_CHARS]}" for name, text in shown if text.strip())]
        params = self._backend.info.generation.with_overrides(
            temperature=0.0, max_tokens=_MAX_TOKENS, thinking_budget=0
        )
        request = GenerationRequest(
            [Message("user", (Text("\n\n".join(parts)),))],
            params,
            # Retains nothing, so it evicts nothing.
            retain="nothing",
            tenant=reply.work.request.tenant,
            # Nor does it unload a model that somebody uses.
            loads=False,
        )
        async with contextlib.aclosing(self._backend.stream(request)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return title_of(event.result.text) if event.result.finish_reason == "stop" else None
        return None


def title_of(text: str) -> str | None:
    """A model's answer as a title; None if it doesn't look like one."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        return None
    title = " ".join(_LABEL.sub("", lines[0], count=1).strip(_AROUND).split())
    is_title = re.search(r"\w", title) and len(title) <= _MAX_CHARS and len(title.split()) <= _MAX_WORDS
    return title if is_title and title.isprintable() else None
