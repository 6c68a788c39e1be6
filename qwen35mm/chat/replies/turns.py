"""Turns: stores what a person sends as a question, and begins a reply."""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, BeforeValidator

from qwen35mm.chat.documents.documents import as_context
from qwen35mm.chat.replies.calling import Allowed, Answer, Calling
from qwen35mm.chat.replies.drafts import Draft, Drafts
from qwen35mm.chat.replies.past import Past, Pasts
from qwen35mm.chat.replies.prompting import TooLongError, prompt_messages, prompt_path
from qwen35mm.chat.replies.replies import Replies, Work
from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.settings import MEDIA, Settings, made_with
from qwen35mm.chat.store.markdown import export_markdown
from qwen35mm.chat.store.records import CLIPS, CROPS, Attachment, AttachmentKind, Conversation, Crop, Id, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import Backend, GenerationRequest, Message
from qwen35mm.errors import NotFoundError, PromptError, QueueFullError, RequestError
from qwen35mm.pools import DRAFTS, TURNS
from qwen35mm_preprocess import VideoClip
from qwen35mm_preprocess.say import Said, say

MAX_TEXT_CHARS = 2_000_000
MAX_ATTACHMENTS = 64
MAX_NAME_CHARS = 255
_TITLE_CHARS = 60
_SUMMARISE = (
    "Summarise the attached conversation so that it can continue from your summary alone. Keep names, numbers, "
    "decisions, what was seen in pictures and videos, and what is still open. Write nothing else."
)


@dataclass(frozen=True)
class Person:
    """A person who uses the page.

    Attributes:
        owner: the key that conversations are stored under.
        tenant: separates cached text and pictures of people; None if one person has the machine.
        max_replies: most replies in progress at one time.
        account: the key that limits count by; empty for the owner.
    """

    owner: str
    tenant: str | None = None
    max_replies: int = 4
    account: str = field(default="", compare=False)

    @property
    def line(self) -> str | None:
        """Whose work shares a queue: see `Pool.run_for`; None if one person has the machine."""
        return None if self.tenant is None else self.account or self.owner


class SentFile(BaseModel):
    """A file of a message, as the page sends it; see `records.Attachment`."""

    digest: str
    kind: AttachmentKind
    name: str
    clip: Annotated[VideoClip | None, BeforeValidator(CLIPS.checked)] = None
    crop_of: Annotated[Crop | None, BeforeValidator(CROPS.checked)] = None


class Once(BaseModel):
    """Settings of one message alone.

    Attributes:
        limits: media settings, in place of the conversation's.
        first: the oldest message in its prompt, if it is newer than the conversation's `first`.
    """

    limits: dict[str, Any] = {}
    first: str | None = None


class Question(BaseModel):
    """A message to send.

    Attributes:
        id: the message's id if the page chooses it, so that the page can safely send it again.
        conversation: None begins a new one.
        parent: the message before it; any but the last begins a branch. None makes it a first message.
        at_end: if the branch has grown below `parent`, as from another tab, the message goes to its end instead.
        settings: None takes the conversation's.
        model: that the page shows; None takes any.
    """

    id: Id | None = None
    conversation: str | None = None
    parent: str | None = None
    at_end: bool = False
    text: str = ""
    attachments: list[SentFile] = []
    settings: dict[str, Any] | None = None
    once: Once = Once()
    model: str | None = None


class BusyError(QueueFullError):
    """As many answers are in progress as may be.

    Attributes:
        answers: those that must end first; empty while they are being prepared.
        is_here: whether they are of this conversation.
    """

    def __init__(self, words: Said, answers: list[str], *, is_here: bool) -> None:
        super().__init__(words)
        self.answers = answers
        self.is_here = is_here


class _UnaskedError(Exception):
    """A call needs a person's answer first."""


