"""What happens when something is pressed on the page.

Every handler draws from the session's one `Conversation`, never from what it remembers: whichever finishes last shows
the truth.
"""

from __future__ import annotations

import html
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from qwen35mm.errors import ConfigError
from qwen35mm.ui.protocol import ChatBackend
from qwen35mm.ui.render import chat_messages, status_line
from qwen35mm.ui.run import ReplyRun
from qwen35mm.ui.settings import Settings, read_settings
from qwen35mm.ui.state import Conversation, Reply, Turn

# Chat, status line, message box.
View = tuple[Any, Any, Any]


class ChatHandlers:
    """The page's handlers over one backend; what belongs to a session is in its `Conversation`.

    Args:
        backend: answers.
        examples: the chat component's, with their files where Gradio serves them from.
        shared: whether people share the server, who must not learn of each other: each session is a tenant then.
    """

    def __init__(self, backend: ChatBackend, examples: Sequence[dict[str, Any]], *, shared: bool = False) -> None:
        self._backend = backend
        self._examples = examples
        self._shared = shared

    async def send(
        self, entered: dict[str, Any] | None, conversation: Conversation, *values: Any
    ) -> AsyncIterator[View]:
        """Sends what is in the message box."""
        entered = entered or {}
        request = self._begin(entered.get("text") or "", entered.get("files") or (), conversation, values)
        async with aclosing(self._answer(conversation, request, clear_box=True)) as views:
            async for view in views:
                yield view

    async def send_example(self, event: gr.SelectData, conversation: Conversation, *values: Any) -> AsyncIterator[View]:
        """Sends the example that was pressed."""
        # By its number: what else the event holds is what a browser claims, paths on this machine among it.
        example = self._examples[event.index] if event.index in range(len(self._examples)) else {}
        files = [file["path"] for file in example.get("files", ())]
        request = self._begin(example.get("text", ""), files, conversation, values)
        async with aclosing(self._answer(conversation, request)) as views:
            async for view in views:
                yield view

    async def retry(self, conversation: Conversation, *values: Any) -> AsyncIterator[View]:
        """Answers the last question again."""
        request = self._begin_again(conversation, values)
        async with aclosing(self._answer(conversation, request)) as views:
            async for view in views:
                yield view

    async def stop(self, conversation: Conversation) -> None:
        """Ends the reply in progress; its handler draws what there is."""
        conversation.stop()

    async def new_chat(self, conversation: Conversation) -> tuple[Any, Any]:
        """Forgets the conversation."""
        conversation.clear()
        return chat_messages(conversation), status_line(conversation)

    def _begin(
        self, text: str, files: Sequence[str], conversation: Conversation, values: Sequence[Any]
    ) -> tuple[Turn, Settings] | None:
        """The new turn; None, with a word to the person, where it can't be sent."""
        if not text.strip() and not files:
            gr.Info("Type a question, or add a picture or a video.")
            return None
        settings = self._settings(values)
        if settings is None or self._is_busy(conversation):
            return None
        return conversation.begin(text, [Path(file) for file in files]), settings

    def _begin_again(self, conversation: Conversation, values: Sequence[Any]) -> tuple[Turn, Settings] | None:
        settings = self._settings(values)
        if settings is None or not conversation.turns or self._is_busy(conversation):
            return None
        turn = conversation.turns[-1]
        turn.reply = Reply()
        return turn, settings

    async def _answer(
        self, conversation: Conversation, request: tuple[Turn, Settings] | None, *, clear_box: bool = False
    ) -> AsyncGenerator[View, None]:
        if request is None:
            yield gr.skip(), gr.skip(), gr.skip()
            return
        turn, settings = request
        tenant = conversation.tenant if self._shared else None
        run = ReplyRun(self._backend, conversation, turn, settings.params, settings.enable_thinking, tenant=tenant)
        conversation.run = run
        try:
            box = gr.update(submit_btn=False, stop_btn=True)
            if clear_box:
                box["value"] = {"text": "", "files": []}
            yield chat_messages(conversation), status_line(conversation), box
            async for _ in run.updates():
                # The box is left alone: the next question may be in it already.
                yield chat_messages(conversation), status_line(conversation), gr.skip()
        finally:
            # Also when Gradio closes this generator because the browser is gone.
            run.stop()
            if conversation.run is run:
                conversation.run = None
        yield chat_messages(conversation), status_line(conversation), gr.update(submit_btn=True, stop_btn=False)

    def _settings(self, values: Sequence[Any]) -> Settings | None:
        try:
            return read_settings(self._backend.loaded.generation, *values)
        except ConfigError as error:
            gr.Warning(html.escape(str(error)))
            return None

    def _is_busy(self, conversation: Conversation) -> bool:
        busy = conversation.run is not None and not conversation.run.done
        if busy:
            gr.Info("One answer at a time: wait for it, or press Stop.")
        return busy
