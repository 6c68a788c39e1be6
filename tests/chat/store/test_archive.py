"""Export and import: what goes out comes back, up to the ids."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from qwen35mm.chat.store.archive import export_zip, import_zip
from qwen35mm.chat.store.markdown import export_markdown
from qwen35mm.chat.store.records import Attachment, Conversation, Crop
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import ArchiveError, NotFoundError, StorageError
from qwen35mm_preprocess import VideoClip
from tests.chat.helpers import (
    IMAGE_PLAN,
    ME,
    OTHER,
    VIDEO_PLAN,
    attach,
    chat,
    create,
    digest_of,
    files_in,
    limit_pages,
    node,
    reply,
    shape,
    way,
)

ROOM = 1 << 30


def full(store: ConversationStore, title: str = "Ein Bär: 猫/../x") -> Conversation:
    """A conversation with branches, edits of the first message, files and every field."""
    picture = attach(store, b"picture", "кот.PNG", plan=IMAGE_PLAN)
    crop = Crop("0" * 64, "whole.png", (0, 1, 20, 30), (30, 40), 1 / 3)
    picture = replace(picture, crop_of=crop)
    clip = attach(store, b"clip" * 700_000, "clip.mp4", "video", VIDEO_PLAN)
    text = attach(store, "käse".encode(), "no extension", "text")
    made = create(store, ME, title=title, settings={"temperature": 0.1, "deep": {"x": [None, 1e-300]}})
    first = node(text="What is *this*?", attachments=(picture, clip))
    answer = reply(first.id, "A cat.", reasoning="Hm.\n\n</details>", thinking_s=1.25, stats={"tokens": 3}, model="m")
    again = reply(first.id, "No cat.", status="failed", error="It broke.", notes=("one", "two"))
    below = node(answer.id, "\u0000 ok \U0001f408", attachments=(text, picture), first=answer.id)
    edited = node(text="edited", created_s=first.created_s, attachments=(picture,))
    for message in (first, answer, again, below, edited):
        store.add(ME, made.id, message)
    store.change(ME, made.id, head=below.id)
    store.change(ME, made.id, first=answer.id)
    return store.read(ME, made.id)[0]


def exported(store: ConversationStore, *conversations: Conversation) -> bytes:
    stream = io.BytesIO()
    export_zip(store, ME, [conversation.id for conversation in conversations], stream)
    return stream.getvalue()


def same(store: ConversationStore, before: Conversation, other: ConversationStore, after: Conversation) -> None:
    (before, old), (after, new) = store.read(ME, before.id), other.read(OTHER, after.id)
    assert shape(new) == shape(old)
    assert [way(new, identity) for identity in new.nodes] == [way(old, identity) for identity in old.nodes]
    assert (way(new, after.head), way(new, after.first)) == (way(old, before.head), way(old, before.first))
    for name in ("title", "created_s", "updated_s", "settings", "pinned", "titled"):
        assert getattr(after, name) == getattr(before, name)
    assert {before.id, *old.nodes}.isdisjoint({after.id, *new.nodes})


@pytest.fixture
def other(tmp_path: Path) -> ConversationStore:
    return ConversationStore(tmp_path / "other")


def test_what_goes_out_comes_back(store: ConversationStore, other: ConversationStore) -> None:
    conversations = [full(store), chat(store, title="")[0], create(store, ME, title="empty")]
    data = exported(store, *conversations)
    # Elsewhere, and beside the original, which is somebody else's.
    for target in (other, store):
        imported = import_zip(target, OTHER, io.BytesIO(data), max_bytes=ROOM).new
        assert imported == [target.read(OTHER, conversation.id)[0] for conversation in imported]
        for before, after in zip(conversations, imported, strict=True):
            same(store, before, target, after)
    assert len(store.find(OTHER)) == 3
    assert other.find(ME) == []
    assert other.media.is_of(OTHER, digest_of(b"picture"))
    for digest in (digest_of(b"picture"), digest_of(b"clip" * 700_000)):
        assert other.media.path(digest).read_bytes() == store.media.path(digest).read_bytes()


def test_what_is_there_already_is_skipped_and_nothing_is_admitted_again(
    store: ConversationStore, other: ConversationStore
) -> None:
    """One's own archive, and another machine's that was imported before."""
    data = exported(store, full(store), chat(store, title="")[0], create(store, ME, title="empty"))
    import_zip(other, ME, io.BytesIO(data), max_bytes=ROOM)
    admit = mock.Mock()
    for target in (store, other):
        before = [(each, shape(target.read(ME, each.id)[1])) for each in target.find(ME)]
        limits = {"max_bytes": 1 << 16, "max_conversations": 0}
        assert import_zip(target, ME, io.BytesIO(data), **limits, admit=admit) == ([], [], 3)
        assert [(each, shape(target.read(ME, each.id)[1])) for each in target.find(ME)] == before
    admit.assert_not_called()


def test_a_conversation_that_has_more_messages_gets_them_and_loses_none(
    store: ConversationStore, other: ConversationStore
) -> None:
    conversation, last = chat(store)
    store.update(ME, replace(last, text="answer", status="stopped"))
    (kept,) = import_zip(other, ME, io.BytesIO(exported(store, conversation)), max_bytes=ROOM).new
    # There the answer is continued, and the chat goes on, with a file.
    store.update(ME, replace(last, text="answer 0, and its end"))
    file = attach(store, b"picture", "a.png", plan=IMAGE_PLAN)
    question = node(last.id, "more", attachments=(file,))
    store.add(ME, conversation.id, question, reply(question.id, "and more"))
    data = exported(store, conversation)
    imported = import_zip(other, ME, io.BytesIO(data), max_bytes=ROOM)
    assert ([each.id for each in imported.extended], imported.new, imported.num_known) == ([kept.id], [], 0)
    now, tree = other.read(ME, kept.id)
    texts = ["question 0", "answer 0, and its end", "more", "and more"]
    assert [each.text for each in tree.path(now.head)] == texts
    assert other.media.is_of(ME, file.digest)
    assert import_zip(other, ME, io.BytesIO(data), max_bytes=ROOM) == ([], [], 1)
    # Where both have gone on, what is shown stays, and the other one's is a branch beside it.
    mine, theirs = node(now.head, "mine"), node(store.read(ME, conversation.id)[0].head, "theirs")
    other.add(ME, kept.id, mine)
    store.add(ME, conversation.id, theirs)
    (after,) = import_zip(other, ME, io.BytesIO(exported(store, conversation)), max_bytes=ROOM).extended
    now, tree = other.read(ME, kept.id)
    assert (now, tree.path(now.head)[-1].text) == (after, "mine")
    assert [each.text for each in tree.siblings(mine.id)] == ["mine", "theirs"]


def test_an_answer_in_progress_is_not_overwritten(store: ConversationStore, other: ConversationStore) -> None:
    conversation, last = chat(store)
    (kept,) = import_zip(other, ME, io.BytesIO(exported(store, conversation)), max_bytes=ROOM).new
    answer = other.read(ME, kept.id)[1].nodes[kept.head or ""]
    other.update(ME, replace(answer, text="ans", status="running"))
    import_zip(other, ME, io.BytesIO(exported(store, conversation)), max_bytes=ROOM)
    now, tree = other.read(ME, kept.id)
    assert sorted(each.text for each in tree.siblings(answer.id)) == ["ans", last.text]
    assert now.head == answer.id


def test_the_archive_is_what_is_documented(store: ConversationStore) -> None:
    one, two = full(store), full(store)
    with zipfile.ZipFile(io.BytesIO(exported(store, one, two, one))) as archive:
        assert archive.testzip() is None
        media = {
            f"media/{digest_of(b'picture')}.png",
            f"media/{digest_of(b'clip' * 700_000)}.mp4",
            f"media/{digest_of('käse'.encode())}.txt",
        }
        assert set(archive.namelist()) == media | {
            f"conversations/{one.id}.json",
            f"conversations/{two.id}.json",
            "Ein Bär_ 猫_.._x.md",
            "Ein Bär_ 猫_.._x (2).md",
        }
        assert len(archive.namelist()) == len(set(archive.namelist()))
        values = json.loads(archive.read(f"conversations/{one.id}.json"))
        assert (values["format"], values["version"]) == ("qwen35mm-conversation", 3)
        assert [message["id"] for message in values["messages"]] == list(store.read(ME, one.id)[1].nodes)
        text = archive.read("Ein Bär_ 猫_.._x.md").decode("utf-8")
    for name in media:
        assert f"]({name})" in text


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("", "Conversation"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("a\u0000b\nc\u202e", "a_b_c_"),
        ("CON", "_CON"),
        ("猫" * 100, "猫" * 50),
        ("cafe\u0301", "caf\u00e9"),
    ],
)
def test_titles_as_file_names(store: ConversationStore, title: str, name: str) -> None:
    data = exported(store, create(store, ME, title=title))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert f"{name}.md" in archive.namelist()
    assert [c.title for c in import_zip(store, OTHER, io.BytesIO(data), max_bytes=ROOM).new] == [title]


def test_titles_that_differ_in_case_are_two_files(store: ConversationStore) -> None:
    data = exported(store, *(create(store, ME, title=title) for title in ("Cat", "cat", "Cat (2)", "CAT")))
    names = [name.casefold() for name in zipfile.ZipFile(io.BytesIO(data)).namelist() if name.endswith(".md")]
    assert len(set(names)) == 4


def test_a_running_reply_is_imported_as_stopped(store: ConversationStore) -> None:
    conversation, last = chat(store)
    store.update(ME, replace(last, status="running", text="half"))
    after = import_zip(store, OTHER, io.BytesIO(exported(store, conversation)), max_bytes=ROOM).new[0]
    found = store.read(OTHER, after.id)[1].path(after.head)[-1]
    assert (found.status, found.text) == ("stopped", "half")


class Pipe(io.RawIOBase):
    """A stream that can't seek."""

    data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.data += bytes(data)
        return len(data)


