"""Conversations in one ZIP file, to be kept elsewhere and to come back.

    conversations/<id>.json     one for each conversation, with all its branches
    media/<digest>.<ext>        each file once, named by the SHA-256 of its bytes
    <title>.md                  the shown branch, for reading; ignored by an import

A JSON file is one object, in UTF-8:

    format      "qwen35mm-conversation"
    version     1; another version is refused
    title, created_s, updated_s (seconds since the epoch), settings (an object)
    head        id of the message that is shown last, or null
    first       id of the oldest message that prompts still hold, or null for all
    messages    objects with the fields of `tree.Node`, parents by id, in the order in which they came; `attachments`
                are objects with the fields of `tree.Attachment`, `plan` an object with those of `MediaPlan`, or null

No key is left out, and none is added without a new version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from qwen35mm.chat.archive_reader import MAX_FILES, ArchiveReader, shown
from qwen35mm.chat.markdown import export_markdown, markdown, media_names
from qwen35mm.chat.records import Conversation, Id, Node, Time, node_values, place_of, read_node
from qwen35mm.chat.store import ConversationStore, new_id
from qwen35mm.chat.tree import Tree
from qwen35mm.errors import ArchiveError, ConversationDataError, StorageError

__all__ = ["export_markdown", "export_zip", "import_zip"]

_FORMAT = "qwen35mm-conversation"
_VERSION = 1
_PIECE_BYTES = 1 << 20
_MAX_TITLE_BYTES = 150
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class _Conversation(BaseModel):
    """A JSON file; its messages are read one by one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: str
    version: int
    title: str
    created_s: Time
    updated_s: Time
    head: Id | None
    first: Id | None
    settings: dict[str, Any]
    messages: list[Any]


def export_zip(store: ConversationStore, owner: str, conversation_ids: Iterable[str], stream: BinaryIO) -> None:
    """Writes conversations of one owner as an archive; `stream` need not be seekable.

    Raises:
        NotFoundError: no such conversation.
        ArchiveError: there would be more files than an import reads.
        StorageError: a message's file is gone or damaged, or can't be read; the archive can't be written.
    """
    try:
        _write(store, owner, conversation_ids, stream)
    except OSError as error:
        raise StorageError("The archive can't be written: the disk is full or fails.") from error


def import_zip(store: ConversationStore, owner: str, stream: BinaryIO, *, max_bytes: int) -> list[Conversation]:
    """Adds the conversations of an archive under new ids: all of them, or none after an error.

    A reply that was being written when it was exported is "stopped".

    Args:
        stream: seekable.
        max_bytes: how many the archive may have when it is unpacked.

    Raises:
        ArchiveError: the archive is damaged, too large, of another version, or holds what no export writes.
        StorageError: the disk is full, or can't be written to.
    """
    archive = ArchiveReader(stream, max_bytes=max_bytes)
    if not archive.conversations:
        raise ArchiveError("The archive holds no conversation. Choose a ZIP file that was exported here.")
    digests = _check(archive)
    new_digests = [digest for digest in digests if digest not in store.media]
    imported: list[Conversation] = []

    def renewed() -> Iterator[tuple[Conversation, Tree]]:
        # Read again, one at a time: all of them may be more than the memory holds.
        for name in archive.conversations:
            conversation, tree = _with_new_ids(*_read(archive, name))
            imported.append(conversation)
            yield conversation, tree

    try:
        for digest in digests:
            _read_media(archive, digest, store)
        store.insert(owner, renewed())
    except BaseException:
        with contextlib.suppress(StorageError):
            store.media.discard(new_digests)
        raise
    return imported


def _write(store: ConversationStore, owner: str, conversation_ids: Iterable[str], stream: BinaryIO) -> None:
    names: dict[str, str] = {}
    titles: dict[str, int] = {}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for num_conversations, conversation_id in enumerate(dict.fromkeys(conversation_ids)):
            conversation, tree = store.read(owner, conversation_id)
            names = media_names((file for node in tree.nodes.values() for file in node.attachments), names)
            if 2 * num_conversations + len(names) + 2 > MAX_FILES:
                raise ArchiveError("These are too many conversations and files for one archive. Export fewer at once.")
            archive.writestr(f"conversations/{conversation.id}.json", _to_json(conversation, tree))
            text = markdown(tree.path(conversation.head), conversation.title, names)
            archive.writestr(f"{_file_name(conversation.title, titles)}.md", text)
        for digest, name in names.items():
            _write_media(store, digest, archive, name)


