"""The store among processes: killed at any moment, several at once, forked, on a full disk."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.chat.store.store import ConversationStore
from tests.chat.children import start
from tests.chat.helpers import ME, chat, node


def integrity(store: ConversationStore) -> str:
    with store._database.reading() as connection:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_loses_nothing_that_a_call_wrote(store: ConversationStore, tmp_path: Path, kills: int) -> None:
    conversation, last = chat(store)
    chosen = random.Random(kills)
    for _ in range(kills):
        store.close()
        child = start("stream", tmp_path / "data", last.id)
        said = [int(child.stdout.readline()) for _ in range(chosen.randrange(1, 150))]
        child.kill()
        said += [int(line) for line in child.stdout.read().split()]
        assert child.wait() == -9
        found = store.read(ME, conversation.id)[1].nodes[last.id]
        number, _, rest = found.text.partition(" ")
        assert int(number) in (said[-1], said[-1] + 1), "the last call may have been kept and not yet been said"
        assert found.notes == (number,)
        assert rest == "x" * 40 * (int(number) % 1000)
        assert integrity(store) == "ok"


@pytest.mark.parametrize(
    ("begins", "stride"),
    [
        pytest.param(True, 1, id="a new chat"),
        pytest.param(False, 3, id="one that is there"),
        pytest.param(False, 1, id="one that is there, every statement", marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_no_message_without_its_reply(
    store: ConversationStore, tmp_path: Path, begins: bool, stride: int
) -> None:
    """Killed before each statement of the transaction, or before every third, one after the other."""
    conversation, last = chat(store)
    place = () if begins else (conversation.id, last.id)
    for number in itertools.count(1, stride):
        store.close()
        child = start("send", tmp_path / "data", number, *place)
        is_sent = child.communicate()[0] == "sent\n"
        assert child.wait() == (0 if is_sent else -9)
        trees = [store.read(ME, each.id)[1] for each in store.find(ME)]
        texts = [[message.text for message in tree.nodes.values()] for tree in trees]
        if is_sent:
            break
        assert texts == [["question 0", "answer 0"]]
    assert number > 5, "it wasn't killed in the middle"
    new = ["another question", ""]
    assert texts == ([new, ["question 0", "answer 0"]] if begins else [["question 0", "answer 0", *new]])


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """All of them find no database and make it."""
    children = [start("create", tmp_path / "new", 40) for _ in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.wait() for child in children] == [0, 0, 0]
    store = ConversationStore(tmp_path / "new")
    assert len(store.find(ME)) == 3 * 40
    assert integrity(store) == "ok"
    store.close()


def test_threads_share_a_store(store: ConversationStore) -> None:
    conversation, last = chat(store)

    def work(name: int) -> None:
        for number in range(40):
            store.add(ME, conversation.id, node(last.id, f"{name} {number}"))
            store.update(ME, replace(last, text=f"{name} {number}"))
            store.search(ME, "cats")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(store.read(ME, conversation.id)[1].children(last.id)) == 4 * 40


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
def test_no_handle_goes_through_a_fork(tmp_path: Path) -> None:
    assert start("fork", tmp_path).wait() == 0


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only there has a process disks of its own")
def test_a_full_disk_is_said_and_leaves_what_was_kept(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("a small disk can't be made here")
    child = start("fill", tmp_path)
    assert child.communicate()[1] == ""
    assert child.wait() == 0
