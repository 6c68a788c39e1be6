"""Export and import of conversations as one ZIP file.

    conversations/<id>.json     one conversation, with all its branches
    media/<digest>.<ext>        each file once, named by the SHA-256 of its bytes
    <title>.md                  the shown branch, for reading; an import ignores it

A JSON file is one object, in UTF-8:

    format      "qwen35mm-conversation"
    version     3; 2 is read, too, which had no calls; another version is refused
    title, created_s, updated_s (seconds since the epoch), settings (an object)
    pinned, titled (true or false: see `records.Conversation`)
    head        id of the last shown message, or null
    first       id of the oldest message in prompts, or null for all
    messages    objects with the fields of `records.Node`, oldest first, parents by id; `attachments` are objects
                with the fields of `records.Attachment`, `plan` an object with those of `MediaPlan`, or null

Every key is required, and a new key needs a new version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from qwen35mm.chat.settings import for_any_chat
from qwen35mm.chat.store.markdown import markdown, media_names
from qwen35mm.chat.store.records import KEPT, Attachment, Conversation, Id, Node, Time, place_of
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import ArchiveError, ConversationDataError, NotFoundError, StorageError
from qwen35mm.outside_json import JsonLimitError, load_json
from qwen35mm_preprocess.say import Said, decimal, said_of, say

MAX_FILES = 20_000
MAX_JSON_BYTES = 64 << 20
# zipfile reads the list of files at once; a list of 20,000 takes half of this.
_MAX_READ_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_MAX_TITLE_BYTES = 150

_FORMAT = "qwen35mm-conversation"
_VERSION = 3
# The version before had no tools.
_WITHOUT_CALLS = 2
_CONVERSATION = re.compile(r"conversations/[0-9a-f]{32}\.json")
_MEDIA = re.compile(r"media/([0-9a-f]{64})\.[a-z0-9]{1,8}")
_READABLE = re.compile(r"[^/\\]+\.md")
_FOLDERS = ("conversations/", "media/")
_IS_ENCRYPTED = 1
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

# What zipfile raises for damaged archives, and for what it doesn't support.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    OverflowError,
    ValueError,
)


class _File(BaseModel):
    """A JSON file."""

    model_config = KEPT

    format: str
    version: int
    title: str
    created_s: Time
    updated_s: Time
    head: Id | None
    first: Id | None
    settings: dict[str, Any]
    pinned: bool = False
    titled: bool = True
    messages: list[Node]


class Imported(NamedTuple):
    """What an archive brought.

    new         its conversations that are new
    extended    conversations that were there already, and got messages
    num_known   those in it that were there already, with all their messages
    """

    new: list[Conversation]
    extended: list[Conversation]
    num_known: int


class _Read(NamedTuple):
    """A conversation of an archive, in the archive's own ids.

    stored      the same one in the store; None if it is new
    found       the stored messages by the archive's ids
    """

    conversation: Conversation
    tree: Tree
    stored: Conversation | None
    found: dict[str, Node]


def export_zip(store: ConversationStore, owner: str, conversation_ids: Iterable[str], stream: BinaryIO) -> None:
    """Writes conversations of one owner as an archive; `stream` need not be seekable.

    A conversation that was deleted meanwhile is left out.

    Raises:
        NotFoundError: no conversation exists.
        ArchiveError: there are more files than an import reads, or a longer conversation.
        StorageError: a message's file is gone, damaged or unreadable, or the archive can't be written.
    """
    names: dict[str, str] = {}
    titles: dict[str, int] = {}
    # Of a conversation with each file.
    titles_by_file: dict[str, str] = {}
    missing: NotFoundError | None = None
    try:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for num_conversations, conversation_id in enumerate(dict.fromkeys(conversation_ids)):
                try:
                    conversation, tree = store.read(owner, conversation_id)
                except NotFoundError as error:
                    missing = error
                    continue
                files = [file for node in tree.nodes.values() for file in node.attachments]
                titles_by_file |= {file.digest: conversation.title for file in files}
                names = media_names(files, names)
                if 2 * num_conversations + len(names) + 2 > MAX_FILES:
                    raise ArchiveError(say("These are too many chats and files for one archive. Export fewer."))
                values = _to_json(conversation, tree).encode()
                if len(values) > MAX_JSON_BYTES:
                    raise ArchiveError(
                        say(
                            "The chat {title} has {n} MiB of text; {most} are read from an archive. Export it as "
                            "Markdown.",
                            title=_shown(conversation.title),
                            n=decimal(len(values) / 2**20, 1),
                            most=MAX_JSON_BYTES >> 20,
                        )
                    )
                archive.writestr(f"conversations/{conversation.id}.json", values)
                text = markdown(tree.path(conversation.head), conversation.title, names)
                archive.writestr(f"{_file_name(conversation.title, titles)}.md", text)
            if missing is not None and not titles:
                raise missing
            for digest, name in names.items():
                try:
                    _write_media(store, digest, archive, name)
                except StorageError as error:
                    title = _shown(titles_by_file[digest])
                    what = say("The chat {title} can't be exported. {error}", title=title, error=said_of(error))
                    raise type(error)(what) from error
    except OSError as error:
        raise StorageError(say("The archive can't be written: the disk is full or failed.")) from error


def import_zip(
    store: ConversationStore,
    owner: str,
    stream: BinaryIO,
    *,
    max_bytes: int,
    max_conversations: int = MAX_FILES,
    max_json_bytes: int = MAX_JSON_BYTES,
    admit: Callable[[Attachment], Attachment] = lambda attachment: attachment,
) -> Imported:
    """Adds what is new in an archive, under new ids: all of it, or nothing after an error.

    A conversation that the owner has already, by the times of its beginning and of its messages, gets the messages that
    it lacks; what is stored stays. A reply that was running when it was exported becomes "stopped". The archive is
    untrusted: no file in it is unpacked under its own name.

    Args:
        stream: seekable.
        max_bytes: limit of the unpacked archive, without files that the owner has.
        max_conversations: limit of its new conversations.
        max_json_bytes: limit of one conversation without its files.
        admit: checks a file that is already in the store, and returns the attachment to store.

    Raises:
        MediaError, DocumentError: from `admit`.
        ArchiveError: the archive is damaged, too large, of another version, or has content that no export writes.
        StorageError: the disk is full or can't be written.
    """
    with _damage_in_words(say("The archive")):
        # The directory is read at once; an explicit close would only close the caller's stream.
        archive = zipfile.ZipFile(cast(BinaryIO, _Bounded(stream)))

    def is_lacking(digest: str) -> bool:
        return digest not in store.media or not store.media.is_of(owner, digest)

    conversations, media = _list(archive, max_bytes, max_json_bytes, is_lacking)
    lacking = {digest: entry for digest, entry in media.items() if is_lacking(digest)}
    known = store.by_time(owner)
    read: list[_Read] = []
    for entry in conversations:
        conversation, tree = _read(archive, entry)
        _check_files(tree, media)
        read.append(_Read(conversation, tree, *_find(store, owner, conversation, tree, known)))
    _check_unused(read, media)
    num_new = sum(each.stored is None for each in read)
    if num_new > max_conversations:
        raise ArchiveError(
            say(
                "The archive has {n} new {n|chat|chats}; there is room for {room} here. Export fewer at a time, "
                "or delete some that you don't need.",
                n=num_new,
                room=max_conversations,
            )
        )
    new_digests = [digest for digest in lacking if digest not in store.media]
    try:
        for digest, entry in lacking.items():
            _read_media(archive, digest, entry, store)
        new = [_with_new_ids(each, admit) for each in read if each.stored is None]
        extended = [change for each in read if each.stored and (change := _with_new_ids(each, admit))[1]]
        store.insert(owner, [(conversation, Tree(nodes)) for conversation, nodes in new], extended)
    except BaseException:
        with contextlib.suppress(StorageError):
            store.media.discard(new_digests)
        raise
    num_known = len(read) - len(new) - len(extended)
    return Imported([each for each, _ in new], [each for each, _ in extended], num_known)


def _to_json(conversation: Conversation, tree: Tree) -> str:
    kept = {**vars(conversation), "settings": dict(conversation.settings), "messages": [*tree.nodes.values()]}
    del kept["id"], kept["unseen"]
    return _File.model_construct(format=_FORMAT, version=_VERSION, **kept).model_dump_json(indent=1)


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[Conversation, Tree]:
    """A conversation with the archive's own ids. Raises ArchiveError."""
    name = _shown(entry.filename)
    with _damage_in_words(name), archive.open(entry) as file:
        # At most the declared size: a false one could fill the memory. In pieces, as the stream allows.
        text = b"".join(iter(lambda: file.read(_PIECE_BYTES), b""))
    try:
        values = load_json(text, max_bytes=entry.file_size)
    except JsonLimitError:
        what = say("{name} in the archive has too many values, or nests them too deeply.", name=name)
        raise ArchiveError(what) from None
    except ValueError:
        raise ArchiveError(say("{name} in the archive isn't a JSON file that was exported here.", name=name)) from None
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ArchiveError(say("{name} in the archive isn't a chat that was exported here.", name=name))
    version = values.get("version")
    if version == _WITHOUT_CALLS and type(version) is int:
        text, version = _with_calls(values), _VERSION
    if version != _VERSION or isinstance(version, bool):
        raise ArchiveError(
            say(
                "{name} in the archive doesn't have version {known}. Import it with the program that wrote it, or "
                "update this one.",
                name=name,
                known=_VERSION,
            )
        )
    try:
        read = _File.model_validate_json(text)
        if read.model_dump(mode="json") != values:
            raise ConversationDataError(say("A key is missing."))
        tree = Tree(read.messages)
        if not {read.head, read.first, *(node.first for node in read.messages)} <= {None, *tree.nodes}:
            raise ConversationDataError(say("Its head or a first message is missing."))
    except ValidationError as error:
        raise ArchiveError(
            say("{name} in the archive is damaged. Its {place} has the wrong form.", name=name, place=place_of(error))
        ) from None
    except ConversationDataError as error:
        raise ArchiveError(say("{name} in the archive is damaged. {error}", name=name, error=said_of(error))) from None
    kept = read.model_dump(exclude={"format", "version", "messages"})
    return Conversation(id="", **kept), tree