def test_a_stream_that_can_not_seek(store: ConversationStore) -> None:
    stream: Any = Pipe()
    export_zip(store, ME, [full(store).id], stream)
    assert len(import_zip(store, OTHER, io.BytesIO(stream.data), max_bytes=ROOM).new) == 1


def test_only_the_owners_conversations_go_out(store: ConversationStore) -> None:
    with pytest.raises(NotFoundError):
        exported(store, chat(store, OTHER)[0])


def test_a_damaged_or_lost_file_is_not_exported(store: ConversationStore) -> None:
    conversation = full(store)
    path = store.media.path(digest_of(b"picture"))
    path.write_bytes(b"Picture")
    with pytest.raises(StorageError, match=r"The chat 'Ein Bär.*damaged on the disk"):
        exported(store, create(store, ME), conversation)
    path.unlink()
    with pytest.raises(NotFoundError, match="The chat 'Ein Bär"):
        exported(store, conversation)


def test_a_chat_that_was_deleted_meanwhile_is_left_out(store: ConversationStore, other: ConversationStore) -> None:
    gone, kept = create(store, ME), create(store, ME, title="kept")
    store.delete(ME, gone.id)
    data = exported(store, gone, kept)
    assert [each.title for each in import_zip(other, ME, io.BytesIO(data), max_bytes=ROOM).new] == ["kept"]
    with pytest.raises(NotFoundError):
        exported(store, gone)