class Turns:
    """Begins, continues and stops people's replies.

    Every method takes the person first and touches nobody else's data. All run in the server's event loop; slow work
    runs in threads.

    Args:
        larger_context: returns the largest available context up to a limit; None if the context is fixed.
        toolbox: the tools that chats may switch on.
    """

    def __init__(
        self,
        backend: Backend,
        store: ConversationStore,
        replies: Replies,
        larger_context: Callable[[int], Awaitable[int | None]] | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        self._backend = backend
        self._larger_context = larger_context
        self._store = store
        self._replies = replies
        self.toolbox = toolbox or Toolbox()
        self.drafts = Drafts(backend, store.media)
        self._pasts = Pasts(store, replies)
        self._places: list[tuple[str, str | None]] = []
        # By the reply's id, which is stored a moment before the reply is in `replies`.
        self._works: WeakValueDictionary[str, Work] = WeakValueDictionary()

    async def measure(self, person: Person, question: Question) -> dict[str, Any]:
        """What a message would cost; see `Drafts.measure`."""
        cost = await DRAFTS.run_for(person.line, lambda: self.drafts.measure(self.draft(person, question)[0]))
        if not cost["fits"]:
            await self._offer_larger_context(cost["offers"], cost["tokens"]["all"])
        return cost

    async def send(self, person: Person, question: Question) -> tuple[str, str]:
        """Adds a message, and a reply that begins when it is watched; returns the ids of conversation and reply.

        Raises:
            TooLongError: the message doesn't fit the context.
            MediaError: an attached file can't be read.
            BusyError: a reply of this conversation is in progress, or too many of this person.
            StorageError: the message can't be stored; nothing changes.
        """

        def store() -> Work:
            draft, conversation = self._prepared(person, question)
            if conversation is None:
                return self._begin_new(person, _title(draft.node), draft.settings, draft.node)
            settings = draft.settings.values
            conversation = replace(conversation, settings=settings)
            work = self._work(person, conversation, (*draft.path, draft.node), _reply_to(draft.node))
            self._store.add(person.owner, conversation.id, draft.node, work.node, settings=settings)
            return work

        try:
            return await self._begin(person, question.conversation, store)
        except TooLongError as error:
            await self._offer_larger_context(error.offers, error.num_tokens)
            raise

    async def answer_again(
        self, person: Person, conversation_id: str, question_id: str, settings: Settings | None = None
    ) -> str:
        """Adds another reply to a question; returns its id. `settings` hold for it alone; None takes the
        conversation's. Raises what `send` does."""

        def store() -> Work:
            conversation, tree = self._store.read(person.owner, conversation_id)
            whole = tree.path(question_id)
            path = prompt_path(whole, conversation.first, _own_first(whole))
            if path[-1].role == "assistant":
                raise PromptError(say("Only a question can be answered."))
            is_summary = any(reply.id == conversation.first for reply in tree.children(question_id))
            own = settings or Settings.kept(conversation.settings)
            conversation = replace(conversation, settings=own.values)
            work = self._work(person, conversation, path, _reply_to(path[-1]), is_summary=is_summary)
            self._store.add(person.owner, conversation_id, work.node, first=work.node.id if is_summary else None)
            return work

        return (await self._begin(person, conversation_id, store))[1]

    async def go_on(self, person: Person, conversation_id: str, reply_id: str) -> str:
        """Continues a reply that was stopped or cut off; returns its id. Raises what `send` does."""
        if self._backend.info.continues is False:
            raise PromptError(say("This model can't continue an answer. Regenerate it instead."))

        def store() -> Work:
            conversation, tree = self._store.read(person.owner, conversation_id)
            # Later prompts begin with the summary; its own prompt begins with what it sums up.
            whole = tree.path(reply_id)
            is_summary = conversation.first == reply_id
            path = prompt_path(whole, *(() if is_summary else (conversation.first, _own_first(whole))))
            node = path[-1]
            if node.role != "assistant" or node.status == "finished" or not (node.text or node.reasoning):
                raise PromptError(say("Only an answer that was stopped, or cut off by a limit, can be continued."))
            # Its statistics stay until it ends; then they are those of the continuation.
            reply = replace(node, status="running", error=None)
            work = self._work(person, conversation, path, reply, is_summary=is_summary)
            self._store.update(person.owner, work.node)
            return work

        return (await self._begin(person, conversation_id, store))[1]

    async def run_calls(
        self, person: Person, conversation_id: str, node_id: str, answers: Mapping[str, Answer]
    ) -> str | None:
        """Runs the calls of an answer, and adds the reply to their results; returns its id. None if a person has to
        be asked first, or if they ran already: another tab was first.

        Args:
            answers: what the person said, by the calls' ids; those that are missing run if they may.

        Raises what `send` does.
        """

        def store() -> Work:
            conversation, tree = self._store.read(person.owner, conversation_id)
            whole = tree.path(node_id)
            asking = whole[-1]
            if not asking.calls or asking.status != "finished":
                raise PromptError(say("This answer calls no tools."))
            settings = Settings.kept(conversation.settings)
            is_begun = any(child.role == "tool" for child in tree.children(node_id))
            if is_begun or self.toolbox.asks(person.owner, settings, whole).keys() - answers.keys():
                raise _UnaskedError
            allowed: list[Allowed] = []
            parent = asking
            for call in asking.calls:
                parent = _node(parent.id, "tool", status="running", call=call.id)
                allowed.append(Allowed(call, parent, answers.get(call.id, "once")))
            path = prompt_path(whole, conversation.first, _own_first(whole))
            work = self._work(person, conversation, path, _reply_to(parent), allowed)
            self._store.add(person.owner, conversation_id, *(each.result for each in allowed), work.node)
            return work

        try:
            return (await self._begin(person, conversation_id, store))[1]
        except _UnaskedError:
            return None
        except BusyError as error:
            if answers or not error.is_here:
                raise
            return None

    async def summarise(self, person: Person, conversation_id: str, title: str) -> tuple[str, str]:
        """Begins a new conversation with a summary of this one; returns its id and that of the summary, a reply in
        progress.

        Args:
            title: of the new conversation; cut if too long.

        Raises what `send` does.
        """

        def store() -> Work:
            conversation, tree = self._store.read(person.owner, conversation_id)
            settings = Settings.kept(conversation.settings)
            question = self._summary_question(person, conversation, tree, settings)
            return self._begin_new(person, title[:_TITLE_CHARS], settings, question, is_summary=True)

        await self._replies.store_missed(person.owner, conversation_id)
        return await self._begin(person, None, store)

    async def stop(self, person: Person, conversation_id: str, node_ids: Container[str] | None = None) -> None:
        """Stops a conversation's replies in progress, or those in `node_ids`; returns when their ends are stored."""
        for reply in self._replies.of(person.owner, conversation_id):
            if node_ids is None or reply.node.id in node_ids:
                await reply.stop()

    def has_begun(self, person: Person, node_id: str) -> bool:
        """Whether a reply that is stored as running is in progress or being prepared; callable from any thread."""
        work, reply = self._works.get(node_id), self._replies.find(person.owner, node_id)
        if reply is not None and not reply.done:
            return True
        return work is not None and (reply is None or reply.work is not work)

    async def _begin(self, person: Person, conversation_id: str | None, store: Callable[[], Work]) -> tuple[str, str]:
        """Runs `store` and adds its reply to those in progress; returns the ids of conversation and reply."""
        with self._place(person, conversation_id), self._replies.coming():
            if conversation_id is not None:
                await self._replies.store_missed(person.owner, conversation_id)
            work = await TURNS.run_for(person.line, store)
            self._replies.add(work)
        return work.conversation_id, work.node.id

    def _begin_new(
        self, person: Person, title: str, settings: Settings, question: Node, *, is_summary: bool = False
    ) -> Work:
        reply = _reply_to(question)
        first = reply.id if is_summary else None
        now_s = time.time()
        conversation = Conversation(new_id(), title, now_s, now_s, reply.id, settings.values, first, titled=is_summary)
        work = self._work(person, conversation, [question], reply, is_summary=is_summary)
        self._store.insert(person.owner, [(conversation, Tree([question, work.node]))])
        return work

    def _prepared(self, person: Person, question: Question) -> tuple[Draft, Conversation | None]:
        """A message that fits, with its media planned, and its conversation; stores nothing."""
        if question.at_end and question.conversation is not None:
            shown, tree = self._store.read(person.owner, question.conversation)
            is_shown = question.parent in {None, *(node.id for node in tree.path(shown.head))}
            leaf = shown.head if is_shown else tree.newest_leaf(question.parent)
            question = question.model_copy(update={"parent": leaf})
        draft, conversation = self.draft(person, question)
        if not draft.node.text.strip() and not draft.node.attachments:
            raise PromptError(say("Type a question, or add a picture or a video."))
        draft = self.drafts.plan(draft)
        room = self.drafts.room(draft, self.drafts.count(draft))
        if not room["fits"]:
            raise TooLongError(room["tokens"], room["offers"])
        return draft, conversation

    def draft(self, person: Person, question: Question) -> tuple[Draft, Conversation | None]:
        if len(question.text) > MAX_TEXT_CHARS:
            raise PromptError(
                say("A message's text has at most {most} characters; attach the rest as files.", most=MAX_TEXT_CHARS)
            )
        if len(question.attachments) > MAX_ATTACHMENTS:
            raise PromptError(
                say("A message has at most {most} files; got {n}.", most=MAX_ATTACHMENTS, n=len(question.attachments))
            )
        attachments = tuple(self._attached(person, file) for file in question.attachments)
        node = _node(question.parent, "user", question.id, text=question.text, attachments=attachments)
        limits = Settings.read(question.once.limits).values
        if not limits.keys() <= MEDIA.keys():
            raise PromptError(say("For one message, only its media limits can be set."))
        if question.conversation is None:
            if question.parent is not None:
                raise PromptError(say("A new chat has no messages before its first."))
            settings = Settings.read(question.settings or {})
            return Draft(Past(), node, settings, limits=limits, tools=self._tools(person, settings)), None
        conversation = self._store.conversation(person.owner, question.conversation)
        kept = question.settings is None
        settings = Settings.kept(conversation.settings) if kept else Settings.read(question.settings)
        past, growing = self._pasts.before(person.owner, conversation, question.parent, question.once.first)
        if question.once.first in {each.id for each in past.path}:
            node = replace(node, first=question.once.first)
        tools = self._tools(person, settings)
        return Draft(past, node, settings, growing=growing, limits=limits, tools=tools), conversation

    def _tools(self, person: Person, settings: Settings) -> str:
        definitions = self.toolbox.definitions(person.owner, settings)
        return json.dumps(definitions) if definitions else ""

    def _attached(self, person: Person, file: SentFile) -> Attachment:
        media = self._store.media
        if not media.is_of(person.owner, file.digest):
            raise NotFoundError(say("The file '{name}' no longer exists. Attach it again.", name=file.name))
        with media.open(file.digest) as stream:
            num_bytes = stream.seek(0, 2)
        clip = file.clip if file.kind == "video" else None
        crop = file.crop_of if file.kind == "image" else None
        if crop is not None and not media.is_of(person.owner, crop.digest):
            crop = None
        return Attachment(file.digest, file.kind, file.name[:MAX_NAME_CHARS], num_bytes, clip=clip, crop_of=crop)

    def _summary_question(self, person: Person, conversation: Conversation, tree: Tree, settings: Settings) -> Node:
        """A question that asks for a summary of an attached text file with as many of the newest messages as fit.

        Raises:
            RequestError: there are no messages, or not even the last one fits.
        """
        path, title = tree.path(conversation.head), f"{conversation.title or 'conversation'}.md"
        if not path:
            raise RequestError(say("There is nothing to summarise yet."))

        def text_from(start: int) -> str:
            messages = Tree([replace(path[start], parent=None), *path[start + 1 :]])
            return export_markdown(messages, path[-1].id, conversation.title)

        def fits(start: int) -> bool:
            question = _node(None, "user", text=f"{as_context(title, text_from(start))}\n\n{_SUMMARISE}")
            return self.drafts.fits(Draft(Past(), question, settings))

        start = bisect.bisect_left(range(len(path)), True, key=fits)
        if start == len(path):
            raise RequestError(say("Not even the last message fits the context. Start a new chat."))
        data = text_from(start).encode()
        digest, num_bytes = self._store.media.add(io.BytesIO(data), max_bytes=len(data))
        self._store.media.hold(person.owner, digest)
        return _node(None, "user", text=_SUMMARISE, attachments=(Attachment(digest, "text", title, num_bytes),))

    def _work(
        self,
        person: Person,
        conversation: Conversation,
        path: Sequence[Node],
        reply: Node,
        calls: Sequence[Allowed] = (),
        *,
        is_summary: bool = False,
    ) -> Work:
        settings = Settings.kept(conversation.settings)
        # Once: another may be chosen at any moment, and the message names the one that is asked.
        model, media = self._backend.info, self._store.media
        if reply.model is None:
            reply = replace(reply, model=model.name, settings=made_with(settings, model))

        def messages_of(path: Sequence[Node]) -> list[Message]:
            return prompt_messages(path, media, settings.system, self._backend.media)

        def plan(file: Attachment) -> Attachment:
            node = _node(None, "tool", attachments=(file,))
            return self.drafts.plan(Draft(Past(), node, settings)).node.attachments[0]

        messages = messages_of(path)
        # A summary was measured without tools, and must call none.
        servers = () if is_summary else self.toolbox.chosen(person.owner, settings)
        steps = None
        if servers or calls:
            steps = Calling(self._backend, media, self.toolbox, servers, messages_of, plan, person.line, tuple(calls))
        request = GenerationRequest(
            messages,
            settings.params(model),
            enable_thinking=settings.enable_thinking(model),
            template_options=settings.template_options(model),
            adapter=settings.adapter(model),
            model=model.name,
            conversation=conversation.id,
            tenant=person.tenant,
            continue_reply=messages[-1].role == "assistant" and not calls,
        )
        work = self._works[reply.id] = Work(person.owner, reply, tuple(path), request, steps)
        return work

    async def _offer_larger_context(self, offers: list[dict[str, Any]], num_tokens: int) -> None:
        """Offers a context of twice what is needed, or the largest that fits the memory, if that is enough."""
        if self._larger_context is None:
            return
        length = await self._larger_context(2 * num_tokens)
        if length is not None and length - length // 8 >= num_tokens:
            label = say("Raise the context to {n} tokens", n=length)
            offers.append({"kind": "context", "label": label, "context_length": length})

    @contextlib.contextmanager
    def _place(self, person: Person, conversation_id: str | None) -> Iterator[None]:
        """Reserves a place for one more reply while it is being prepared, since two requests may come at once."""
        mine = [place for owner, place in self._places if owner == person.owner]
        answers = [reply.node.id for reply in self._replies.of(person.owner)]
        here = [] if conversation_id is None else self._replies.of(person.owner, conversation_id)
        if here or (conversation_id is not None and conversation_id in mine):
            words = say("One answer at a time: wait for it, or press Stop.")
            raise BusyError(words, [reply.node.id for reply in here], is_here=True)
        if len(mine) + len(answers) >= person.max_replies:
            if person.max_replies == 1:
                words = say("You already have an answer in progress. Wait for it, or stop it.")
            else:
                most = person.max_replies
                words = say("You already have {n} answers in progress. Wait for one, or stop one.", n=most)
            raise BusyError(words, answers[:1], is_here=False)
        place = (person.owner, conversation_id)
        self._places.append(place)
        try:
            yield
        finally:
            self._places.remove(place)


def _node(parent: str | None, role: Any, node_id: str | None = None, **fields: Any) -> Node:
    return Node(node_id or new_id(), parent, role, time.time(), **fields)


def _reply_to(question: Node) -> Node:
    """A new reply; `Turns._work` names its model."""
    return _node(question.id, "assistant", status="running")


def _own_first(path: Sequence[Node]) -> str | None:
    """The oldest message in the last question's own prompt."""
    return next((node.first for node in reversed(path) if node.role == "user"), None)


def _title(node: Node) -> str:
    line = next((line.strip() for line in node.text.splitlines() if line.strip()), "")
    if not line:
        line = ", ".join(attachment.name for attachment in node.attachments)
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1].rstrip() + "…"
