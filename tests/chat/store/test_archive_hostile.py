"""Archives that anybody may have made: refused in words, and nothing of them is imported."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat.store.archive import import_zip
from qwen35mm.chat.store.records import Attachment, Crop, Node
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import ArchiveError, StorageError
from tests.chat.helpers import IMAGE_PLAN, ME, OTHER, VIDEO_PLAN, attach, chat, digest_of, files_in, node

ROOM = 8 << 20
FILE = "conversations/" + "0a" * 16 + ".json"
PICTURE = f"media/{digest_of(b'picture')}.png"
IDS = ["0b" * 16, "0c" * 16]


CROP = {"digest": "0" * 64, "name": "a.png", "box": [0, 1, 20, 30], "size": [30, 40], "time_s": None}
WRONG_CROPS: list[dict[str, Any]] = [
    {"digest": "../../etc/passwd"},
    {"box": [0, 1, 20]},
    {"box": [0, 1, 20, 31]},
    {"box": [20, 1, 20, 30]},
    {"box": [0.0, 1, 20, 30]},
    {"box": [-1, 1, 20, 30]},
    {"size": [30, 10**30]},
    {"time_s": -1},
    {"name": None},
    {"other": 1},
]
CLIP = {"start_s": 0.0, "end_s": 1.0, "num_frames": 4, "drop_similar": False}
WRONG_CLIPS: list[dict[str, Any]] = [
    {"start_s": -1.0},
    {"start_s": 1e999},
    {"end_s": "1"},
    {"start_s": 3.0},
    {"num_frames": 0},
    {"num_frames": 2.5},
    {"drop_similar": 1},
]


def conversation(**values: Any) -> dict[str, Any]:
    """What a JSON file of two messages holds, the first one with a file."""
    file = Attachment(digest_of(b"picture"), "video", "a.png", 7, VIDEO_PLAN)
    messages = [message(IDS[0], None, attachments=(file,)), message(IDS[1], IDS[0])]
    return {
        "format": "qwen35mm-conversation",
        "version": 3,
        "title": "t",
        "created_s": 1.0,
        "updated_s": 2.0,
        "head": IDS[1],
        "first": None,
        "settings": {},
        "pinned": True,
        "titled": False,
        "messages": messages,
    } | values


def message(identity: str, parent: str | None, **values: Any) -> dict[str, Any]:
    return asdict(Node(identity, parent, "user", 5.0, "t", **values))


def part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of a conversation that is called so: the whole, its first message, that one's file, or its plan."""
    first = whole["messages"][0]
    (file,) = first["attachments"]
    return {"conversation": whole, "message": first, "file": file, "plan": file["plan"]}[name]


