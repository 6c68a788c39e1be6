"""Replies of exported chats as samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from qwen35mm.captioning.records import printable
from qwen35mm.chat.replies.prompting import prompt_messages, prompt_path
from qwen35mm.chat.store.archive import import_zip
from qwen35mm.chat.store.records import Conversation, Node
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import ConfigError, StorageError
from qwen35mm.tuning.samples import Found, Sample
from qwen35mm_preprocess import MediaProcessor

_OWNER = "tune"
_MAX_BYTES = 64 << 30


def read_chats(source: Path, folder: Path, processor: MediaProcessor) -> Found:
    """The replies of exported chats, each with everything before it on the branch that is shown.

    Replies that were stopped or failed are left out, unless a person has edited them.

    Args:
        source: an archive that the page exported, or a folder of archives.
        folder: where the chats' files go; it must stay until training ends.
        processor: the model's; a plan that was made for another one is dropped.

    Raises:
        ConfigError: there is no archive, or no reply in it.
        ArchiveError, StorageError: an archive is damaged, or the folder can't be written to.
    """
    archives = sorted(source.glob("*.zip")) if source.is_dir() else [source]
    found = Found()
    with closing(ConversationStore(folder, in_memory=True)) as store:
        for path in archives:
            try:
                with path.open("rb") as file:
                    imported = import_zip(store, _OWNER, file, max_bytes=_MAX_BYTES)
            except OSError as error:
                raise ConfigError(f"'{printable(path.name)}' can't be read: {error.strerror}.") from error
            for conversation in imported.new:
                _read(store, conversation, processor, found)
    if not found.samples:
        raise ConfigError(
            f"There is nothing to learn from in '{printable(source.name)}': it has no finished reply of an exported "
            "chat. Export chats on the page, and name the ZIP file or a folder of such files."
        )
    return found


def _read(store: ConversationStore, conversation: Conversation, processor: MediaProcessor, found: Found) -> None:
    conversation, tree = store.read(_OWNER, conversation.id)
    path = tree.path(conversation.head)
    system = conversation.settings.get("system")
    for at, node in enumerate(path):
        if node.role != "assistant" or not node.text.strip() or at == 0:
            continue
        if node.status != "finished" and not node.edited:
            continue
        # Its text alone would teach to announce a call and make none.
        if node.calls:
            continue
        asked = prompt_path(path[:at], conversation.first, path[at - 1].first)
        name = f"{printable(conversation.title)}, reply {at // 2 + 1}"
        try:
            messages = prompt_messages(asked, store.media, system if isinstance(system, str) else "", processor)
        except StorageError as error:
            found.skipped.append((name, str(error)))
            continue
        reasoning = "" if node.edited else node.reasoning.strip()
        found.samples.append(
            Sample(name, tuple(messages), node.text.strip(), _group(path), reasoning, edited=node.edited)
        )


def _group(path: Sequence[Node]) -> bytes:
    """Identifies a chat by its first question, so that each export of it is on the same side."""
    first = path[0]
    return hashlib.sha256("\0".join([first.text, *(file.digest for file in first.attachments)]).encode()).digest()
