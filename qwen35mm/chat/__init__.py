"""Conversations that are kept: the tree of messages, its database, the files by content, archives.

tree          Node, Attachment, Conversation, Tree: plain values
store         ConversationStore: who has which conversations; SQLite
media         MediaStore: files by their SHA-256
archive       export and import: ZIP with JSON and the files; markdown, archive_reader are its parts
documents     text and PDF files as context
plan_json, node_json    the JSON forms, checked when read
database, schema, rows  SQLite: connection, tables, rows; inside a store only
media_references, owner_settings    parts of ConversationStore
"""

from __future__ import annotations

from qwen35mm.chat.archive import export_markdown, export_zip, import_zip
from qwen35mm.chat.media import MediaStore
from qwen35mm.chat.store import ConversationStore, new_id
from qwen35mm.chat.tree import Attachment, AttachmentKind, Conversation, Node, ReplyStatus, Role, Tree

__all__ = [
    "Attachment",
    "AttachmentKind",
    "Conversation",
    "ConversationStore",
    "MediaStore",
    "Node",
    "ReplyStatus",
    "Role",
    "Tree",
    "export_markdown",
    "export_zip",
    "import_zip",
    "new_id",
]
