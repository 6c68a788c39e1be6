"""One reply in progress: a task that reads the backend's events into a `Reply`, and can be stopped.

The page may draw more slowly than the model writes, and the browser may go away: both are the reader's business. The
task has only one way out, which closes the backend's stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from qwen35mm.engine.events import Event, Finished, MediaPlanned, Progress, TextDelta
from qwen35mm.errors import MediaError, Qwen35mmError
from qwen35mm.prompt import Image, Message, Part, Text, Video
from qwen35mm.sampling import SamplingParams
from qwen35mm.ui.protocol import ChatBackend
from qwen35mm.ui.state import Conversation, Turn, pin_turns, prompt_messages
from qwen35mm_preprocess import detect_kind

logger = logging.getLogger(__name__)

# 15 drawings a second look fluent, and leave the processor to the model.
UPDATE_INTERVAL_S = 1 / 15
# A browser that went away is only noticed when something is sent to it.
HEARTBEAT_S = 1.0

BUG_MESSAGE = "Something went wrong inside the program; its log has the details. You can send the message again."


class ReplyRun:
    """Answers the last turn of a conversation. Make it inside the event loop.

    Args:
        backend: answers.
        conversation: what was said before; a reply of it that ended is kept warm by the backend for the next turn.
        turn: its last one.
        params, enable_thinking: how to answer.
        tenant: whose cached pictures and words may be used; None where one person has the server.
    """

    def __init__(
        self,
        backend: ChatBackend,
        conversation: Conversation,
        turn: Turn,
        params: SamplingParams,
        enable_thinking: bool,
        *,
        tenant: str | None = None,
    ) -> None:
        self._backend = backend
        self._conversation = conversation
        self._turn = turn
        self._params = params
        self._enable_thinking = enable_thinking
        self._tenant = tenant
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        """Whether the reply is complete, stopped or failed."""
        return self._task.done()

    def stop(self) -> None:
        """Ends the work at once; what was written stays."""
        self._task.cancel()

    async def updates(
        self, *, interval_s: float = UPDATE_INTERVAL_S, heartbeat_s: float = HEARTBEAT_S
    ) -> AsyncIterator[None]:
        """Yields when there is news, but not more often than `interval_s`; without news every `heartbeat_s`.

        The last one comes when the reply is done.
        """
        while not self._task.done():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), heartbeat_s)
            self._changed.clear()
            if self._task.done():
                break
            yield
            await asyncio.wait({self._task}, timeout=interval_s)
        yield

    async def _work(self) -> None:
        reply = self._turn.reply
        try:
            if self._turn.message is None:
                self._turn.message = await asyncio.to_thread(_make_message, self._turn.text, self._turn.files)
            # Taken once: the plans that come back belong to these turns, whatever happens to the conversation.
            turns = self._conversation.prompt_turns(self._turn)
            events = self._backend.stream(
                prompt_messages(turns),
                self._params,
                enable_thinking=self._enable_thinking,
                conversation=self._conversation.id,
                retain="conversation",
                tenant=self._tenant,
            )
            try:
                async for event in events:
                    self._take(event, turns)
                    self._changed.set()
            finally:
                await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        except (Qwen35mmError, MediaError) as error:
            reply.status, reply.error = "failed", str(error)
        except Exception:
            logger.exception("a reply failed")
            reply.status, reply.error = "failed", BUG_MESSAGE

    def _take(self, event: Event, turns: list[Turn]) -> None:
        reply = self._turn.reply
        if isinstance(event, TextDelta):
            reply.add(event.text, event.channel)
        elif isinstance(event, Progress):
            reply.progress = event
        elif isinstance(event, MediaPlanned):
            self._take_plans(event, turns)
        elif isinstance(event, Finished):
            reply.result = event.result
            reply.status = "stopped" if event.result.finish_reason == "cancelled" else "finished"

    def _take_plans(self, event: MediaPlanned, turns: list[Turn]) -> None:
        pin_turns(turns, event.plans)
        assert self._turn.message is not None, "plans for a message that doesn't exist"
        notes = [note for part in self._turn.message.media if part.plan for note in part.plan.notes]
        told = {note for turn in turns[:-1] for note in turn.reply.notes}
        # The warnings are about all media of the conversation: say only what is new, each once.
        fresh = dict.fromkeys(note for note in (*notes, *event.warnings) if note not in told)
        self._turn.reply.notes = tuple(fresh)

    def _end(self, task: asyncio.Task[None]) -> None:
        reply = self._turn.reply
        reply.end_thinking()
        reply.progress = None
        if reply.status == "running":
            # Cancelled, perhaps before its first step.
            reply.status = "stopped"
        self._changed.set()


def _make_message(text: str, files: tuple[Path, ...]) -> Message:
    parts: list[Part] = [Image(path) if detect_kind(path) == "image" else Video(path) for path in files]
    if text:
        parts.append(Text(text))
    return Message("user", tuple(parts))
