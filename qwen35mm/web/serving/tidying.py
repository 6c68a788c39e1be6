"""Deletes unused data and indexes new texts in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.trash import purge
from qwen35mm.errors import StorageError
from qwen35mm.web.serving.people import People

logger = logging.getLogger(__name__)

INTERVAL_S = 300.0
_SETTLED_S = 60.0


@contextlib.contextmanager
def keep_tidy(
    store: ConversationStore, people: People, *, forget_after_s: float | None, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """Tidies the store at intervals during the block.

    Args:
        forget_after_s: people last seen this long ago are deleted with all their data; None keeps them.
    """
    ended = threading.Event()

    def work() -> None:
        purge(store)
        index(store, ended)
        while not ended.wait(interval_s):
            purge(store)
            tidy(store, people, forget_after_s)
            index(store, ended)

    thread = threading.Thread(target=work, name="qwen35mm-tidying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # Nobody is left to undo a deletion.
        purge(store, 0.0)


def index(store: ConversationStore, ended: threading.Event) -> None:
    """Indexes texts that are new, or from a version without an index."""
    try:
        for _ in store.index_texts():
            if ended.is_set():
                return
    except StorageError as error:
        logger.warning("texts could not be indexed: %s", error)


def tidy(store: ConversationStore, people: People, forget_after_s: float | None) -> None:
    """Deletes the data of people who are gone, and files that are in no message and no draft."""
    try:
        if forget_after_s is not None:
            for owner in people.gone_for(forget_after_s):
                store.delete_owner(owner)
                people.forget(owner)
        # An upload in progress is not held yet.
        store.media.collect_garbage(min_age_s=3600.0 if forget_after_s is None else _SETTLED_S)
    except StorageError as error:
        logger.warning("files could not be tidied: %s", error)