def packed(files: dict[str, bytes | str] | None = None, *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in (files if files is not None else good()).items():
            archive.writestr(name, data)
    return stream.getvalue()


def good(**values: Any) -> dict[str, bytes | str]:
    return {FILE: json.dumps(conversation(**values)), PICTURE: b"picture"}


def refused(store: ConversationStore, tmp_path: Path, data: bytes, words: str | None = None) -> None:
    with pytest.raises(ArchiveError, match=words) as caught:
        import_zip(store, OTHER, io.BytesIO(data), max_bytes=ROOM)
    for secret in ("zipfile", "Errno", "Traceback", str(tmp_path), "codec", "Expecting"):
        assert secret not in str(caught.value)
    assert len(str(caught.value)) < 400
    nothing_came(store, tmp_path)


def nothing_came(store: ConversationStore, tmp_path: Path) -> None:
    assert store.find(OTHER) == []
    assert files_in(tmp_path / "data" / "media") == []
    assert {path.name for path in tmp_path.iterdir()} <= {"data"}


def test_the_pattern_of_these_tests_is_accepted(store: ConversationStore) -> None:
    assert len(import_zip(store, OTHER, io.BytesIO(packed()), max_bytes=ROOM).new) == 1
    files = {"conversations/": b"", "media/": b"", "read me.md": b"anything", **good()}
    assert import_zip(store, OTHER, io.BytesIO(packed(files)), max_bytes=ROOM) == ([], [], 1)


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip" * 100, b"PK\x05\x06" + bytes(18), b"PK\x05\x06" + b"\xff" * 18])
def test_no_zip(store: ConversationStore, tmp_path: Path, data: bytes) -> None:
    refused(store, tmp_path, data)


@pytest.mark.parametrize(
    "name",
    [
        "../evil.md",
        "/abs.md",
        "media/../../evil.png",
        "..\\evil.md",
        "C:\\evil.md",
        f"media/{'AB' * 32}.png",
        f"media/{'ab' * 32}",
        "conversations/x.json",
        "__MACOSX/x.md",
        "x" * 5000,
    ],
)
def test_foreign_names(store: ConversationStore, tmp_path: Path, name: str) -> None:
    refused(store, tmp_path, packed({**good(), name: b"x"}), "unexpected file")


def test_one_name_twice(store: ConversationStore, tmp_path: Path) -> None:
    for name in (FILE, PICTURE, "x.md"):
        stream = io.BytesIO(packed({**good(), "x.md": b""}))
        with zipfile.ZipFile(stream, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(name, b"again")
        refused(store, tmp_path, stream.getvalue(), "two files named")
    refused(store, tmp_path, packed({**good(), PICTURE.replace("png", "jpg"): b"picture"}), "twice")


def test_more_than_is_allowed_as_declared(store: ConversationStore, tmp_path: Path) -> None:
    bomb = packed({**good(), "x.md": bytes(ROOM)})
    assert len(bomb) < 20_000
    refused(store, tmp_path, bomb, r"8\.0 MiB when unpacked; 8\.0 are allowed")


@pytest.mark.parametrize("name", [FILE, PICTURE])
def test_more_than_is_declared(store: ConversationStore, tmp_path: Path, name: str) -> None:
    """Sizes in the directory that lie: no more than the declared bytes are read, and then the checksum is wrong."""
    content = good()[FILE].encode() if name == FILE else b"picture"  # pyright: ignore[reportAttributeAccessIssue]
    data = bytearray(packed({**good(), name: content + b" " * (2 * ROOM)}))
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    struct.pack_into("<I", data, at + 24, len(content))
    refused(store, tmp_path, bytes(data), "damaged")
    struct.pack_into("<I", data, at + 16, zlib.crc32(content))
    import_zip(store, OTHER, io.BytesIO(bytes(data)), max_bytes=ROOM)


@pytest.mark.parametrize(
    "bomb",
    [
        "[" + "0," * 1_000_000 + "0]",
        "[" + "[]," * 500_000 + "0]",
        "[" + '{"":0},' * 500_000 + "0]",
        "[" * 150 + "]" * 150,
    ],
    ids=["numbers", "lists", "objects", "depth"],
)
def test_more_values_than_bytes_should_hold(store: ConversationStore, tmp_path: Path, bomb: str) -> None:
    """A small archive, which would be gigabytes as Python's values."""
    text = json.dumps(conversation(settings={"a": "BOMB"})).replace('"BOMB"', bomb)
    refused(store, tmp_path, packed({FILE: text, PICTURE: b"picture"}), "has too many values")


def test_one_piece_listed_many_times(store: ConversationStore, tmp_path: Path) -> None:
    """Entries that overlap: a small file that is large when unpacked, with true sizes."""
    data = packed({"a.md": bytes(1 << 20)})
    at = data.index(b"PK\x01\x02")
    entry = data[at : data.index(b"PK\x05\x06")]
    entries = b"".join(entry.replace(b"a.md", f"{index:x}.md".rjust(4, "a").encode()) for index in range(15))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 15, 15, len(entries), at, 0)
    refused(store, tmp_path, data[:at] + entries + end, "unpacked")


def test_a_long_list_of_files(store: ConversationStore, tmp_path: Path) -> None:
    """The list alone would fill the memory: it is not even read."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 0, 0, 33, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0)
    for count, words in [(20_001, "20,001 files"), (180_000, "list of files")]:
        entries = b"".join(entry + struct.pack(">I", index) for index in range(count))
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(entries), 0, 0)
        refused(store, tmp_path, entries + end, words)


def test_encrypted_and_rare_compressions(store: ConversationStore, tmp_path: Path) -> None:
    refused(store, tmp_path, packed(compression=zipfile.ZIP_LZMA), "unsupported way")
    data = bytearray(packed())
    for mark, at in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.index(mark) + at] |= 1
    refused(store, tmp_path, bytes(data), "encrypted")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no chat"),
        ({"x.md": b""}, "has no chat"),
        ({PICTURE: b"picture"}, "has no chat"),
        ({FILE: good()[FILE]}, "missing from the archive: 'a.png'"),
        ({**good(), PICTURE: b"Picture"}, "content doesn't match"),
        ({**good(), PICTURE: b"longer than said"}, "length is wrong"),
        ({**good(), f"media/{digest_of(b'x')}.png": b"x"}, "no message refers"),
        ({**good(), FILE: b"\xff{}"}, "isn't a JSON file"),
        ({**good(), FILE: b""}, "isn't a JSON file"),
        ({**good(), FILE: b"{" * 100_000}, "too many values"),
        ({**good(), FILE: b"[" * 1_000_000}, "too many values"),
        ({**good(), FILE: b"9" * 10_000}, "isn't a JSON file"),
        ({**good(), FILE: b"[]"}, "isn't a chat"),
        ({**good(), FILE: b"{}"}, "isn't a chat"),
    ],
)
def test_missing_and_damaged_files(
    store: ConversationStore, tmp_path: Path, files: dict[str, bytes | str], words: str
) -> None:
    refused(store, tmp_path, packed(files), words)


WRONG_MESSAGES = {
    "id": ["0A" * 16, "0a" * 16 + "\n"],
    "role": ["system"],
    "created_s": [math.inf, 1e300, True],
    "text": [5, "\ud800"],
    "thinking_s": ["2"],
    "status": ["done"],
    "notes": ["text"],
    "stats": [[1], {"x": math.nan}],
    "attachments": [[1]],
    "unknown": [1],
}
WRONG_PLANS = {
    "num_tokens": ["6", -1],
    "cache_bytes": [-1],
    "size": [[64, "96"]],
    "grid_thw": [[1, 4]],
    "duration_s": [math.nan, 10**400],
    "frame_indices": [[-1, 2, 3, 6]],
    "unit_digests": [["x", "y"]],
    "extra": [1],
}


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("conversation", "format", "other", "isn't a chat"),
        *(("conversation", "version", version, "doesn't have version 3") for version in (4, "2", "3", True)),
        ("conversation", "extra", 1, "extra"),
        ("conversation", "pinned", 1, "pinned"),
        ("conversation", "settings", [], "settings"),
        ("conversation", "updated_s", 1e300, "updated_s"),
        ("conversation", "head", "0d" * 16, "head"),
        ("conversation", "first", 5, "first"),
        ("conversation", "messages", [1], "messages, 0"),
        ("conversation", "messages", [message(IDS[0], None)] * 2, "same id"),
        ("conversation", "messages", [message(IDS[0], IDS[1])], "parent is missing"),
        ("conversation", "messages", [message(IDS[0], None, first=IDS[1])], "a first message is missing"),
        ("conversation", "messages", [message(IDS[0], IDS[1]), message(IDS[1], IDS[0])], "form a loop"),
        *(("message", key, value, "damaged") for key, values in WRONG_MESSAGES.items() for value in values),
        ("file", "digest", "../../etc/passwd", "digest"),
        ("file", "kind", "sound", "kind"),
        ("file", "num_bytes", -1, "num_bytes"),
        ("file", "num_bytes", 8, "length is wrong"),
        ("file", "plan", {}, "plan"),
        *(("file", "clip", {**CLIP, **wrong}, "clip") for wrong in WRONG_CLIPS),
        ("file", "crop_of", CROP, "damaged"),
        *(("plan", key, value, "plan") for key, values in WRONG_PLANS.items() for value in values),
    ],
)
def test_wrong_values(store: ConversationStore, tmp_path: Path, name: str, key: str, value: Any, words: str) -> None:
    whole = conversation(head=None)
    del whole["messages"][1]
    part(whole, name)[key] = value
    refused(store, tmp_path, packed(good(**whole)), words)


def test_a_part_of_a_picture_comes_with_its_place(store: ConversationStore) -> None:
    whole = conversation()
    part(whole, "file").update(kind="image", plan=None, crop_of=CROP)
    (imported,) = import_zip(store, ME, io.BytesIO(packed(good(**whole))), max_bytes=ROOM).new
    (file,) = next(iter(store.read(ME, imported.id)[1].nodes.values())).attachments
    assert file.crop_of == Crop("0" * 64, "a.png", (0, 1, 20, 30), (30, 40))


@pytest.mark.parametrize("wrong", WRONG_CROPS, ids=str)
def test_wrong_parts_of_pictures(store: ConversationStore, tmp_path: Path, wrong: dict[str, Any]) -> None:
    whole = conversation()
    part(whole, "file").update(kind="image", plan=None, crop_of={**CROP, **wrong})
    refused(store, tmp_path, packed(good(**whole)), "damaged.*crop_of")


def test_no_key_may_be_missing(store: ConversationStore, tmp_path: Path) -> None:
    for name in ("conversation", "message", "file", "plan"):
        for key in part(conversation(), name):
            whole = conversation()
            del part(whole, name)[key]
            refused(store, tmp_path, packed({FILE: json.dumps(whole), PICTURE: b"picture"}))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"title": None}, ArchiveError),
        # What only the database refuses.
        ({"title": "\ud800"}, StorageError),
        ({"settings": {"x": "\ud800"}}, StorageError),
        ({"settings": {"x": 1e400}}, StorageError),
    ],
)
def test_the_bad_one_of_two_leaves_nothing(
    store: ConversationStore, tmp_path: Path, values: dict[str, Any], error: type[Exception]
) -> None:
    text = json.dumps(conversation(**values)).replace("Infinity", "1e400")
    data = packed({**good(), FILE.replace("0a", "ff"): text})
    with pytest.raises(error):
        import_zip(store, OTHER, io.BytesIO(data), max_bytes=ROOM)
    nothing_came(store, tmp_path)


def test_a_refused_archive_keeps_files_that_were_there(store: ConversationStore) -> None:
    mine, last = chat(store)
    file = attach(store, b"picture", "mine.png", plan=IMAGE_PLAN)
    store.add(ME, mine.id, node(last.id, attachments=(file,)))
    with pytest.raises(ArchiveError):
        import_zip(store, OTHER, io.BytesIO(packed({**good(), PICTURE: b"Picture"})), max_bytes=ROOM)
    assert store.media.is_of(ME, file.digest)
    assert store.media.path(file.digest).read_bytes() == b"picture"


def cut(data: bytearray, chosen: random.Random) -> None:
    del data[chosen.randrange(len(data)) :]


def flip(data: bytearray, chosen: random.Random) -> None:
    for _ in range(chosen.randrange(1, 8)):
        data[chosen.randrange(len(data))] = chosen.randrange(256)


def repeat(data: bytearray, chosen: random.Random) -> None:
    begin, end = sorted(chosen.randrange(len(data)) for _ in range(2))
    data[begin:begin] = data[begin:end]


@pytest.mark.parametrize("damage", [cut, flip, repeat])
def test_random_damage_is_a_typed_error_or_harmless(
    store: ConversationStore, damage: Callable[[bytearray, random.Random], None]
) -> None:
    whole = packed()
    num_refused = 0
    for seed in range(60):
        data = bytearray(whole)
        damage(data, random.Random(seed))
        before = len(store.find(OTHER))
        try:
            import_zip(store, OTHER, io.BytesIO(bytes(data)), max_bytes=ROOM)
        except ArchiveError:
            num_refused += 1
            assert len(store.find(OTHER)) == before
    assert num_refused > 20