def _with_calls(values: dict[str, Any]) -> str:
    """Makes a file of the version before one of this version."""
    messages = values.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            message |= {"calls": [], "call": None}
    values["version"] = _VERSION
    return json.dumps(values)


def _find(
    store: ConversationStore, owner: str, conversation: Conversation, tree: Tree, known: Mapping[float, Sequence[str]]
) -> tuple[Conversation | None, dict[str, Node]]:
    """The stored conversation that an archive's is, and its messages by the archive's ids; None if it is new."""
    for conversation_id in known.get(conversation.created_s, ()):
        stored, kept = store.read(owner, conversation_id)
        found = _find_messages(tree, kept)
        if found or not tree.nodes or not kept.nodes:
            return stored, found
    return None, {}


def _find_messages(tree: Tree, kept: Tree) -> dict[str, Node]:
    found: dict[str, Node] = {}
    open_ids: list[str | None] = [None]
    while open_ids:
        parent = open_ids.pop()
        there: dict[Any, list[Node]] = {}
        for node in kept.children(found[parent].id if parent else None):
            there.setdefault(_key(node), []).append(node)
        for node in tree.children(parent):
            candidates = there.get(_key(node))
            if candidates and _is_same(candidates[0], node):
                found[node.id] = candidates.pop(0)
                open_ids.append(node.id)
    return found


