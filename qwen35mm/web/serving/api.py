"""The page's requests, except its stream of answers and its files."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from qwen35mm.chat.media.crops import cut
from qwen35mm.chat.media.strips import Strips
from qwen35mm.chat.quotas import Usage
from qwen35mm.chat.replies.calling import Answer
from qwen35mm.chat.replies.edits import edit_answer
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.replies.titles import Titles
from qwen35mm.chat.replies.turns import MAX_NAME_CHARS, Person, Question, Turns
from qwen35mm.chat.settings import Settings, for_any_chat
from qwen35mm.chat.store.records import Attachment
from qwen35mm.chat.store.rows import Place
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.trash import Trash
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import Backend
from qwen35mm.errors import NotFoundError, PromptError, RequestError
from qwen35mm.http.requests import request
from qwen35mm.model_library import BackendSwitch
from qwen35mm.pools import REQUESTS, SEARCH, STRIPS, THUMBNAILS, Asker
from qwen35mm.web.rendering.view import answers_view, attachment_view, chat_view, conversation_line, found_line
from qwen35mm.web.rendering.wording import describe_memory
from qwen35mm.web.serving.examples import Sample
from qwen35mm_preprocess import MediaError
from qwen35mm_preprocess.say import said_of, say

LISTED = 100
MAX_LISTED = 2_000
MAX_PREFERENCES_CHARS = 200_000
# Whose space is full may still choose colours and a language.
_FREE_PREFERENCES_CHARS = 1_000
Running = Callable[[Tree], set[str]]


class ListPlace(BaseModel):
    """The last entry that a page has of a list; the next ones follow it."""

    id: str
    pinned: bool
    updated_s: float


class Api:
    """Requests about conversations, messages and settings.

    Args:
        describe_app: returns the program's properties for the page.
        usage: checks the limits of a person.
        examples: shown on an empty page.
        titles: writes titles with the model; None if nothing does.
        account_of: returns a person's account for the page; None without a login.
    """

    def __init__(
        self,
        backend: Backend,
        store: ConversationStore,
        replies: Replies,
        turns: Turns,
        describe_app: Callable[[], dict[str, Any]],
        usage: Usage,
        examples: Sequence[Sample] = (),
        titles: Titles | None = None,
        account_of: Callable[[Person], dict[str, Any] | None] = lambda person: None,
    ) -> None:
        self._backend = backend
        self._store = store
        self._replies = replies
        self._turns = turns
        self._describe_app = describe_app
        self._usage = usage
        self._trash = Trash(store)
        self._examples = examples
        self._titles = titles
        self._account_of = account_of
        self._strips = Strips(backend, store, turns)
        # Messages that are being sent, by owner and id.
        self._sending: dict[tuple[str, str], asyncio.Task[tuple[str, str]]] = {}

    # Conversations

    @request
    async def start(self, person: Person) -> Any:
        """What a page needs at its start."""
        return {
            "app": await REQUESTS.run(self._describe_app),
            "account": self._account_of(person),
            "preferences": await REQUESTS.run(self._store.preferences, person.owner),
            "presets": await REQUESTS.run(self._store.presets, person.owner),
            **await self.list(person),
            "running": [reply.node.id for reply in self._replies.of(person.owner)],
            "tools": list(self._turns.toolbox.names(person.owner)),
        }

    @request
    async def list(
        self, person: Person, query: str | None = None, after: ListPlace | None = None, limit: int = LISTED
    ) -> Any:
        """A part of the sidebar's conversations; `query` searches them."""
        limit = min(max(limit, 1), MAX_LISTED)
        how = {"limit": limit + 1, "after": after and Place(after.id, after.pinned, after.updated_s)}
        if query and query.strip():
            found = await SEARCH.run_for(person.line, self._store.search, person.owner, query, **how)
            lines = [found_line(each) for each in found]
        else:
            lines = [conversation_line(each) for each in await REQUESTS.run(self._store.find, person.owner, **how)]
        running = {reply.work.conversation_id for reply in self._replies.of(person.owner)}
        marked = [{**line, "running": line["id"] in running} for line in lines[:limit]]
        titling = self._titles is not None and self._titles.are_pending(person.owner)
        return {"conversations": marked, "more": len(lines) > limit, "titling": titling}

    @request
    async def open(self, person: Person, conversation: str, node: str | None = None) -> Any:
        """A conversation; if `node` is on another branch, that branch is shown from now on."""

        def read(running: Running) -> dict[str, Any]:
            kept, tree = self._store.read(person.owner, conversation)
            if kept.unseen:
                self._store.change(person.owner, conversation, unseen=False)
            if node in tree.nodes and node not in {each.id for each in tree.path(kept.head)}:
                self._store.change(person.owner, conversation, head=tree.newest_leaf(node))
                kept, tree = self._store.read(person.owner, conversation)
            view = chat_view(kept, tree, running(tree), self._backend.context_length, unsaved)
            path = tree.path(kept.head)
            if path and path[-1].status == "finished":
                asks = self._turns.toolbox.asks(person.owner, Settings.kept(kept.settings), path)
                # Those that need no asking: the page that had them run was closed, or had too much to do.
                asks = asks or {call.id: "waiting" for call in path[-1].calls}
                view["messages"][-1] |= {"asks": asks} if asks else {}
            return view

        unsaved = self._replies.unsaved(person.owner, conversation)
        return await REQUESTS.run(read, self._running(person, conversation))

    @request
    async def answers(self, person: Person, conversation: str, node: str) -> Any:
        """All answers to the question of the answer `node`."""

        def read(running: Running) -> dict[str, Any]:
            _, tree = self._store.read(person.owner, conversation)
            return {"answers": answers_view(tree, node, running(tree), unsaved)}

        unsaved = self._replies.unsaved(person.owner, conversation)
        return await REQUESTS.run(read, self._running(person, conversation))

    @request
    def rename(self, person: Person, conversation: str, title: str) -> Any:
        """Renames a conversation."""
        self._store.change(person.owner, conversation, title=title.strip()[:200], titled=True)
        return {}

    @request
    def pin(self, person: Person, conversation: str, pinned: bool) -> Any:
        """Pins or unpins a conversation."""
        self._store.change(person.owner, conversation, pinned=pinned)
        return {}

    @request
    async def delete(self, person: Person, conversation: str) -> Any:
        """Deletes a conversation with its files; `restore` can undo it for a while."""
        await self._turns.stop(person, conversation)
        await self._trash.delete(person.owner, conversation)
        return {}

    @request
    def restore(self, person: Person, conversation: str) -> Any:
        """Undoes `delete`."""
        # Without the check, deleting and restoring by turns would get around the limits.
        self._usage.check(person, num_bytes=1, num_conversations=1)
        self._store.restore(person.owner, conversation)
        return {}

    @request
    async def branch(self, person: Person, conversation: str, node: str) -> Any:
        """Shows the branch that a message is on, down to its newest message."""

        def show() -> None:
            _, tree = self._store.read(person.owner, conversation)
            self._store.change(person.owner, conversation, head=tree.newest_leaf(node))

        await REQUESTS.run(show)
        return await self._shown(person, conversation)

    @request
    async def delete_message(self, person: Person, conversation: str, node: str) -> Any:
        """Deletes a message and everything after it."""
        _, tree = await REQUESTS.run(self._store.read, person.owner, conversation)
        await self._turns.stop(person, conversation, tree.subtree(node))
        await REQUESTS.run(self._store.delete_node, person.owner, node)
        return await self._shown(person, conversation)

    @request
    async def shorten(self, person: Person, conversation: str, first: str | None = None) -> Any:
        """Leaves messages before `first` out of prompts from now on; None includes all again."""
        await REQUESTS.run(self._store.change, person.owner, conversation, first=first)
        return await self._shown(person, conversation)

    @request
    async def edit_answer(self, person: Person, conversation: str, node: str, text: str) -> Any:
        """Adds an edited answer beside an answer."""
        await REQUESTS.run(self._usage.check, person, num_bytes=len(text.encode("utf-8", "replace")))
        await self._turns.stop(person, conversation, [node])
        await REQUESTS.run(edit_answer, self._store, person.owner, conversation, node, text)
        return await self._shown(person, conversation)

    # Messages and their replies

    @request
    async def measure(self, person: Person, question: Question) -> Any:
        """What a message would cost."""
        return await self._turns.measure(person, question)

    @request
    async def strip(self, person: Person, question: Question, asker: Asker) -> Any:
        """The frames that the model would see of a message's first file, a video."""
        return await self._strips.draft(person, question, asker)

    @request
    async def chapters(self, person: Person, question: Question, asker: Asker) -> Any:
        """The chapters of a message's first file, a video."""
        return await self._strips.chapters(person, question, asker)

    @request
    async def shown_strip(self, person: Person, conversation: str, node: str, at: int, asker: Asker) -> Any:
        """The frames that the model saw of a sent message's video."""
        return await self._strips.sent(person, conversation, node, at, asker)

    @request
    async def send(self, person: Person, question: Question) -> Any:
        """Sends a message. With an id it is added only once, even if the page sends it again after a lost response."""
        if question.id is None:
            return await self._shown(person, *await self._send(person, question))
        key = (person.owner, question.id)
        if key not in self._sending:
            self._sending[key] = asyncio.ensure_future(self._send(person, question))
            self._sending[key].add_done_callback(lambda _: self._sending.pop(key))
        return await self._shown(person, *await asyncio.shield(self._sending[key]))

    async def _send(self, person: Person, question: Question) -> tuple[str, str]:
        if question.id is not None and (sent := await self._sent(person, question.id)):
            return sent
        num_bytes, is_new = len(question.text.encode("utf-8", "replace")), question.conversation is None
        await REQUESTS.run(self._usage.check, person, num_bytes=num_bytes, num_conversations=int(is_new))
        self._return_to(question.model)
        return await self._turns.send(person, question)

    def _return_to(self, model: str | None) -> None:
        """Has the model answer that a page shows: another tab may have chosen another one, for its own chat.

        Raises:
            RequestError: it isn't loaded any more.
        """
        backend = self._backend
        if model is None or not isinstance(backend, BackendSwitch) or model == (name := backend.info.name):
            return
        if not backend.return_to(model):
            raise RequestError(say("Another model answers now: {name}. Reload the page to use it.", name=name))

    async def _sent(self, person: Person, question: str) -> tuple[str, str] | None:
        """Ids of a message's conversation and reply, which begins now if there is none; None for a new message."""

        def find() -> tuple[str, str | None] | None:
            conversation = self._store.conversation_of(person.owner, question)
            if conversation is None:
                return None
            replies = self._store.read(person.owner, conversation)[1].children(question)
            return conversation, replies[-1].id if replies else None

        found = await REQUESTS.run(find)
        if found is None:
            return None
        return found[0], found[1] or await self._turns.answer_again(person, found[0], question)

    @request
    def example(self, person: Person, number: int) -> Any:
        """Stores an example's file so that it can be sent."""
        if number not in range(len(self._examples)):
            raise NotFoundError(say("There is no such example."))
        sample, media = self._examples[number], self._store.media
        self._usage.check(person, num_files=1)
        with sample.path.open("rb") as file:
            digest, num_bytes = media.add(file, max_bytes=sample.path.stat().st_size)
        media.hold(person.owner, digest)
        return {"attachment": attachment_view(Attachment(digest, sample.kind, sample.path.name, num_bytes))}

    @request
    async def crop(
        self,
        person: Person,
        digest: str,
        source: str,
        name: str,
        box: list[float],
        asker: Asker,
        time_s: float | None = None,
    ) -> Any:
        """Crops a picture or a video's frame, and stores the crop so that it can be sent; see `crops.cut`.

        Args:
            source: name of the source file.
            name: of the crop.
        """
        asked = Attachment(digest, "image", source[:MAX_NAME_CHARS], 0)
        pool = THUMBNAILS if time_s is None else STRIPS
        return await pool.run_for(person.line, self._crop, person, asked, name[:MAX_NAME_CHARS], box, time_s, asker)

    def _crop(self, person: Person, source: Attachment, name: str, *where: Any) -> Any:
        media = self._store.media
        if not media.is_of(person.owner, source.digest):
            raise NotFoundError(say("You have no such file."))
        if source.digest not in media:
            raise NotFoundError(say("This file is no longer stored."))
        self._usage.check(person, num_files=1)
        try:
            data, crop = cut(media.path(source.digest), source, self._backend.media, *where)
        except MediaError as error:
            raise type(error)(with_names(said_of(error), [source])) from None
        self._usage.check(person, num_bytes=len(data))
        digest, num_bytes = media.add(io.BytesIO(data), max_bytes=len(data))
        media.hold(person.owner, digest)
        return {"attachment": attachment_view(Attachment(digest, "image", name, num_bytes, crop_of=crop))}

    @request
    async def again(
        self,
        person: Person,
        conversation: str,
        node: str,
        settings: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> Any:
        """Another answer to a question; `own` are settings of this answer alone."""
        checked = None if own is None else Settings.read(own)
        await self._take_settings(person, conversation, settings)
        self._return_to(model)
        reply = await self._turns.answer_again(person, conversation, node, checked)
        return await self._shown(person, conversation, reply)

    @request
    async def continue_(
        self,
        person: Person,
        conversation: str,
        node: str,
        settings: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> Any:
        """Continues an answer that ended early."""
        await self._take_settings(person, conversation, settings)
        self._return_to(model)
        return await self._shown(person, conversation, await self._turns.go_on(person, conversation, node))

    @request
    async def run_calls(self, person: Person, conversation: str, node: str, answers: dict[str, Answer]) -> Any:
        """Runs an answer's calls, and begins the answer to their results; no reply if the person must be asked.

        Args:
            answers: what the person said, by the calls' ids.
        """
        await REQUESTS.run(self._usage.check, person, num_bytes=1)
        return await self._shown(person, conversation, await self._turns.run_calls(person, conversation, node, answers))

    @request
    async def summarise(self, person: Person, conversation: str, title: str) -> Any:
        """Begins a new conversation with a summary of this one."""
        await REQUESTS.run(self._usage.check, person, num_conversations=1)
        return await self._shown(person, *await self._turns.summarise(person, conversation, title))

    @request
    async def stop(self, person: Person, node: str) -> Any:
        """Stops a reply in progress; answers when its final state is stored."""
        reply = self._replies.find(person.owner, node)
        if reply is not None:
            await reply.stop()
        return {}

    # Settings

    @request
    def settings(self, person: Person, settings: dict[str, Any] | None = None, conversation: str | None = None) -> Any:
        """Checks settings, and stores them with the conversation if there is one."""
        checked = Settings.read(settings or {})
        if conversation is not None:
            self._store.change(person.owner, conversation, settings=checked.values)
        return {"settings": dict(checked.values)}

    @request
    def preferences(self, person: Person, preferences: dict[str, Any]) -> Any:
        """Changes the given preferences: language, colours, settings of new chats; the rest stays."""
        if isinstance(new := preferences.get("settings"), dict):
            preferences = {**preferences, "settings": for_any_chat(new)}
        num_chars = len(json.dumps({**self._store.preferences(person.owner), **preferences}))
        if num_chars > MAX_PREFERENCES_CHARS:
            raise PromptError(say("Preferences must be a small object."))
        if num_chars > _FREE_PREFERENCES_CHARS:
            self._usage.check(person, num_bytes=num_chars)
        self._store.change_preferences(person.owner, preferences)
        return {}

    @request
    def save_preset(self, person: Person, name: str, settings: dict[str, Any] | None = None) -> Any:
        """Saves settings under a name."""
        name = name.strip()[:100]
        if not name:
            raise PromptError(say("A preset needs a name."))
        values = for_any_chat(Settings.read(settings or {}).values)
        self._usage.check(person, num_bytes=len(json.dumps(dict(values))))
        self._store.save_preset(person.owner, name, values)
        return {"presets": self._store.presets(person.owner)}

    @request
    def delete_preset(self, person: Person, name: str) -> Any:
        """Deletes a preset."""
        self._store.delete_preset(person.owner, name)
        return {"presets": self._store.presets(person.owner)}

    @request
    def memory(self, person: Person) -> Any:
        """What is in the cache."""
        return describe_memory(self._backend.memory())

    def _running(self, person: Person, conversation: str) -> Running:
        """A function that finds the running replies in a conversation read later, including those begun meanwhile,
        which must not look cut off."""
        running = {reply.node.id for reply in self._replies.of(person.owner, conversation)}

        def among(tree: Tree) -> set[str]:
            stored = (each.id for each in tree.nodes.values() if each.status == "running")
            return running | {each for each in stored if self._turns.has_begun(person, each)}

        return among

    async def _take_settings(self, person: Person, conversation: str, settings: dict[str, Any] | None) -> None:
        if settings is not None:
            await self.settings(person, settings, conversation)

    async def _shown(self, person: Person, conversation: str, reply: str | None = None) -> Any:
        return {"chat": await self.open(person, conversation), "reply": reply}
