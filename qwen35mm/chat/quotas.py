"""What one person, and all of them together, may take of a server: every such limit, once.

Alone on one's own machine only the disk and the memory are limits. Where strangers share the page, one must not take
what the others need.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35mm.chat.archive import MAX_FILES, MAX_JSON_BYTES


@dataclass(frozen=True)
class Quotas:
    """Limits of a page.

    archive_bytes       of one import, as it comes and unpacked
    conversation_bytes  of one conversation in it, without its files
    conversations       of one person
    """

    archive_bytes: int
    conversation_bytes: int
    conversations: int


ALONE = Quotas(archive_bytes=8 << 30, conversation_bytes=MAX_JSON_BYTES, conversations=MAX_FILES)
STRANGERS = Quotas(archive_bytes=200 * 10**6, conversation_bytes=8 << 20, conversations=200)
