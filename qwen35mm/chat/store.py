"""Everybody's conversations in one folder: a SQLite database, and the files of their messages by content.

    <folder>/conversations.sqlite
    <folder>/media/

Every call names an owner, and sees and changes only what is the owner's: anything else is not found. Any number of
threads and processes may use one folder. What a call wrote is kept when it returns, whatever happens to the process.
"""

from __future__ import annotations

import time
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen35mm.chat import rows
from qwen35mm.chat.database import Database
from qwen35mm.chat.media import MediaStore
from qwen35mm.chat.media_references import MediaReferences, release
from qwen35mm.chat.node_json import dump_object
from qwen35mm.chat.owner_settings import OwnerSettings
from qwen35mm.chat.tree import Conversation, Node, Tree
from qwen35mm.errors import ConversationDataError, NotFoundError

# Inside the class, `list` is its method.
_Conversations = list[Conversation]
_UPDATED = frozenset({"text", "reasoning", "thinking_s", "status", "error", "notes", "attachments", "stats", "model"})


class ConversationStore(OwnerSettings, MediaReferences):
    """The conversations under `folder`, which is made (mode 0700) when it is first used.

    Every method may raise StorageError: a full, failing or read-only disk, or a database that is damaged, foreign or
    of a newer version. What was kept before stays as it was.

    media    the files; whoever gives one away asks `has_media` first
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.media = MediaStore(folder / "media")
        self._clock = clock
        self._database = Database(folder / "conversations.sqlite")
        self._database.add_function("contains_folded", 2, _contains_folded)

    def close(self) -> None:
        """Gives the database back; the next call opens it again."""
        self._database.close()

    def create(self, owner: str, *, title: str = "", settings: Mapping[str, Any] | None = None) -> Conversation:
        """A new conversation without messages."""
        now_s = self._clock()
        conversation = Conversation(new_id(), title, now_s, now_s, settings=dict(settings or {}))
        with self._database.writing() as connection:
            rows.insert_conversation(connection, owner, conversation)
        return conversation

    def get(self, owner: str, conversation_id: str) -> Conversation:
        """Raises NotFoundError."""
        with self._database.reading() as connection:
            return rows.read_conversation(connection, owner, conversation_id)

    def list(self, owner: str, *, query: str = "", limit: int = 200, offset: int = 0) -> _Conversations:
        """The owner's conversations, the last updated one first.

        Args:
            query: what the title or the text of a message must contain, in lower or upper case.
        """
        folded = _folded(query.strip())
        with self._database.reading() as connection:
            return rows.read_conversations(
                connection,
                "owner = ? AND (? = '' OR contains_folded(title, ?) OR EXISTS (SELECT 1 FROM nodes "
                "WHERE conversation = conversations.id AND contains_folded(text, ?))) "
                "ORDER BY updated_s DESC, sequence DESC LIMIT ? OFFSET ?",
                (owner, folded, folded, folded, limit, offset),
            )

    def tree(self, owner: str, conversation_id: str) -> Tree:
        """All messages of a conversation. Raises NotFoundError."""
        return self.snapshot(owner, conversation_id)[1]

    def snapshot(self, owner: str, conversation_id: str) -> tuple[Conversation, Tree]:
        """A conversation and its messages as of one moment. Raises NotFoundError.

        A file's media plan that another version wrote is read as none.
        """
        with self._database.reading() as connection:
            conversation = rows.read_conversation(connection, owner, conversation_id)
            return conversation, Tree(rows.read_nodes(connection, conversation_id))

    def add(self, owner: str, conversation_id: str, node: Node, *, make_head: bool = True) -> None:
        """Adds a message; the files that it has are then no longer held.

        Raises:
            NotFoundError: no such conversation, or the message's parent is not in it.
            ConversationDataError: the message has a value that it can't have, or its id is taken.
        """
        with self._database.writing() as connection:
            rows.read_conversation(connection, owner, conversation_id)
            if node.parent is not None:
                _check_in(connection, owner, conversation_id, node.parent)
            rows.insert_node(connection, conversation_id, node)
            release(connection, owner, [attachment.digest for attachment in node.attachments])
            _set(connection, conversation_id, updated_s=self._clock())
            if make_head:
                _set(connection, conversation_id, head=node.id)

    def update(self, owner: str, node_id: str, **fields: Any) -> None:
        """Changes a message: text, reasoning, thinking_s, status, error, notes, attachments, stats or model.

        Raises:
            NotFoundError: no such message.
            ConversationDataError: a value that the field can't have.
        """
        if unknown := set(fields) - _UPDATED:
            raise TypeError(f"a message's {', '.join(sorted(unknown))} can't be changed")
        with self._database.writing() as connection:
            conversation_id = rows.conversation_of_node(connection, owner, node_id)
            rows.update_node(connection, node_id, fields)
            release(connection, owner, [attachment.digest for attachment in fields.get("attachments", ())])
            _set(connection, conversation_id, updated_s=self._clock())

    def delete_node(self, owner: str, node_id: str) -> Conversation:
        """Deletes a message with everything below it. Raises NotFoundError.

        Where the shown leaf was among it, the newest leaf of the newest sibling is shown instead; without siblings
        the parent; without a parent nothing. A `first` that was among it becomes None.

        Returns:
            The conversation as it is now.
        """
        with self._database.writing() as connection:
            conversation_id = rows.conversation_of_node(connection, owner, node_id)
            conversation = rows.read_conversation(connection, owner, conversation_id)
            tree = Tree(rows.read_nodes(connection, conversation_id))
            deleted = tree.subtree(node_id)
            connection.executemany("DELETE FROM nodes WHERE id = ?", [(identity,) for identity in deleted])
            if conversation.head in deleted:
                siblings = [node.id for node in tree.siblings(node_id) if node.id != node_id]
                head = tree.newest_leaf(siblings[-1]) if siblings else tree.nodes[node_id].parent
                _set(connection, conversation_id, head=head)
            if conversation.first in deleted:
                _set(connection, conversation_id, first=None)
            _set(connection, conversation_id, updated_s=self._clock())
            return rows.read_conversation(connection, owner, conversation_id)

    def set_head(self, owner: str, conversation_id: str, node_id: str | None) -> None:
        """Chooses the leaf that is shown. Raises NotFoundError."""
        self._set_node(owner, conversation_id, "head", node_id)

    def set_first(self, owner: str, conversation_id: str, node_id: str | None) -> None:
        """Chooses the oldest message that prompts still hold, None for all. Raises NotFoundError."""
        self._set_node(owner, conversation_id, "first", node_id)

    def rename(self, owner: str, conversation_id: str, title: str) -> None:
        """Raises NotFoundError."""
        with self._database.writing() as connection:
            rows.read_conversation(connection, owner, conversation_id)
            _set(connection, conversation_id, title=title)

    def set_settings(self, owner: str, conversation_id: str, settings: Mapping[str, Any]) -> None:
        """Replaces a conversation's settings. Raises NotFoundError."""
        text = dump_object(settings, "conversation's settings")
        with self._database.writing() as connection:
            rows.read_conversation(connection, owner, conversation_id)
            _set(connection, conversation_id, settings=text)

    def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation; files that nothing else has go with `collect_garbage`. Raises NotFoundError."""
        with self._database.writing() as connection:
            rows.read_conversation(connection, owner, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def delete_owner(self, owner: str) -> None:
        """Deletes everything of an owner; files that nobody else has go with `collect_garbage`."""
        with self._database.writing() as connection:
            for table in ("conversations", "held", "presets", "preferences"):
                connection.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))

    def insert(self, owner: str, snapshots: Iterable[tuple[Conversation, Tree]]) -> None:
        """Adds whole conversations, all of them or none.

        Raises:
            NotFoundError: a message's file is not in `media`.
            ConversationDataError: an id is taken, or a value can't be kept.
        """
        with self._database.writing() as connection:
            for conversation, tree in snapshots:
                for node_id in (conversation.head, conversation.first):
                    if node_id is not None and node_id not in tree.nodes:
                        raise ConversationDataError("The conversation is damaged: a message that it names is missing.")
                rows.insert_conversation(connection, owner, conversation)
                for node in tree.nodes.values():
                    rows.insert_node(connection, conversation.id, node)
                    for attachment in node.attachments:
                        if attachment.digest not in self.media:
                            raise NotFoundError("A message's file is not kept any more. Add it again.")

    def _set_node(self, owner: str, conversation_id: str, column: str, node_id: str | None) -> None:
        with self._database.writing() as connection:
            rows.read_conversation(connection, owner, conversation_id)
            if node_id is not None:
                _check_in(connection, owner, conversation_id, node_id)
            _set(connection, conversation_id, **{column: node_id})


def new_id() -> str:
    """A new id of a conversation or a message: 32 random hex digits."""
    return uuid.uuid4().hex


def _set(connection: Any, conversation_id: str, **columns: Any) -> None:
    assignments = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE conversations SET {assignments} WHERE id = ?", (*columns.values(), conversation_id))


def _check_in(connection: Any, owner: str, conversation_id: str, node_id: str) -> None:
    if rows.conversation_of_node(connection, owner, node_id) != conversation_id:
        raise NotFoundError("This message is not in the conversation.")


def _folded(text: str) -> str:
    """Texts that a reader takes for the same in any script, whatever their case and their composition."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.casefold())


def _contains_folded(text: str, folded_query: str) -> bool:
    return folded_query in _folded(text)