def _key(node: Node) -> tuple[Any, ...]:
    return node.role, node.created_s, node.call, *(dataclasses.replace(file, plan=None) for file in node.attachments)


def _is_same(stored: Node, node: Node) -> bool:
    """Whether one text continues the other: a reply grows while it is written, and when it is continued."""
    pairs = ((stored.text, node.text), (stored.reasoning, node.reasoning))
    is_older = all(kept.startswith(text) for kept, text in pairs)
    return is_older or (stored.status != "running" and all(text.startswith(kept) for kept, text in pairs))


def _with_new_ids(read: _Read, admit: Callable[[Attachment], Attachment]) -> tuple[Conversation, list[Node]]:
    """What to store: the conversation, and its messages that are new or longer than those stored."""
    found, tree = read.found, read.tree
    ids: dict[str | None, str | None] = {None: None}
    for identity in tree.nodes:
        ids[identity] = found[identity].id if identity in found else new_id()
    nodes = []
    for node in tree.nodes.values():
        if node.id in found and _num_chars(node) <= _num_chars(found[node.id]):
            continue
        status = "stopped" if node.status == "running" else node.status
        files = tuple(map(admit, node.attachments))
        places = {"id": ids[node.id], "parent": ids[node.parent], "first": ids[node.first]}
        nodes.append(dataclasses.replace(node, **places, status=status, attachments=files))
    head, stored = ids[read.conversation.head], read.stored
    if stored is None:
        # Whoever wrote the archive switches no tools on here.
        settings = for_any_chat(read.conversation.settings)
        own = {"id": new_id(), "head": head, "first": ids[read.conversation.first], "settings": settings}
        return dataclasses.replace(read.conversation, **own), nodes
    # What is shown stays, or goes on.
    if stored.head not in {None, *(ids[node.id] for node in tree.path(read.conversation.head))}:
        head = stored.head
    return dataclasses.replace(stored, head=head, updated_s=max(stored.updated_s, read.conversation.updated_s)), nodes


