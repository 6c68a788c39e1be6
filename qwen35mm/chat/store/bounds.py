"""Limits of a store: the conversations that were last updated longest ago are removed first."""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from dataclasses import dataclass

from qwen35mm.chat.store.media import SIZE_IN_BYTES


@dataclass(frozen=True)
class Bounds:
    """How much a store keeps.

    Attributes:
        num_bytes: limit for everybody together; above it the owner with the most bytes loses conversations.
        conversations: limit for one owner.
        age_s: most seconds since a conversation was last updated.
    """

    num_bytes: int
    conversations: int
    age_s: float


def find_beyond(connection: sqlite3.Connection, bounds: Bounds, now_s: float, num_bytes: int) -> set[str]:
    """The ids of the conversations to remove.

    Args:
        num_bytes: stored now.
    """
    rows = connection.execute(
        "SELECT id FROM (SELECT id, updated_s, ROW_NUMBER() OVER "
        "(PARTITION BY owner ORDER BY updated_s DESC, sequence DESC) AS place FROM present) "
        "WHERE place > ? OR updated_s < ?",
        (bounds.conversations, now_s - bounds.age_s),
    )
    beyond = {identity for (identity,) in rows}
    if num_bytes <= bounds.num_bytes:
        return beyond
    rows = connection.execute(
        f"SELECT c.id, c.owner, (SELECT COALESCE(SUM({SIZE_IN_BYTES.format('n.text')}), 0) FROM nodes AS n "
        "WHERE n.conversation = c.id) + (SELECT COALESCE(SUM(a.num_bytes), 0) FROM attachments AS a "
        "JOIN nodes AS n ON n.id = a.node WHERE n.conversation = c.id) "
        "FROM present AS c ORDER BY c.updated_s, c.sequence"
    )
    oldest: defaultdict[str, deque[tuple[str, int]]] = defaultdict(deque)
    taken: defaultdict[str, int] = defaultdict(int)
    for identity, owner, size in rows:
        if identity in beyond:
            num_bytes -= size
        else:
            oldest[owner].append((identity, size))
            taken[owner] += size
    while num_bytes > bounds.num_bytes and oldest:
        most = max(oldest, key=lambda owner: taken[owner])
        identity, size = oldest[most].popleft()
        beyond.add(identity)
        num_bytes -= size
        taken[most] -= size
        if not oldest[most]:
            del oldest[most]
    return beyond
