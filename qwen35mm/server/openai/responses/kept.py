"""Responses by their ids, in a store of conversations: a request's input is a question there, a response its answer.

A question's text is its items as JSON; its attachments are the media with their plans. An answer's text is the response
as it was sent. Conversations branch at responses, so a history that several share is stored once.
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
from qwen35mm.server.history import left_out
from qwen35mm.server.keys import Caller
from qwen35mm.server.openai.responses.items import Turn
from qwen35mm_preprocess import MediaLimits, MediaPlan, PreparedMedia
from qwen35mm_preprocess.media import open_stream, read_format

logger = logging.getLogger(__name__)

_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})([0-9a-f]{1,8})")
_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
ON_DISK = Bounds(num_bytes=8 * 10**9, conversations=10_000, age_s=30 * 24 * 3600.0)
IN_MEMORY = Bounds(num_bytes=10**9, conversations=1_000, age_s=24 * 3600.0)
# How often to remove leftovers of files that were deleted while others sent them.
_GARBAGE_S = 3600.0
# Apply the bounds after this many responses, or sooner if their media take this share of the allowed bytes.
_TIDY_EVERY = 16
_TIDY_PART = 0.01
_DELETED = {"deleted": True}


@dataclass(frozen=True)
class Past:
    """What a response continues.

    Attributes:
        conversation: the id of the conversation in which it will be kept.
        parent: the id of the answer before it; None at the beginning of a conversation.
        turns: input and output of each response so far.
    """

    conversation: str
    parent: str | None = None
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Kept:
    """One response and its input."""

    response: dict[str, Any]
    turn: Turn


class KeptResponses:
    """All callers' responses; a caller finds only their own. The methods do file I/O: call them off the event loop.

    Every method may raise StorageError.

    Args:
        store: used for nothing else; several programs may share its folder.
        bounds: how much is kept; may be exceeded by a few responses for a while.
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
        """Keeps responses in a folder, across restarts."""
        return cls(ConversationStore(folder), ON_DISK)

    @classmethod
    def in_memory(cls) -> KeptResponses:
        """Keeps responses as long as this object exists. Only media are files, in a temporary folder."""
        stack = contextlib.ExitStack()
        kept = cls(ConversationStore(stack.enter_context(temporary_folder()), in_memory=True), IN_MEMORY)
        weakref.finalize(kept, stack.close)
        return kept

    def begin(self) -> Past:
        """A `Past` for a response that continues none."""
        return Past(new_id())

    def past(self, caller: Caller, response_id: str) -> Past:
        """The history up to and including a response.

        Raises:
            NotFoundError: the caller has no response of this id, or it failed.
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
        plans: Sequence[MediaPlan | None],
        response: dict[str, Any],
        limits: MediaLimits,
    ) -> None:
        """Keeps a response with its input.

        Args:
            question: the id of the node with the input.
            plans: of the input's media, None for one that couldn't be read; empty if they were never read.
            limits: the limits for reading its media.

        Raises:
            NotFoundError: the response that it continues is gone.
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
        """Deletes a response. If others continue it, their history stays until the last of them is deleted.

        Raises:
            NotFoundError: the caller has no response of this id.
        """
        owner = _owner(caller)
        conversation, tree, node = self._answer(caller, response_id)
        if tree.children(node.id):
            self._store.update(owner, replace(node, settings=_DELETED))
            return
        # Go up to the first answer that isn't deleted or that another response continues.
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
        """Applies the bounds and, now and then, removes leftover files."""
        with self._tidying:
            self._store.trim(self._bounds)
            if self._clock() - self._garbage_s > _GARBAGE_S:
                self._garbage_s = self._clock()
                self._store.media.collect_garbage()

    def address(self, medium: Image | Video) -> str:
        """A kept medium as a `data:` address. Raises StorageError."""
        assert isinstance(medium.source, Path), "kept media are files"
        with self._store.media.open(medium.source.name) as file:
            kind = read_format(file, medium.source).name.lower()
            file.seek(0)
            data = base64.b64encode(file.read()).decode()
        return f"data:{medium.kind}/{kind};base64,{data}"

    def num_bytes(self, medium: Image | Video) -> int:
        """The size of a kept medium. Raises StorageError."""
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
        media = [
            kinds[file.kind](self._store.media.path(file.digest), file.plan, stand_in=left_out(file.kind))
            for file in node.attachments
        ]
        return Turn(tuple(values["items" if node.role == "user" else "output"]), tuple(media))

    def _attach(self, owner: str, medium: Image | Video, plan: MediaPlan | None, limits: MediaLimits) -> Attachment:
        assert not isinstance(medium.source, PreparedMedia | EncodedMedium), "a client sends files"
        max_bytes = limits.max_bytes(medium.kind)
        for _ in range(2):
            with open_stream(medium.source, medium.kind, limits) as file:  # pyright: ignore[reportArgumentType]
                digest, num_bytes = self._store.media.add(file, max_bytes=max_bytes)
            # The file may have been deleted in the meantime; then add it again.
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
