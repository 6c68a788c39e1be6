"""Reads and writes rows of the conversations' database in a caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from qwen35mm.chat.store.records import (
    CLIPS,
    CROPS,
    Attachment,
    Conversation,
    Node,
    call_words,
    checked_node,
    dump_calls,
    dump_object,
    dump_plan,
    dump_words,
    heard,
    load_calls,
    load_object,
    load_plan,
    load_words,
)
from qwen35mm.errors import ConversationDataError, NotFoundError
from qwen35mm_preprocess.say import say

# Columns have the fields' names.
_FLAGS = {field.name for kept in (Conversation, Node) for field in fields(kept) if field.type == "bool"}
_CONVERSATION = ", ".join(field.name for field in fields(Conversation))
_NODE = ", ".join(field.name for field in fields(Node) if field.name != "attachments")
_ATTACHMENT = ", ".join(field.name for field in fields(Attachment))
# Columns of messages with JSON objects, and their names in error messages.
_OBJECTS = {"stats": "message.stats", "settings": "message.settings"}

# The order of a list of conversations, named c, and the condition for those after a place in it.
ORDER = "c.pinned DESC, c.updated_s DESC, c.sequence DESC"
AFTER = (
    "(:place IS NULL OR (c.pinned, c.updated_s, c.sequence) "
    "< (:pinned, :updated_s, (SELECT sequence FROM conversations WHERE id = :place)))"
)


class Place(NamedTuple):
    """A place in a list of conversations: pinned first, then by last update. Valid even if its conversation moves."""

    id: str
    pinned: bool
    updated_s: float


def place_values(place: Place | None) -> dict[str, Any]:
    """The values of `AFTER`; None is before the first."""
    id_, pinned, updated_s = place or (None, None, None)
    return {"place": id_, "pinned": pinned, "updated_s": updated_s}


def read_conversations(connection: sqlite3.Connection, where: str, values: Mapping[str, Any]) -> list[Conversation]:
    """The conversations that a clause selects; `where` must not contain text from outside."""
    names = _CONVERSATION.split(", ")
    found = []
    for row in connection.execute(f"SELECT {_CONVERSATION} FROM present AS c WHERE {where}", values):
        fields = _values(names, row)
        fields["settings"] = load_object(fields["settings"], "conversation.settings")
        found.append(Conversation(**fields))
    return found


def read_conversation(connection: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation:
    """One conversation. Raises NotFoundError, also for another owner's."""
    found = read_conversations(connection, "owner = :owner AND id = :id", {"owner": owner, "id": conversation_id})
    if not found:
        raise NotFoundError(say("This chat no longer exists."))
    return found[0]


def conversation_of(connection: sqlite3.Connection, owner: str, node_id: str) -> str:
    """The id of a message's conversation. Raises NotFoundError, also for another owner's."""
    row = connection.execute(
        "SELECT c.id FROM nodes AS n JOIN present AS c ON c.id = n.conversation WHERE n.id = ? AND c.owner = ?",
        (node_id, owner),
    ).fetchone()
    if row is None:
        raise NotFoundError(say("This message no longer exists."))
    return row[0]


def check_in(connection: sqlite3.Connection, owner: str, conversation_id: str, node_id: str) -> None:
    if conversation_of(connection, owner, node_id) != conversation_id:
        raise NotFoundError(say("This message isn't in the chat."))


def read_nodes(connection: sqlite3.Connection, conversation_id: str) -> list[Node]:
    """All messages of a conversation in the order of their arrival."""
    attachments: dict[str, list[Attachment]] = {}
    rows = connection.execute(
        f"SELECT node, {_ATTACHMENT} FROM attachments WHERE node IN (SELECT id FROM nodes WHERE conversation = ?) "
        "ORDER BY node, position",
        (conversation_id,),
    )
    for node_id, digest, kind, name, num_bytes, plan, clip, crop_of in rows:
        file = Attachment(digest, kind, name, num_bytes, load_plan(plan), CLIPS.load(clip), CROPS.load(crop_of))
        attachments.setdefault(node_id, []).append(file)
    nodes = []
    names = _NODE.split(", ")
    rows = connection.execute(f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY sequence", (conversation_id,))
    for row in rows:
        values = _values(names, row)
        values["notes"] = tuple(map(heard, load_object(values["notes"], "message.notes").get("notes", ())))
        values["error"] = load_words(values["error"])
        values["calls"] = load_calls(values["calls"])
        for name, what in _OBJECTS.items():
            values[name] = None if values[name] is None else load_object(values[name], what)
        nodes.append(Node(**values, attachments=tuple(attachments.get(values["id"], ()))))
    return nodes


def _values(names: Iterable[str], row: Iterable[Any]) -> dict[str, Any]:
    """A row by column names, with SQLite's numbers for flags as bool."""
    return {name: bool(value) if name in _FLAGS else value for name, value in zip(names, row, strict=True)}


def insert_node(connection: sqlite3.Connection, conversation_id: str, node: Node, row: Mapping[str, Any]) -> None:
    """Inserts a message with its `node_row`; its parent may follow in the same transaction.

    Raises ConversationDataError.
    """
    insert_row(connection, "nodes", {"conversation": conversation_id, **row})
    insert_attachments(connection, node)


def insert_attachments(connection: sqlite3.Connection, node: Node) -> None:
    for position, attachment in enumerate(node.attachments):
        parts = {"clip": CLIPS.dump(attachment.clip), "crop_of": CROPS.dump(attachment.crop_of)}
        values = {**vars(attachment), "plan": dump_plan(attachment.plan), **parts}
        insert_row(connection, "attachments", {"node": node.id, "position": position, **values})


def conversation_row(values: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(values)
    if "settings" in row:
        row["settings"] = dump_object(row["settings"], "conversation.settings")
    return row


def node_row(node: Node) -> dict[str, Any]:
    """A message's row. Raises ConversationDataError for an invalid value."""
    row = {**vars(checked_node(node)), "notes": dump_object({"notes": node.notes}, "message.notes")}
    row["error"], row["calls"] = dump_words(node.error), dump_calls(node.calls)
    row["called"] = call_words(node.calls)
    row |= {name: None if row[name] is None else dump_object(row[name], what) for name, what in _OBJECTS.items()}
    del row["attachments"]
    return row


def insert_row(connection: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    """Inserts a row. Raises ConversationDataError if its id exists."""
    places = ", ".join("?" * len(row))
    try:
        connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", (*row.values(),))
    except sqlite3.IntegrityError:
        raise ConversationDataError(say("A chat or a message with this id already exists.")) from None


def update_row(connection: sqlite3.Connection, table: str, identity: str, row: Mapping[str, Any]) -> None:
    assignments = ", ".join(f"{name} = ?" for name in row)
    connection.execute(f"UPDATE {table} SET {assignments} WHERE id = ?", (*row.values(), identity))


def release_files(connection: sqlite3.Connection, owner: str, attachments: Iterable[Attachment]) -> None:
    rows = [(owner, attachment.digest) for attachment in attachments]
    connection.executemany("DELETE FROM held WHERE owner = ? AND digest = ?", rows)
