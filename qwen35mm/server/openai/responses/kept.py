"""Responses by their ids, in a store of conversations: a request's input is a question in it, a response its answer.

A question's text holds its items as JSON, its attachments the media with their plans; an answer's text is the response
as it was given. So a response is where conversations branch, and what one goes on from is kept once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.chat.store.bounds import Bounds
from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.temporary import temporary_folder
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import EncodedMedium, Image, Video
from qwen35mm.errors import NotFoundError, StorageError
from qwen35mm.server.keys import Caller
from qwen35mm.server.openai.responses.items import Turn
from qwen35mm_preprocess import MediaLimits, MediaPlan, PreparedMedia
from qwen35mm_preprocess.media import open_stream, read_format

logger = logging.getLogger(__name__)

_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})([0-9a-f]{1,8})")
_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
ON_DISK = Bounds(num_bytes=8 * 10**9, conversations=10_000, age_s=30 * 24 * 3600.0)
IN_MEMORY = Bounds(num_bytes=10**9, conversations=1_000, age_s=24 * 3600.0)
# What is left of files that were deleted just when others sent them.
_GARBAGE_S = 3600.0
# The bounds are looked after once in so many responses, or sooner where their media take this part of the bytes.
_TIDY_EVERY = 16
_TIDY_PART = 0.01
_DELETED = {"deleted": True}


@dataclass(frozen=True)
class Past:
    """What a response may go on from.

    Attributes:
        conversation: in which it will be kept.
        parent: the answer before it; None where it begins a conversation.
        turns: input and output of each response so far.
    """

    conversation: str
    parent: str | None = None
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Kept:
    """One response and what it answered."""

    response: dict[str, Any]
    turn: Turn


class KeptResponses:
    """Everybody's responses; nobody finds another's. Its methods read and write files: not for the event loop.

    Every method may raise StorageError.

    Args:
        store: of its own; several programs may share its folder.
        bounds: how much is kept; a few responses more may be there for a while.
    """

    def __init__(self, store: ConversationStore, bounds: Bounds, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._bounds = bounds
        self._clock = clock
        self._garbage_s = 0.0
        self._tidying = threading.Lock()
        self._num_new, self._new_bytes = _TIDY_EVERY - 1, 0

    @classmethod
    def on_disk(cls, folder: Path) -> KeptResponses:
        """Kept in a folder, for the next start, too."""
        return cls(ConversationStore(folder), ON_DISK)

    @classmethod
    def in_memory(cls) -> KeptResponses:
        """Kept for as long as this object is there; only the media are files, in a folder that goes with it."""
        stack = contextlib.ExitStack()
        kept = cls(ConversationStore(stack.enter_context(temporary_folder()), in_memory=True), IN_MEMORY)
        weakref.finalize(kept, stack.close)
        return kept

    def begin(self) -> Past:
        """The place of a response that goes on from none."""
        return Past(new_id())

    def past(self, caller: Caller, response_id: str) -> Past:
        """What is said when a response has been given.

        Raises:
            NotFoundError: this caller has none of this id, or it failed.
        """
        conversation, tree, node = self._answer(caller, response_id)
        if node.status == "failed":
            raise NotFoundError("it failed")
        return Past(conversation.id, node.id, tuple(map(self._turn, tree.path(node.id))))

    def find(self, caller: Caller, response_id: str) -> Kept:
        """One response. Raises NotFoundError."""
        _, tree, node = self._answer(caller, response_id)
        assert node.parent is not None, "an answer has a question"
        return Kept(json.loads(node.text), self._turn(tree.nodes[node.parent]))

    def item(self, caller: Caller, item_id: str) -> tuple[dict[str, Any], Sequence[Image | Video]]:
        """An item of a response or of its input, with the media of its turn. Raises NotFoundError."""
        found = _ITEM.fullmatch(item_id)
        if found is None:
            raise NotFoundError("no id of an item")
        _, tree = self._read(caller, found[1])
        node = tree.nodes[found[1]]
        turn = self._turn(node)
        item = next((item for item in turn.items if item["id"] == item_id), None)
        answers = tree.children(node.id) if node.role == "user" else (node,)
        if item is None or all(map(_is_deleted, answers)):
            raise NotFoundError("no such item")
        return {name: value for name, value in item.items() if name != "id"}, turn.media

    def add(
        self,
        caller: Caller,
        past: Past,
        question: str,
        turn: Turn,
        plans: Sequence[MediaPlan],
        response: dict[str, Any],
        limits: MediaLimits,
    ) -> None:
        """Keeps a response with its input.

        Args:
            question: the id of the node with the input.
            plans: as which the input's media were read; none where they never were.
            limits: that its media were read within.

        Raises:
            NotFoundError: what it goes on from isn't there any more.
        """
        owner, now_s = _owner(caller), self._clock()
        padded = [*plans, *[None] * (len(turn.media) - len(plans))]
        files = tuple(self._attach(owner, *each, limits) for each in zip(turn.media, padded, strict=True))
        asked = Node(question, past.parent, "user", now_s, _dumped({"items": turn.items}), attachments=files)
        status = {"completed": "finished", "incomplete": "length"}.get(response["status"], "failed")
        answer = Node(
            response["id"].removeprefix("resp_"),
            question,
            "assistant",
            now_s,
            _dumped(response),
            status=status,  # pyright: ignore[reportArgumentType] - one of these
            model=response["model"],
        )
        if past.parent is None:
            conversation = Conversation(past.conversation, "", now_s, now_s, head=answer.id)
            self._store.insert(owner, [(conversation, Tree([asked, answer]))])
        else:
            self._store.add(owner, past.conversation, asked, answer)
        self._num_new += 1
        self._new_bytes += sum(file.num_bytes for file in files)
        if self._num_new >= _TIDY_EVERY or self._new_bytes > _TIDY_PART * self._bounds.num_bytes:
            self._num_new, self._new_bytes = 0, 0
            try:
                self.tidy()
            except StorageError as error:
                logger.warning("old responses could not be removed: %s", error)

    def delete(self, caller: Caller, response_id: str) -> None:
        """Deletes a response, which nobody finds from then on. What others go on from stays for them, and goes with
        the last of them.

        Raises:
            NotFoundError: this caller has none of this id.
        """
        owner = _owner(caller)
        conversation, tree, node = self._answer(caller, response_id)
        if tree.children(node.id):
            self._store.update(owner, replace(node, settings=_DELETED))
            return
        # Up to the first that somebody still finds, or goes on from.
        while True:
            question = tree.nodes[node.parent or ""]
            before = None if question.parent is None else tree.nodes[question.parent]
            if before is None or not _is_deleted(before) or len(tree.children(before.id)) > 1:
                break
            node = before
        if before is None:
            self._store.delete(owner, conversation.id)
            self._store.purge()
        else:
            self._store.delete_node(owner, question.id)
        gone = tree.subtree(question.id)
        self._store.media.discard({file.digest for each in gone for file in tree.nodes[each].attachments})

    def tidy(self) -> None:
        """Removes what is beyond the bounds, and now and then what else is left."""
        with self._tidying:
            self._store.trim(self._bounds)
            if self._clock() - self._garbage_s > _GARBAGE_S:
                self._garbage_s = self._clock()
                self._store.media.collect_garbage()

    def address(self, medium: Image | Video) -> str:
        """A kept medium as a data: address. Raises StorageError."""
        assert isinstance(medium.source, Path), "kept media are files"
        with self._store.media.open(medium.source.name) as file:
            kind = read_format(file, medium.source).name.lower()
            file.seek(0)
            data = base64.b64encode(file.read()).decode()
        return f"data:{medium.kind}/{kind};base64,{data}"

    def num_bytes(self, medium: Image | Video) -> int:
        """Of a kept medium. Raises StorageError."""
        assert isinstance(medium.source, Path), "kept media are files"
        with self._store.media.open(medium.source.name) as file:
            return file.seek(0, os.SEEK_END)

    def _read(self, caller: Caller, node_id: str) -> tuple[Conversation, Tree]:
        conversation = self._store.conversation_of(_owner(caller), node_id)
        if conversation is None:
            raise NotFoundError("no such response")
        return self._store.read(_owner(caller), conversation)

    def _answer(self, caller: Caller, response_id: str) -> tuple[Conversation, Tree, Node]:
        """A response that isn't deleted. Raises NotFoundError."""
        found = _RESPONSE.fullmatch(response_id)
        if found is None:
            raise NotFoundError("no id of a response")
        conversation, tree = self._read(caller, found[1])
        node = tree.nodes[found[1]]
        if node.role != "assistant" or _is_deleted(node):
            raise NotFoundError("no such response")
        return conversation, tree, node

    def _turn(self, node: Node) -> Turn:
        values = json.loads(node.text)
        kinds = {"image": Image, "video": Video}
        media = [kinds[file.kind](self._store.media.path(file.digest), file.plan) for file in node.attachments]
        return Turn(tuple(values["items" if node.role == "user" else "output"]), tuple(media))

    def _attach(self, owner: str, medium: Image | Video, plan: MediaPlan | None, limits: MediaLimits) -> Attachment:
        assert not isinstance(medium.source, PreparedMedia | EncodedMedium), "a client sends files"
        max_bytes = limits.max_bytes(medium.kind)
        for _ in range(2):
            with open_stream(medium.source, medium.kind, limits) as file:  # pyright: ignore[reportArgumentType]
                digest, num_bytes = self._store.media.add(file, max_bytes=max_bytes)
            # Somebody may just have deleted it.
            with contextlib.suppress(NotFoundError):
                self._store.media.hold(owner, digest)
                break
        return Attachment(digest, medium.kind, medium.kind, num_bytes, plan)


def _owner(caller: Caller) -> str:
    return f"api:{caller.name}"


def _is_deleted(node: Node) -> bool:
    return node.settings == _DELETED


def _dumped(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))
