"""Everything that a person does with conversations, without a page: it is what the page's requests end in.

Every method takes the person first, and touches nobody else's things. All run in the server's event loop; what takes
time runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwen35mm.chat.backend import ChatBackend
from qwen35mm.chat.drafts import Draft, Drafts
from qwen35mm.chat.prompting import prompt_messages, prompt_path, prompt_path_before
from qwen35mm.chat.replies import Replies, Work
from qwen35mm.chat.say import say
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store import ConversationStore, new_id
from qwen35mm.chat.tree import Attachment, Conversation, Node, Tree
from qwen35mm.chat.turns import Turn, store_turn, summary_question
from qwen35mm.errors import NotFoundError, PromptError, QueueFullError, RequestError
from qwen35mm.web.rendering.view import chat_view
from qwen35mm.web.serving.people import Person

MAX_TEXT_CHARS = 2_000_000
MAX_ATTACHMENTS = 64
_TITLE_CHARS = 60


class TooLongError(RequestError):
    """A message that doesn't fit into the context: it takes `num_tokens`, and `offers` are what would fit."""

    def __init__(self, message: str, num_tokens: int, offers: Sequence[dict[str, Any]]) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.offers = list(offers)


class Chats:
    """Conversations of people over a backend.

    Args:
        backend: answers.
        store: keeps everything.
        replies: the replies in progress.
        larger_context: the largest context, up to a limit, that could be had instead; None where it stays as it is.
    """

    def __init__(
        self,
        backend: ChatBackend,
        store: ConversationStore,
        replies: Replies,
        larger_context: Callable[[int], Awaitable[int | None]] | None = None,
    ) -> None:
        self.backend = backend
        self._larger_context = larger_context
        self.store = store
        self.replies = replies
        self.drafts = Drafts(backend, store.media)
        self._places: list[tuple[str, str | None]] = []

    async def open(self, person: Person, conversation_id: str) -> dict[str, Any]:
        """A conversation as the page draws it.

        Raises:
            NotFoundError: there is none of this id.
        """
        conversation, tree = await asyncio.to_thread(self._read, person, conversation_id)
        running = {reply.node.id for reply in self.replies.of(person.owner, conversation_id)}
        return await asyncio.to_thread(chat_view, conversation, tree, running, self.backend.context_length)

    async def measure(
        self, person: Person, conversation_id: str | None, parent: str | None, **message: Any
    ) -> dict[str, Any]:
        """What a message would cost; see `Drafts.measure`. Arguments are `send`'s."""
        cost = await asyncio.to_thread(
            lambda: self.drafts.measure(self._draft(person, conversation_id, parent, **message)[0])
        )
        if not cost["fits"]:
            await self._offer_larger_context(cost["offers"], cost["tokens"]["all"])
        return cost

    async def send(
        self, person: Person, conversation_id: str | None, parent: str | None, **message: Any
    ) -> tuple[str, str]:
        """Adds a message after `parent` and a reply that begins when it is watched; ids of conversation and reply.

        Args:
            conversation_id: None begins a new conversation.
            parent: the message before it; another one than the last begins a branch. None is a first message.
            message: `text`, `attachments` and `settings`.

        Raises:
            TooLongError: it doesn't fit into the context.
            MediaError: an attached file can't be read.
            RequestError: a reply of this conversation, or too many of this person, are in progress.
            StorageError: it can't be stored; nothing is changed.
        """
        with self._place(person, conversation_id):
            try:
                turn = await asyncio.to_thread(self._prepare, person, conversation_id, parent, message)
            except TooLongError as error:
                await self._offer_larger_context(error.offers, error.num_tokens)
                raise
            return await self._begin(person, turn)

    async def answer_again(self, person: Person, conversation_id: str, question: str) -> str:
        """Another reply to a message, beside those it has; its id. Raises what `send` does."""

        def prepare() -> Turn:
            conversation, tree = self._read(person, conversation_id)
            path = prompt_path(tree.path(question), conversation.first)
            if path[-1].role != "user":
                raise PromptError("Only a question can be answered.")
            is_summary = any(reply.id == conversation.first for reply in tree.children(question))
            return Turn(conversation, tuple(path[:-1]), path[-1], is_asked=True, is_summary=is_summary)

        with self._place(person, conversation_id):
            return (await self._begin(person, await asyncio.to_thread(prepare)))[1]

    async def go_on(self, person: Person, conversation_id: str, reply_id: str) -> str:
        """Continues a reply that was stopped or cut off; its id. Raises what `send` does."""

        def prepare() -> Work:
            conversation, tree = self._read(person, conversation_id)
            # A summary is what later prompts begin with; its own begins with what it sums up.
            first = None if conversation.first == reply_id else conversation.first
            path = prompt_path(tree.path(reply_id), first)
            node = path[-1]
            if node.role != "assistant" or node.status == "finished" or not (node.text or node.reasoning):
                raise PromptError("Only an answer that was stopped, or cut off by a limit, can be continued.")
            # What it cost so far is kept until the rest is there; then its numbers are the rest's.
            work = self._work(person, conversation, path, replace(node, status="running", error=None))
            self.store.update(person.owner, reply_id, status="running", error=None)
            return work

        with self._place(person, conversation_id):
            self.replies.add(await asyncio.to_thread(prepare))
        return reply_id

    async def stop(self, person: Person, reply_id: str) -> None:
        """Ends a reply in progress; returns when its end is stored."""
        reply = self.replies.find(person.owner, reply_id)
        if reply is not None:
            await reply.stop()

    async def delete_message(self, person: Person, conversation_id: str, node_id: str) -> None:
        """Deletes a message with everything after it."""
        _, tree = await asyncio.to_thread(self._read, person, conversation_id)
        await self._stop(person, conversation_id, tree.subtree(node_id))
        await asyncio.to_thread(self.store.delete_node, person.owner, node_id)

    async def delete(self, person: Person, conversation_id: str) -> None:
        """Deletes a conversation; files that no other one holds go soon after."""
        await self._stop(person, conversation_id)
        await asyncio.to_thread(self.store.delete, person.owner, conversation_id)

    async def show_branch(self, person: Person, conversation_id: str, node_id: str) -> None:
        """Shows the branch that a message is on, down to its newest message."""

        def show() -> None:
            _, tree = self._read(person, conversation_id)
            self.store.set_head(person.owner, conversation_id, tree.newest_leaf(node_id))

        await asyncio.to_thread(show)

    async def shorten(self, person: Person, conversation_id: str, first: str | None) -> None:
        """Leaves what is before `first` out of prompts from now on; None takes everything again."""
        await asyncio.to_thread(self.store.set_first, person.owner, conversation_id, first)

    async def summarise(self, person: Person, conversation_id: str) -> tuple[str, str]:
        """Begins a new conversation with a summary of this one; ids of it and of the summary, a reply in progress.

        Raises what `send` does.
        """

        def prepare() -> Turn:
            conversation, tree = self._read(person, conversation_id)
            settings = Settings.kept(conversation.settings)
            question = summary_question(
                self.store, self.drafts, person.owner, conversation.title, tree.path(conversation.head), settings
            )
            title = f"After: {conversation.title}"[:_TITLE_CHARS]
            return Turn(_conversation(title, settings), (), question, is_new=True, is_summary=True)

        with self._place(person, None):
            return await self._begin(person, await asyncio.to_thread(prepare))

    def _prepare(
        self, person: Person, conversation_id: str | None, parent: str | None, message: Mapping[str, Any]
    ) -> Turn:
        """Plans and checks a message; nothing is stored yet."""
        draft, conversation = self._draft(person, conversation_id, parent, **message)
        if not draft.node.text.strip() and not draft.node.attachments:
            raise PromptError("Type a question, or add a picture or a video.")
        draft = self.drafts.plan(draft)
        room = self.drafts.room(draft)
        if not room["fits"]:
            num_all, context = room["tokens"]["all"], room["tokens"]["context"]
            raise TooLongError(
                f"This conversation would take {num_all:,} tokens, and the context holds {context:,} with the answer.",
                num_all,
                room["offers"],
            )
        if conversation is None:
            return Turn(_conversation(_title(draft.node), draft.settings), (), draft.node, is_new=True)
        return Turn(replace(conversation, settings=draft.settings.values), draft.path, draft.node)

    def _draft(
        self,
        person: Person,
        conversation_id: str | None,
        parent: str | None,
        *,
        text: str = "",
        attachments: Sequence[Attachment] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Draft, Conversation | None]:
        if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
            raise PromptError(f"A message's text has at most {MAX_TEXT_CHARS:,} characters; attach the rest as files.")
        if len(attachments) > MAX_ATTACHMENTS:
            raise PromptError(f"A message has at most {MAX_ATTACHMENTS} files; got {len(attachments)}.")
        attachments = [self._attached(person, attachment) for attachment in attachments]
        node = _node(parent, "user", text=text, attachments=tuple(attachments))
        if conversation_id is None:
            if parent is not None:
                raise PromptError("A new conversation has no messages before its first.")
            return Draft((), node, Settings.read(settings or {})), None
        conversation, tree = self._read(person, conversation_id)
        chosen = Settings.kept(conversation.settings) if settings is None else Settings.read(settings)
        known = tuple(attachment for each in tree.nodes.values() for attachment in each.attachments)
        return Draft(tuple(prompt_path_before(tree, parent, conversation.first)), node, chosen, known), conversation

    def _attached(self, person: Person, attachment: Attachment) -> Attachment:
        if not self.store.has_media(person.owner, attachment.digest):
            raise NotFoundError(f"The file {attachment.name!r} isn't there any more: attach it again.")
        with self.store.media.open(attachment.digest) as file:
            return replace(attachment, num_bytes=file.seek(0, 2))

    async def _begin(self, person: Person, turn: Turn) -> tuple[str, str]:
        """Stores a turn, and adds its reply to those in progress; ids of conversation and reply."""

        def store() -> Work:
            reply = _node(turn.question.id, "assistant", status="running", model=self.backend.loaded.name)
            work = self._work(person, turn.conversation, (*turn.path, turn.question), reply)
            store_turn(self.store, person.owner, turn, reply)
            return work

        reply = self.replies.add(await asyncio.to_thread(store))
        return turn.conversation.id, reply.node.id

    def _work(self, person: Person, conversation: Conversation, path: Sequence[Node], reply: Node) -> Work:
        settings = Settings.kept(conversation.settings)
        loaded = self.backend.loaded
        return Work(
            person.owner,
            conversation.id,
            reply,
            tuple(path),
            tuple(prompt_messages(path, self.store.media, settings.system)),
            settings.params(loaded.generation),
            settings.enable_thinking(loaded.template.default_enable_thinking),
            person.tenant,
        )

    async def _offer_larger_context(self, offers: list[dict[str, Any]], num_tokens: int) -> None:
        """Adds a context of twice what is needed, or the largest that fits the memory, if that is enough."""
        if self._larger_context is None:
            return
        length = await self._larger_context(2 * num_tokens)
        if length is not None and length - length // 8 >= num_tokens:
            label = say("Make room for {n} tokens", n=length)
            offers.append({"kind": "context", "label": label, "context_length": length})

    @contextlib.contextmanager
    def _place(self, person: Person, conversation_id: str | None) -> Iterator[None]:
        """A place for one more reply, kept while it is being prepared: two requests may come at one time."""
        mine = [place for owner, place in self._places if owner == person.owner]
        if conversation_id is not None and (conversation_id in mine or self.replies.of(person.owner, conversation_id)):
            raise RequestError("One answer at a time: wait for it, or press Stop.")
        if len(mine) + len(self.replies.of(person.owner)) >= person.max_replies:
            raise QueueFullError(
                f"You have {person.max_replies} answers in progress already: wait for one, or stop one."
            )
        place = (person.owner, conversation_id)
        self._places.append(place)
        try:
            yield
        finally:
            self._places.remove(place)

    async def _stop(self, person: Person, conversation_id: str, node_ids: Container[str] | None = None) -> None:
        for reply in self.replies.of(person.owner, conversation_id):
            if node_ids is None or reply.node.id in node_ids:
                await reply.stop()

    def _read(self, person: Person, conversation_id: str) -> tuple[Conversation, Tree]:
        return self.store.snapshot(person.owner, conversation_id)


def _conversation(title: str, settings: Settings) -> Conversation:
    now_s = time.time()
    return Conversation(new_id(), title, now_s, now_s, settings=settings.values)


def _node(parent: str | None, role: Any, **fields: Any) -> Node:
    return Node(new_id(), parent, role, time.time(), **fields)


def _title(node: Node) -> str:
    line = next((line.strip() for line in node.text.splitlines() if line.strip()), "")
    if not line:
        line = ", ".join(attachment.name for attachment in node.attachments)
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1].rstrip() + "…"