def _num_chars(node: Node) -> int:
    return len(node.text) + len(node.reasoning)


def _check_files(tree: Tree, media: Mapping[str, zipfile.ZipInfo]) -> None:
    """Raises ArchiveError unless the archive has the messages' files, in their lengths."""
    for attachment in (file for node in tree.nodes.values() for file in node.attachments):
        file = media.get(attachment.digest)
        if file is None:
            raise ArchiveError(
                say("A message's file is missing from the archive: {name}.", name=_shown(attachment.name))
            )
        if file.file_size != attachment.num_bytes:
            raise ArchiveError(say("The file {name} is damaged: its length is wrong.", name=_shown(attachment.name)))


def _check_unused(read: Iterable[_Read], media: Mapping[str, zipfile.ZipInfo]) -> None:
    used = {file.digest for each in read for node in each.tree.nodes.values() for file in node.attachments}
    for digest, file in media.items():
        if digest not in used:
            raise ArchiveError(
                say("The archive has a file that no message refers to: {name}.", name=_shown(file.filename))
            )


def _list(
    archive: zipfile.ZipFile, max_bytes: int, max_json_bytes: int, is_lacking: Callable[[str], bool]
) -> tuple[list[zipfile.ZipInfo], dict[str, zipfile.ZipInfo]]:
    """The JSON files, and the media by digest, with names and declared sizes checked.

    Args:
        is_lacking: whether a file, by its digest, counts for `max_bytes`.

    Raises:
        ArchiveError: an unknown name or kind of file, a duplicate name, a file or archive that is too large, or no
            conversation.
    """
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise ArchiveError(say("The archive has {n} files; up to {most} are read.", n=len(entries), most=MAX_FILES))
    found = [(entry.file_size, _MEDIA.fullmatch(entry.filename)) for entry in entries]
    num_bytes = sum(size for size, medium in found if medium is None or is_lacking(medium[1]))
    if num_bytes > max_bytes:
        raise ArchiveError(
            say(
                "The archive has {n} MiB when unpacked; {most} are allowed.",
                n=decimal(num_bytes / 2**20, 1),
                most=decimal(max_bytes / 2**20, 1),
            )
        )
    conversations, media, names = [], {}, set()
    for entry in entries:
        name = entry.filename
        if name in names:
            raise ArchiveError(say("The archive has two files named {name}.", name=_shown(name)))
        names.add(name)
        if name in _FOLDERS and entry.file_size == 0:
            continue
        if entry.flag_bits & _IS_ENCRYPTED or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(
                say("{name} in the archive is encrypted, or compressed in an unsupported way.", name=_shown(name))
            )
        if _CONVERSATION.fullmatch(name):
            if entry.file_size > max_json_bytes:
                most = max_json_bytes >> 20
                raise ArchiveError(say("{name} is larger than the limit of {most} MiB.", name=_shown(name), most=most))
            conversations.append(entry)
        elif found := _MEDIA.fullmatch(name):
            if found[1] in media:
                raise ArchiveError(say("The archive has a media file twice: {name}.", name=_shown(name)))
            media[found[1]] = entry
        elif not _READABLE.fullmatch(name):
            raise ArchiveError(
                say(
                    "The archive has an unexpected file: {name}. Choose a ZIP file that was exported here.",
                    name=_shown(name),
                )
            )
    if not conversations:
        raise ArchiveError(say("The archive has no chat. Choose a ZIP file that was exported here."))
    return conversations, media


