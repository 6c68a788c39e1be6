"""The weights' digest: over names, order and bytes; remembered as long as the files look the same."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qwen35mm.checkpoints import weights_digest as module
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.errors import CheckpointError

LONG_AGO_S = 1_700_000_000
SLICE = 1_000
SHARDS = {"a.safetensors": bytes(range(256)) * 10, "b.safetensors": b"b" * SLICE}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", SLICE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, content in SHARDS.items():
        (folder / name).write_bytes(content)
    write_index(folder, list(SHARDS))
    (folder / "config.json").write_text("{}")
    settle(folder)
    return folder


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights"


@pytest.fixture
def remembered(folder, memo, hashed) -> str:
    """The digest, which the memo knows; what is hashed counts from here."""
    digest = weights_digest(folder, memo)
    hashed.clear()
    return digest


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that are hashed during the test, one for each time."""
    names: list[str] = []
    original = module.hash_file
    monkeypatch.setattr(module, "hash_file", lambda path: names.append(path.name) or original(path))
    return names


def write_index(folder: Path, names: list[str]) -> None:
    weight_map = {f"tensor.{n}": name for n, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def settle(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))


def test_the_digest_is_of_names_order_and_bytes(folder, tmp_path):
    first = weights_digest(folder, None)
    assert len(bytes.fromhex(first)) == 32
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert weights_digest(copy, None) == first
    digests = {first}
    # Every byte counts, also on both sides of a slice's end, and so does the length.
    for at in (0, SLICE - 1, SLICE, 2_559):
        content = bytearray(SHARDS["a.safetensors"])
        content[at] ^= 1
        (copy / "a.safetensors").write_bytes(content)
        digests.add(weights_digest(copy, None))
    for content in (
        SHARDS["a.safetensors"] + b"\0",
        SHARDS["a.safetensors"][:-1],
        SHARDS["a.safetensors"][:SLICE],
        b"",
    ):
        (copy / "a.safetensors").write_bytes(content)
        digests.add(weights_digest(copy, None))
    (copy / "a.safetensors").write_bytes(SHARDS["b.safetensors"])
    (copy / "b.safetensors").write_bytes(SHARDS["a.safetensors"])
    digests.add(weights_digest(copy, None))
    assert len(digests) == 10


def test_other_names_and_another_config_count(folder):
    digests = {weights_digest(folder, None)}
    (folder / "config.json").write_text("{ }")
    digests.add(weights_digest(folder, None))
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    write_index(folder, ["a.safetensors", "c.safetensors"])
    digests.add(weights_digest(folder, None))
    assert len(digests) == 3


@pytest.mark.parametrize("missing", ["a.safetensors", "config.json"])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        weights_digest(folder, None)


def test_what_was_hashed_is_remembered(folder, memo, hashed):
    first = weights_digest(folder, memo)
    assert hashed == ["a.safetensors", "b.safetensors", "config.json"]
    assert memo.stat().st_mode & 0o777 == 0o700
    hashed.clear()
    assert weights_digest(folder, memo) == first == weights_digest(folder, None)
    assert hashed == ["a.safetensors", "b.safetensors", "config.json"], "only without the memo"


def test_one_memo_serves_many_checkpoints(folder, memo, hashed, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "a.safetensors").write_bytes(b"other")
    settle(other)
    digests = [weights_digest(place, memo) for place in (folder, other)]
    hashed.clear()
    assert [weights_digest(place, memo) for place in (folder, other)] == digests
    assert hashed == []