def test_a_long_chat_comes_back_however_its_archive_is_packed(
    store: ConversationStore, other: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.chat.store.archive._MAX_READ_BYTES", 1 << 16)
    monkeypatch.setattr("qwen35mm.chat.store.archive._PIECE_BYTES", 1 << 13)
    long = create(store, ME, title="long")
    store.add(ME, long.id, node(text="word " * 50_000))
    stored = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(exported(store, long))) as packed, zipfile.ZipFile(stored, "w") as plain:
        for name in packed.namelist():
            plain.writestr(name, packed.read(name))
    (found,) = import_zip(other, OTHER, stored, max_bytes=ROOM).new
    same(store, long, other, found)
    # What no import would take is said when it is written.
    monkeypatch.setattr("qwen35mm.chat.store.archive.MAX_JSON_BYTES", 1 << 17)
    with pytest.raises(ArchiveError, match="The chat 'long'"):
        exported(store, long)


def test_a_full_disk_on_export_is_said(store: ConversationStore) -> None:
    stream: Any = Pipe()
    stream.write = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(StorageError, match="archive can't be written"):
        export_zip(store, ME, [chat(store)[0].id], stream)


def test_a_full_disk_on_import_leaves_nothing(
    store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    conversation = full(store)
    assert conversation.head is not None
    store.update(ME, replace(store.read(ME, conversation.id)[1].nodes[conversation.head], text="x" * 1_000_000))
    data = exported(store, conversation)
    chat(other, OTHER)
    other.media.add(io.BytesIO(b"picture"), max_bytes=10)
    limit_pages(other)
    with pytest.raises(StorageError, match="disk is full"):
        import_zip(other, OTHER, io.BytesIO(data), max_bytes=ROOM)
    assert len(other.find(OTHER)) == 1
    assert not [name for name in files_in(tmp_path / "other" / "media") if name != digest_of(b"picture")]


def test_others_write_while_an_archive_is_read(store: ConversationStore, tmp_path: Path) -> None:
    data = exported(store, full(store), full(store))
    somebody = ConversationStore(tmp_path / "data")
    seen: list[str] = []

    def admit(file: Attachment) -> Attachment:
        seen.append(create(somebody, ME).id)
        return file

    assert len(import_zip(store, OTHER, io.BytesIO(data), max_bytes=ROOM, admit=admit).new) == 2
    assert {each.id for each in store.find(ME)} >= set(seen) != set()


def test_markdown_reads_well() -> None:
    picture = Attachment(digest_of(b"x"), "image", "my [cat]!.JPEG", 1)
    question = node(text="What is it?\n\n    code", attachments=(picture,), created_s=0)
    answer = reply(
        question.id,
        "A cat.",
        reasoning="Hm.\n\n# No heading",
        thinking_s=1.25,
        model="demo",
        status="stopped",
        notes=("Made\nsmaller.",),
        created_s=60,
    )
    hidden = reply(question.id, "hidden")
    assert export_markdown(Tree([question, answer, hidden]), answer.id, "Cats\n# and dogs") == (
        "# Cats # and dogs\n\n## You\n\n*1970-01-01 00:00 UTC*\n\n"
        f"![my \\[cat\\]\\!.JPEG](media/{picture.digest}.jpeg)\n\nWhat is it?\n\n    code\n\n"
        "## Assistant\n\n*1970-01-01 00:01 UTC, demo*\n\n> **Thinking (1.2 s)**\n>\n> Hm.\n>\n> # No heading\n\n"
        "A cat.\n\n*Stopped.*\n\n*Made smaller.*\n"
    )
    assert export_markdown(Tree([]), None, " ") == "# Conversation\n"


@pytest.mark.parametrize("name", ["x", "x.", "x.p/g", "x.waytoolongextension", "x.p g", ".."])
def test_an_extension_is_plain_or_left_out(name: str) -> None:
    question = node(attachments=(Attachment(digest_of(b"x"), "image", name, 1),))
    assert f"(media/{digest_of(b'x')}.img)" in export_markdown(Tree([question]), question.id, "")


def test_a_part_of_a_video_is_named_for_reading() -> None:
    ends = {1.5: "*from 0.5 s to 1.5 s*", None: "*from 0.5 s to its end*"}
    for end_s, words in ends.items():
        file = Attachment(digest_of(b"x"), "video", "a.mp4", 1, clip=VideoClip(0.5, end_s, 8))
        question = node(attachments=(file,))
        assert f"(media/{digest_of(b'x')}.mp4) {words}" in export_markdown(Tree([question]), question.id, "")


def test_too_many_files_for_an_archive(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.chat.store.archive.MAX_FILES", 5)
    conversations = [create(store, ME) for _ in range(3)]
    exported(store, *conversations[:2])
    with pytest.raises(ArchiveError, match="fewer"):
        exported(store, *conversations)