def _read_media(archive: zipfile.ZipFile, digest: str, entry: zipfile.ZipInfo, store: ConversationStore) -> None:
    name = _shown(entry.filename)
    with _damage_in_words(name), archive.open(entry) as file:
        try:
            store.media.add(cast(BinaryIO, file), max_bytes=entry.file_size, digest=digest)
        except ConversationDataError:
            raise ArchiveError(say("{name} in the archive is damaged: its content doesn't match.", name=name)) from None


def _write_media(store: ConversationStore, digest: str, archive: zipfile.ZipFile, name: str) -> None:
    # Stored, not deflated: pictures and videos are already compressed.
    entry = zipfile.ZipInfo(name)
    sha256 = hashlib.sha256()
    with store.media.open(digest) as file, archive.open(entry, "w", force_zip64=True) as out:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
            out.write(piece)
    if sha256.hexdigest() != digest:
        raise StorageError(say("A stored file is damaged on the disk."))


def _file_name(title: str, taken: dict[str, int]) -> str:
    """A file name for a title: valid on every file system and unique in this archive."""
    kept = "".join("_" if unicodedata.category(c)[0] == "C" or c in '<>:"/\\|?*' else c for c in title)
    name = unicodedata.normalize("NFC", kept).encode("utf-8")[:_MAX_TITLE_BYTES].decode("utf-8", "ignore").strip(" .")
    name = f"_{name}" if _WINDOWS_DEVICES.fullmatch(name) else name or "Conversation"
    unique = name
    while unique.casefold() in taken:
        taken[name.casefold()] += 1
        unique = f"{name} ({taken[name.casefold()]})"
    taken[unique.casefold()] = 1
    return unique


class _Bounded:
    """A stream that refuses large reads, so that a list of files can't fill the memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= _MAX_READ_BYTES else _MAX_READ_BYTES + 1)
        if len(data) > _MAX_READ_BYTES:
            raise ArchiveError(say("The archive's list of files is damaged or too long."))
        return data


def _shown(name: str) -> str:
    """A name from an archive for a message, quoted and shortened."""
    return repr(name if len(name) <= 80 else f"{name[:40]}…{name[-39:]}")


@contextlib.contextmanager
def _damage_in_words(what: Said) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise ArchiveError(say("{what} is damaged, or isn't a ZIP file that was exported here.", what=what)) from error