def _to_json(conversation: Conversation, tree: Tree) -> str:
    values: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **vars(conversation)}
    del values["id"]
    values["settings"] = dict(conversation.settings)
    values["messages"] = [node_values(node) for node in tree.nodes.values()]
    return json.dumps(values, ensure_ascii=False, allow_nan=False, indent=1)


def _read(archive: ArchiveReader, name: str) -> tuple[Conversation, Tree]:
    """A conversation with the archive's own ids. Raises ArchiveError."""
    try:
        text = archive.read(name).decode("utf-8")
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ArchiveError(f"{shown(name)} in the archive is no JSON file that was exported here.") from None
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ArchiveError(f"{shown(name)} in the archive is no conversation that was exported here.")
    if values.get("version") != _VERSION or isinstance(values["version"], bool):
        raise ArchiveError(
            f"{shown(name)} in the archive is of another version than {_VERSION}, which is read here: "
            f"import it with the program that wrote it, or update this one."
        )
    try:
        return _from_json(values)
    except ConversationDataError as error:
        raise ArchiveError(f"{shown(name)} in the archive is damaged. {error}") from None


def _from_json(values: dict[str, Any]) -> tuple[Conversation, Tree]:
    try:
        read = _Conversation.model_validate(values)
    except ValidationError as error:
        raise ConversationDataError(f"Its {place_of(error)} is missing, or is of another form.") from None
    tree = Tree(map(read_node, read.messages))
    for name, node_id in (("head", read.head), ("first", read.first)):
        if node_id is not None and node_id not in tree.nodes:
            raise ConversationDataError(f"Its {name} is no message of it.")
    kept = read.model_dump(exclude={"format", "version", "messages"})
    return Conversation(id="", **kept), tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key twice")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _with_new_ids(conversation: Conversation, tree: Tree) -> tuple[Conversation, Tree]:
    ids: dict[str | None, str | None] = {None: None, **{identity: new_id() for identity in tree.nodes}}

    def renewed(node: Node) -> Node:
        status = "stopped" if node.status == "running" else node.status
        return dataclasses.replace(node, id=ids[node.id], parent=ids[node.parent], status=status)

    head, first = ids[conversation.head], ids[conversation.first]
    return (
        dataclasses.replace(conversation, id=new_id(), head=head, first=first),
        Tree(map(renewed, tree.nodes.values())),
    )


def _check(archive: ArchiveReader) -> list[str]:
    """Reads every conversation; the digests that they refer to. Raises ArchiveError."""
    digests: dict[str, None] = {}
    for name in archive.conversations:
        _, tree = _read(archive, name)
        for attachment in (file for node in tree.nodes.values() for file in node.attachments):
            media = archive.media.get(attachment.digest)
            if media is None:
                raise ArchiveError(f"The archive lacks the file {shown(attachment.name)} of a message.")
            if archive.num_bytes(media) != attachment.num_bytes:
                raise ArchiveError(f"The file {shown(attachment.name)} in the archive is damaged: its length is wrong.")
            digests[attachment.digest] = None
    for digest, media in archive.media.items():
        if digest not in digests:
            raise ArchiveError(f"The archive has a file that no message refers to: {shown(media)}.")
    return list(digests)


def _read_media(archive: ArchiveReader, digest: str, store: ConversationStore) -> None:
    name = archive.media[digest]
    with archive.open(name) as file:
        try:
            store.media.add(file, max_bytes=archive.num_bytes(name), digest=digest)
        except ConversationDataError:
            raise ArchiveError(f"{shown(name)} in the archive is damaged: its content is another.") from None


def _write_media(store: ConversationStore, digest: str, archive: zipfile.ZipFile, name: str) -> None:
    # Pictures and videos are compressed already.
    entry = zipfile.ZipInfo(name)
    sha256 = hashlib.sha256()
    with store.media.open(digest) as file, archive.open(entry, "w", force_zip64=True) as out:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
            out.write(piece)
    if sha256.hexdigest() != digest:
        raise StorageError("A kept file is damaged on the disk, so the conversation with it can't be exported.")


def _file_name(title: str, taken: dict[str, int]) -> str:
    """A name for a title that every file system takes, and that no other has in this archive."""
    kept = "".join("_" if unicodedata.category(c)[0] == "C" or c in '<>:"/\\|?*' else c for c in title)
    name = unicodedata.normalize("NFC", kept).encode("utf-8")[:_MAX_TITLE_BYTES].decode("utf-8", "ignore").strip(" .")
    name = f"_{name}" if _WINDOWS_DEVICES.fullmatch(name) else name or "Conversation"
    unique = name
    while unique.casefold() in taken:
        taken[name.casefold()] += 1
        unique = f"{name} ({taken[name.casefold()]})"
    taken[unique.casefold()] = 1
    return unique
