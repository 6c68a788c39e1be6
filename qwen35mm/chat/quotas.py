"""Limits for one person and for everybody together, and who uses how much.

A single person is limited only by disk and memory. On a shared page nobody may take what the others need. A new key
makes a new person, so limits count by account (`Person.account`).
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

    num_bytes           one account's texts and files, including uploads in progress
    total_bytes         the same for everybody together
    uploads             one account's files that are in no message yet, including uploads in progress
    total_uploads       everybody's uploads in progress
    conversations       of one account
    watchers            one account's streams of answers; the page's queue limits everybody's
    wrong_passwords     from one address in ten minutes
    archive_bytes       one import, both packed and unpacked
    conversation_bytes  one conversation of an import, without its files
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
# For temporary conversations, in addition: their texts are in memory.
STRANGERS_TEMPORARY = replace(STRANGERS, num_bytes=100 * 10**6, total_bytes=10**9)
_SHARED = say("Everyone at one internet address counts as one person.")


class Usage:
    """Counts what each account uses, and refuses what goes over a limit."""

    def __init__(self, store: ConversationStore, quotas: Quotas) -> None:
        self.quotas = quotas
        self._store = store
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        self._coming: dict[str, dict[object, int]] = {}
        self._watchers: Counter[str] = Counter()

    def check(self, person: Person, *, num_bytes: int = 0, num_files: int = 0, num_conversations: int = 0) -> None:
        """Checks that the person may add this much. Reads the database: not for the event loop.

        Raises:
            QuotaError: it goes over a limit; says which one, how much is used and what to do.
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
        """Bytes (at most `most`) and conversations that a person may still add. Reads the database."""
        quotas, kept = self.quotas, self._kept(person)
        room = most if quotas.num_bytes is None else min(most, quotas.num_bytes - kept.num_bytes)
        if quotas.total_bytes is not None:
            room = min(room, quotas.total_bytes - self._store.media.num_bytes())
        return max(room, 0), max(quotas.conversations - kept.num_conversations, 0)

    @contextlib.asynccontextmanager
    async def receiving(self, person: Person) -> AsyncIterator[Callable[[int], None]]:
        """Reserves a place for an upload. Call the yielded function with the number of bytes of each chunk.

        Raises:
            QuotaError: too many uploads are in progress; from the function, the file is too large.
        """
        if sum(map(len, self._coming.values())) >= self.quotas.total_uploads:
            raise QuotaError(
                say(
                    "{n} files are being uploaded already, the most at one time. Try again in a moment.",
                    n=self.quotas.total_uploads,
                )
            )
        # A key of its own for each upload.
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
        """Reserves a place for a stream of answers. Raises QuotaError."""
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
        """What all people of an account have stored."""
        account = _account(person)
        with self._lock:
            owners = self._owners.setdefault(account, set())
            owners.add(person.owner)
            asked = list(owners)
        counts_bytes = self.quotas.num_bytes is not None
        each = {owner: self._store.media.kept(owner, count_bytes=counts_bytes) for owner in asked}
        with self._lock:
            # Owners who store nothing need no further look.
            owners -= {owner for owner, kept in each.items() if not any(kept) and owner != person.owner}
        return Kept(*map(sum, zip(*each.values(), strict=True)))


def _account(person: Person) -> str:
    return person.account or person.owner


def _mb(num_bytes: int) -> Saying:
    return say("{n} MB", n=decimal(num_bytes / 10**6, 1))
