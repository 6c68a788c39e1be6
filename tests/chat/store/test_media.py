"""Files by content, who may see them, and when they are deleted."""

from __future__ import annotations

import io
import os
import random
import time
from pathlib import Path

import pytest

from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import ConversationDataError, FileTooLargeError, NotFoundError, StorageError
from tests.chat.helpers import ME, OTHER, attach, chat, digest_of, files_in, node

BIG = random.Random(0).randbytes((1 << 20) * 2 + 17)


@pytest.fixture
def media(tmp_path: Path) -> MediaStore:
    return ConversationStore(tmp_path).media


def age(media: MediaStore, digest: str, seconds: float) -> None:
    then_s = time.time() - seconds
    os.utime(media.path(digest), (then_s, then_s))


@pytest.mark.parametrize("content", [b"", b"x", BIG], ids=len)
def test_a_file_comes_back(media: MediaStore, content: bytes) -> None:
    assert media.add(io.BytesIO(content), max_bytes=len(content)) == (digest_of(content), len(content))
    with media.open(digest_of(content)) as file:
        assert file.read() == content
    assert media.path(digest_of(content)).stat().st_mode & 0o777 == 0o600
    assert digest_of(content) in media


def test_one_content_is_one_file(media: MediaStore, tmp_path: Path) -> None:
    for _ in range(3):
        media.add(io.BytesIO(b"same"), max_bytes=10)
    media.add(io.BytesIO(b"other"), max_bytes=10)
    assert files_in(tmp_path) == sorted([digest_of(b"same"), digest_of(b"other")])


def test_a_damaged_file_is_replaced_by_a_whole_one(media: MediaStore) -> None:
    digest, _ = media.add(io.BytesIO(b"whole"), max_bytes=10)
    media.path(digest).write_bytes(b"")
    media.add(io.BytesIO(b"whole"), max_bytes=10)
    assert media.path(digest).read_bytes() == b"whole"


class Breaks(io.BytesIO):
    """A stream that ends in an error."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(5, "secret words of the system")
        return super().read(3)


@pytest.mark.parametrize(
    ("stream", "digest", "error", "words"),
    [
        (io.BytesIO(BIG), None, FileTooLargeError, r"limit of 2\.0 MiB"),
        (io.BytesIO(b"x"), digest_of(b"y"), ConversationDataError, "is damaged"),
        (Breaks(b"abcdef"), None, StorageError, "can't be read"),
    ],
    ids=["too large", "another content", "breaks"],
)
def test_a_file_that_can_t_be_added_leaves_nothing(
    media: MediaStore, tmp_path: Path, stream: io.BytesIO, digest: str | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        media.add(stream, max_bytes=2 << 20, digest=digest)
    assert "secret" not in str(caught.value)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("digest", ["", "../" * 21 + "x", "/etc/passwd", "AB" * 32, "ab" * 32 + "\n", "ab" * 33])
def test_what_is_no_digest_is_no_path(media: MediaStore, digest: str) -> None:
    for call in (media.path, media.open, media.delete, media.__contains__):
        with pytest.raises(ConversationDataError):
            call(digest)


def test_an_absent_file_is_not_found(media: MediaStore) -> None:
    with pytest.raises(NotFoundError):
        media.open(digest_of(b"absent"))
    assert not media.delete(digest_of(b"absent"))
    assert digest_of(b"absent") not in media


def test_a_file_is_its_senders_and_holders(tmp_path: Path) -> None:
    now_s = 1_700_000_000.0
    store = ConversationStore(tmp_path, clock=lambda: now_s)
    conversation, last = chat(store)
    file = attach(store, b"x", "x.png")
    assert not store.media.is_of(ME, file.digest)
    store.media.hold(ME, file.digest)
    assert store.media.is_of(ME, file.digest)
    assert not store.media.is_of(OTHER, file.digest)

    store.media.release(OTHER, file.digest)
    assert store.media.is_of(ME, file.digest)
    store.media.release(ME, file.digest)
    assert not store.media.is_of(ME, file.digest)

    store.media.hold(ME, file.digest)
    now_s += 24 * 3600 - 1
    assert store.media.is_of(ME, file.digest)
    now_s += 2
    assert not store.media.is_of(ME, file.digest), "a day is over"

    store.media.hold(ME, file.digest)
    sent = node(last.id, attachments=(file,))
    store.add(ME, conversation.id, sent)
    assert store.media.is_of(ME, file.digest)
    store.delete_node(ME, sent.id)
    assert not store.media.is_of(ME, file.digest), "sending ended the hold"
    store.close()


def test_what_is_gone_can_not_be_held(store: ConversationStore) -> None:
    with pytest.raises(NotFoundError):
        store.media.hold(ME, digest_of(b"gone"))
    with pytest.raises(ConversationDataError):
        store.media.hold(ME, "../x")
    assert not store.media.is_of(ME, "../x")


def test_garbage_is_what_nobody_refers_to(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.chat.store.media._DELETED_AT_ONCE", 1)
    conversation, last = chat(store, OTHER)
    sent, held, unused, fresh, again = (attach(store, name.encode(), name) for name in "shufa")
    store.add(OTHER, conversation.id, node(last.id, attachments=(sent,)))
    store.media.hold(ME, held.digest)
    for file in (sent, held, unused, again):
        age(store.media, file.digest, 3700)
    attach(store, b"a", "a")

    assert store.media.collect_garbage() == 1
    assert unused.digest not in store.media
    assert all(file.digest in store.media for file in (sent, held, fresh, again))
    assert store.media.collect_garbage(min_age_s=0) == 2
    store.delete(OTHER, conversation.id)
    store.media.release(ME, held.digest)
    assert store.media.collect_garbage() == 1
    store.purge()
    assert sent.digest not in store.media
    assert store.media.collect_garbage(min_age_s=0) == 0


def test_leftovers_go_after_an_hour(store: ConversationStore, tmp_path: Path) -> None:
    attach(store, b"x", "x")
    folder = tmp_path / "data" / "media"
    for name, seconds in [("old", 3700), ("new", 3500)]:
        path = folder / f".writing-{name}"
        path.write_bytes(b"half")
        then_s = time.time() - seconds
        os.utime(path, (then_s, then_s))
    assert store.media.collect_garbage() == 1
    assert files_in(folder) == [".writing-new", digest_of(b"x")]
