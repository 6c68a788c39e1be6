"""What one person, and all of them together, may take of a server: every such limit, once, and who has taken what.

Alone on one's own machine only the disk and the memory are limits. Where strangers share the page, one must not take
what the others need; and since a new key makes a new person, they are counted by their accounts (`Person.account`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.store.archive import MAX_JSON_BYTES
from qwen35mm.chat.store.media import Kept
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import QuotaError
from qwen35mm.pools import REQUESTS
from qwen35mm_preprocess.say import Saying, decimal, say


@dataclass(frozen=True)
class Quotas:
    """Limits of a page; None is no limit.

    num_bytes           of one account's texts and files, with what is just coming
    total_bytes         of everybody's
    uploads             of one account: files that no message has yet, with those that are just coming
    total_uploads       of everybody, that are just coming
    conversations       of one account
    watchers            streams of answers of one account; everybody's are limited by the page's queue
    wrong_passwords     of one address in ten minutes
    archive_bytes       of one import, as it comes and unpacked
    conversation_bytes  of one conversation in it, without its files
    """

    num_bytes: int | None
    total_bytes: int | None
    uploads: int
    total_uploads: int
    conversations: int
    watchers: int
    wrong_passwords: int
    archive_bytes: int
    conversation_bytes: int


ALONE = Quotas(
    num_bytes=None,
    total_bytes=None,
    uploads=10_000,
    total_uploads=256,
    conversations=1_000_000,
    watchers=64,
    wrong_passwords=100,
    archive_bytes=8 << 30,
    conversation_bytes=MAX_JSON_BYTES,
)
STRANGERS = Quotas(
    num_bytes=500 * 10**6,
    total_bytes=8 * 10**9,
    uploads=256,
    total_uploads=256,
    conversations=200,
    watchers=8,
    wrong_passwords=10,
    archive_bytes=200 * 10**6,
    conversation_bytes=8 << 20,
)
# Of temporary conversations, beside those: texts are in memory.
STRANGERS_TEMPORARY = replace(STRANGERS, num_bytes=100 * 10**6, total_bytes=10**9)
_SHARED = say("Everyone at one internet address counts as one person.")


class Usage:
    """Who has taken what, and whether there is room for more.

    Args:
        store: what is kept.
    """

    def __init__(self, store: ConversationStore, quotas: Quotas) -> None:
        self.quotas = quotas
        self._store = store
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        self._coming: dict[str, dict[object, int]] = {}
        self._watchers: Counter[str] = Counter()

    def check(self, person: Person, *, num_bytes: int = 0, num_files: int = 0, num_conversations: int = 0) -> None:
        """Refuses so much more of something. Reads the database: not for the event loop.

        Raises:
            QuotaError: it is more than there is room for; says which limit, how much is used and what to do.
        """
        quotas, kept = self.quotas, self._kept(person)
        if num_conversations and kept.num_conversations + num_conversations > quotas.conversations:
            raise QuotaError(
                say(
                    "You have {n} {n|chat|chats}, and one person can have {most} here. Delete some, after "
                    "exporting those that you need. {shared}",
                    n=kept.num_conversations,
                    most=quotas.conversations,
                    shared=_SHARED,
                )
            )
        if num_files and kept.num_unsent + num_files > quotas.uploads:
            raise QuotaError(
                say(
                    "{n} of your files {n|is|are} in no message yet, and one person can have {most} such files "
                    "here. Send some first; files that are never sent are deleted within a day. {shared}",
                    n=kept.num_unsent,
                    most=quotas.uploads,
                    shared=_SHARED,
                )
            )
        self._check_bytes(kept, num_bytes)
        if quotas.total_bytes is not None:
            total = self._store.media.num_bytes()
            if total + num_bytes > quotas.total_bytes:
                raise QuotaError(
                    say(
                        "The data of all people takes {total} of {most}, and this needs {size}. Delete chats that you"
                        " don't need, or come back later.",
                        total=_mb(total),
                        most=_mb(quotas.total_bytes),
                        size=_mb(num_bytes),
                    )
                )

    def room(self, person: Person, *, most: int) -> tuple[int, int]:
        """Bytes, at most `most`, and conversations that a person may still add. Reads the database."""
        quotas, kept = self.quotas, self._kept(person)
        room = most if quotas.num_bytes is None else min(most, quotas.num_bytes - kept.num_bytes)
        if quotas.total_bytes is not None:
            room = min(room, quotas.total_bytes - self._store.media.num_bytes())
        return max(room, 0), max(quotas.conversations - kept.num_conversations, 0)

    @contextlib.asynccontextmanager
    async def receiving(self, person: Person) -> AsyncIterator[Callable[[int], None]]:
        """A place for a file that is coming. What it gives is called with the bytes of each piece.

        Raises:
            QuotaError: there is no place; from what it gives, there is no room.
        """
        if sum(map(len, self._coming.values())) >= self.quotas.total_uploads:
            raise QuotaError(
                say(
                    "{n} files are being uploaded already, the most at one time. Try again in a moment.",
                    n=self.quotas.total_uploads,
                )
            )
        # Apart from every other one, however many bytes have come of both.
        account, mine = _account(person), object()
        coming = self._coming.setdefault(account, {})
        coming[mine] = 0
        try:
            await REQUESTS.run(self.check, person, num_files=len(coming))
            kept = await REQUESTS.run(self._kept, person)

            def take(num_bytes: int) -> None:
                coming[mine] += num_bytes
                self._check_bytes(kept, sum(coming.values()))

            yield take
        finally:
            del coming[mine]
            if not coming:
                self._coming.pop(account, None)

    @contextlib.contextmanager
    def watching(self, person: Person) -> Iterator[None]:
        """A place for a stream of answers. Raises QuotaError."""
        account = _account(person)
        if self._watchers[account] >= self.quotas.watchers:
            raise QuotaError(
                say(
                    "{n} of your pages {n|follows|follow} answers, the most for one person. Close some. {shared}",
                    n=self.quotas.watchers,
                    shared=_SHARED,
                )
            )
        self._watchers[account] += 1
        try:
            yield
        finally:
            self._watchers[account] -= 1
            if not self._watchers[account]:
                del self._watchers[account]

    def _check_bytes(self, kept: Kept, num_bytes: int) -> None:
        most = self.quotas.num_bytes
        if num_bytes and most is not None and kept.num_bytes + num_bytes > most:
            raise QuotaError(
                say(
                    "Your chats and files take {total} of the {most} that one person can use here, and this needs"
                    " {size}. Delete chats that you don't need. {shared}",
                    total=_mb(kept.num_bytes),
                    most=_mb(most),
                    size=_mb(num_bytes),
                    shared=_SHARED,
                )
            )

    def _kept(self, person: Person) -> Kept:
        """What all of an account's people have kept."""
        account = _account(person)
        with self._lock:
            owners = self._owners.setdefault(account, set())
            owners.add(person.owner)
            asked = list(owners)
        counts_bytes = self.quotas.num_bytes is not None
        each = {owner: self._store.media.kept(owner, count_bytes=counts_bytes) for owner in asked}
        with self._lock:
            # Who has nothing need not be asked about again.
            owners -= {owner for owner, kept in each.items() if not any(kept) and owner != person.owner}
        return Kept(*map(sum, zip(*each.values(), strict=True)))


def _account(person: Person) -> str:
    return person.account or person.owner


def _mb(num_bytes: int) -> Saying:
    return say("{n} MB", n=decimal(num_bytes / 10**6, 1))