@pytest.mark.parametrize("change", ["size", "mtime", "inode", "path"])
@pytest.mark.usefixtures("remembered")
def test_a_file_that_looks_different_is_hashed_again(folder, memo, hashed, change):
    path, content = folder / "b.safetensors", b"c" * SLICE
    name = path.name
    if change == "size":
        path.write_bytes(content + b"c")
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    elif change == "mtime":
        path.write_bytes(content)
        os.utime(path, (LONG_AGO_S + 1, LONG_AGO_S))
        os.utime(path, (LONG_AGO_S, LONG_AGO_S + 1))
    elif change == "inode":
        (folder / "new").write_bytes(content)
        os.utime(folder / "new", (LONG_AGO_S, LONG_AGO_S))
        (folder / "new").replace(path)
    else:
        name = "c.safetensors"
        path.rename(folder / name)
        write_index(folder, ["a.safetensors", name])
    assert weights_digest(folder, memo) == weights_digest(folder, None)
    assert hashed[:1] == [name]


def test_a_fresh_file_is_not_remembered(folder, memo, hashed):
    """Changed again within its timestamp's resolution, it would look the same."""
    (folder / "b.safetensors").write_bytes(b"b" * SLICE)
    weights_digest(folder, memo)
    hashed.clear()
    weights_digest(folder, memo)
    assert hashed == ["b.safetensors"]


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(folder, memo, hashed, monkeypatch):
    original = module.hash_file

    def hash_and_change(path):
        result = original(path)
        os.utime(folder / "a.safetensors", (LONG_AGO_S, LONG_AGO_S + 1))
        return result

    monkeypatch.setattr(module, "hash_file", hash_and_change)
    weights_digest(folder, memo)
    monkeypatch.setattr(module, "hash_file", original)
    hashed.clear()
    weights_digest(folder, memo)
    assert hashed == ["a.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: note[: len(note) // 2],
        lambda note: note[:-2],
        lambda note: "",
        lambda note: "\0\xff",
        lambda note: "\0" * len(note),
        lambda note: note + note,
        lambda note: note.upper().replace("A", "G"),
    ],
)
def test_a_damaged_memo_is_computed_again(folder, memo, hashed, remembered, damage):
    for note in memo.iterdir():
        note.write_text(damage(note.read_text()), encoding="latin-1")
    assert weights_digest(folder, memo) == remembered
    assert hashed == ["a.safetensors", "b.safetensors", "config.json"]
    hashed.clear()
    assert weights_digest(folder, memo) == remembered
    assert hashed == [], "it was written anew"


@pytest.mark.usefixtures("remembered")
def test_another_users_memo_is_not_believed(folder, memo, hashed, monkeypatch):
    uid = memo.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    weights_digest(folder, memo)
    assert len(hashed) == 3


def test_a_memo_that_cannot_be_written_is_logged(folder, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    assert weights_digest(folder, tmp_path / "file" / "memo") == weights_digest(folder, None)
    assert "memo can't be written" in caplog.text


def test_a_full_disk_is_logged_and_what_it_tore_is_not_believed(folder, memo, hashed, monkeypatch, caplog):
    write_text = Path.write_text

    def full(self, text, *args):
        write_text(self, text[:-40], *args)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        weights_digest(folder, memo)
    assert "No space left" in caplog.text
    hashed.clear()
    weights_digest(folder, memo)
    assert len(hashed) == 3


def test_a_file_that_changes_has_one_note(folder, memo):
    for second in range(3):
        os.utime(folder / "a.safetensors", (LONG_AGO_S, LONG_AGO_S + second))
        weights_digest(folder, memo)
    assert len(list(memo.iterdir())) == 3


def test_who_asks_while_another_thread_hashes_waits_for_it(folder: Path, memo: Path, monkeypatch) -> None:
    begun, ends, names, original = threading.Event(), threading.Event(), [], module.hash_file

    def hash_file(path: Path) -> str:
        names.append(path.name)
        begun.set()
        assert ends.wait(60)
        return original(path)

    monkeypatch.setattr(module, "hash_file", hash_file)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(weights_digest, folder, memo)
        assert begun.wait(60)
        second = threads.submit(weights_digest, folder, memo)
        ends.set()
        assert first.result() == second.result()
    assert sorted(names) == ["a.safetensors", "b.safetensors", "config.json"]
