"""Conversations and messages to and from the rows of the database, inside a caller's transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from qwen35mm.chat.node_json import attachment_to_json, check_fields, dump_object, load_object
from qwen35mm.chat.plan_json import plan_from_json
from qwen35mm.chat.tree import Attachment, Conversation, Node
from qwen35mm.errors import ConversationDataError, NotFoundError
from qwen35mm_preprocess import MediaPlan, MediaPlanError

_CONVERSATION = "id, title, created_s, updated_s, head, settings, first"
_NODE = "id, parent, role, created_s, text, reasoning, thinking_s, status, error, notes, stats, model"


def read_conversations(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[Conversation]:
    """The conversations that a clause selects; `where` holds no outside text."""
    rows = connection.execute(f"SELECT {_CONVERSATION} FROM conversations WHERE {where}", values)
    return [
        Conversation(
            identity, title, created_s, updated_s, head, load_object(settings, "conversation's settings"), first
        )
        for identity, title, created_s, updated_s, head, settings, first in rows
    ]


def read_conversation(connection: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation:
    """Raises NotFoundError, also for another owner's."""
    found = read_conversations(connection, "owner = ? AND id = ?", (owner, conversation_id))
    if not found:
        raise NotFoundError("This conversation is not there any more.")
    return found[0]


def conversation_of_node(connection: sqlite3.Connection, owner: str, node_id: str) -> str:
    """The id of a message's conversation. Raises NotFoundError, also for another owner's."""
    row = connection.execute(
        "SELECT c.id FROM nodes AS n JOIN conversations AS c ON c.id = n.conversation WHERE n.id = ? AND c.owner = ?",
        (node_id, owner),
    ).fetchone()
    if row is None:
        raise NotFoundError("This message is not there any more.")
    return row[0]


def insert_conversation(connection: sqlite3.Connection, owner: str, conversation: Conversation) -> None:
    """A new conversation; its messages follow by `insert_node`."""
    settings = dump_object(conversation.settings, "conversation's settings")
    c = conversation
    connection.execute(
        f"INSERT INTO conversations (owner, {_CONVERSATION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (owner, c.id, c.title, c.created_s, c.updated_s, c.head, settings, c.first),
    )


def insert_node(connection: sqlite3.Connection, conversation_id: str, node: Node) -> None:
    """A new message; its parent may still follow in the same transaction.

    Raises:
        ConversationDataError: a field has a value that it can't have, or a message has this id already.
    """
    check_fields(vars(node))
    values = {name: value for name, value in vars(node).items() if name != "attachments"}
    columns = _to_columns(values)
    try:
        connection.execute(
            f"INSERT INTO nodes (conversation, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
            (conversation_id, *columns.values()),
        )
    except sqlite3.IntegrityError:
        raise ConversationDataError("A message with this id is there already.") from None
    _insert_attachments(connection, node.id, node.attachments)


def update_node(connection: sqlite3.Connection, node_id: str, values: Mapping[str, Any]) -> None:
    """Writes new values of a message's fields; raises ConversationDataError for a value that a field can't have."""
    check_fields(values)
    columns = _to_columns({name: value for name, value in values.items() if name != "attachments"})
    if columns:
        assignments = ", ".join(f"{name} = ?" for name in columns)
        connection.execute(f"UPDATE nodes SET {assignments} WHERE id = ?", (*columns.values(), node_id))
    if "attachments" in values:
        connection.execute("DELETE FROM attachments WHERE node = ?", (node_id,))
        _insert_attachments(connection, node_id, values["attachments"])


def read_nodes(connection: sqlite3.Connection, conversation_id: str) -> list[Node]:
    """All messages of a conversation, in the order in which they came."""
    attachments: dict[str, list[Attachment]] = {}
    rows = connection.execute(
        "SELECT a.node, a.digest, a.kind, a.name, a.num_bytes, a.plan FROM attachments AS a "
        "JOIN nodes AS n ON n.id = a.node WHERE n.conversation = ? ORDER BY a.node, a.position",
        (conversation_id,),
    )
    for node_id, digest, kind, name, num_bytes, plan in rows:
        attachments.setdefault(node_id, []).append(Attachment(digest, kind, name, num_bytes, _read_plan(plan)))
    nodes = []
    names = _NODE.split(", ")
    rows = connection.execute(f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY sequence", (conversation_id,))
    for row in rows:
        values = dict(zip(names, row, strict=True))
        values["notes"] = tuple(load_object(values["notes"], "message's notes").get("notes", ()))
        values["stats"] = None if values["stats"] is None else load_object(values["stats"], "message's numbers")
        nodes.append(Node(**values, attachments=tuple(attachments.get(values["id"], ()))))
    return nodes


def _to_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    columns = dict(values)
    if "notes" in columns:
        columns["notes"] = dump_object({"notes": columns["notes"]}, "message's notes")
    if columns.get("stats") is not None:
        columns["stats"] = dump_object(columns["stats"], "message's numbers")
    return columns


def _insert_attachments(connection: sqlite3.Connection, node_id: str, attachments: Iterable[Attachment]) -> None:
    for position, attachment in enumerate(attachments):
        values = attachment_to_json(attachment)
        plan = None if values["plan"] is None else dump_object(values["plan"], "media plan")
        connection.execute(
            "INSERT INTO attachments (node, position, digest, kind, name, num_bytes, plan) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (node_id, position, attachment.digest, attachment.kind, attachment.name, attachment.num_bytes, plan),
        )


def _read_plan(text: str | None) -> MediaPlan | None:
    """A plan of another version is none: a new one can be made, and the conversation stays readable."""
    if text is None:
        return None
    try:
        return plan_from_json(json.loads(text))
    except (MediaPlanError, ValueError):
        return None
