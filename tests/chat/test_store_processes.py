"""The store among processes: killed at any moment, several at once, forked, on a full disk."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.chat.store import ConversationStore
from tests.chat.children import start
from tests.chat.helpers import ME, chat, node
from tests.children import ROOT, environment
from tests.forked import ForkedProcess

_IS_LINUX = sys.platform == "linux"


def integrity(store: ConversationStore) -> str:
    with store._database.reading() as connection:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


def let_go(children: list[ForkedProcess]) -> None:
    """Lets processes begin at one moment."""
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_loses_nothing_that_a_call_wrote(store: ConversationStore, tmp_path: Path, kills: int) -> None:
    conversation, last = chat(store)
    chosen = random.Random(kills)
    for _ in range(kills):
        store.close()
        child = start("stream", tmp_path / "data", last.id)
        said = [int(child.stdout.readline()) for _ in range(chosen.randrange(1, 400))]
        child.kill()
        said += [int(line) for line in child.stdout.read().split()]
        assert child.wait() == -9
        found = store.read(ME, conversation.id)[1].nodes[last.id]
        number, _, rest = found.text.partition(" ")
        assert int(number) in (said[-1], said[-1] + 1), "the last call may have been kept and not yet been said"
        assert found.notes == (number,)
        assert rest == "x" * 40 * (int(number) % 1000)
        assert integrity(store) == "ok"


def test_processes_share_a_folder(store: ConversationStore, tmp_path: Path) -> None:
    conversation, _ = chat(store)
    children = [start("add", tmp_path / "data", conversation.id, 60) for _ in range(2)]
    let_go(children)
    for number in range(60):
        store.add(ME, conversation.id, node(text=str(number)))
    for child in children:
        assert child.wait() == 0
    assert len(store.read(ME, conversation.id)[1].nodes) == 2 + 3 * 60
    assert integrity(store) == "ok"


def test_processes_make_one_database(tmp_path: Path) -> None:
    """All of them find no database and make it."""
    children = [start("add", tmp_path / "new", "", 20) for _ in range(3)]
    let_go(children)
    for child in children:
        assert child.wait() == 0
    store = ConversationStore(tmp_path / "new")
    assert len(store.find(ME)) == 3 * 20
    store.close()


def test_threads_share_a_store(store: ConversationStore) -> None:
    conversation, last = chat(store)
    failed: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for number in range(40):
                store.add(ME, conversation.id, node(last.id, f"{name} {number}"))
                store.update(ME, replace(last, text=f"{name} {number}"))
                store.find(ME, query="cats")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(store.read(ME, conversation.id)[1].children(last.id)) == 4 * 40


@pytest.mark.skipif(not _IS_LINUX, reason="/proc tells what is open")
def test_no_handle_goes_through_a_fork(tmp_path: Path) -> None:
    assert start("fork", tmp_path).wait() == 0


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk_is_said_and_leaves_what_was_kept(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("a small disk can't be made here")
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"', str(tmp_path)]
    command = [*mount, sys.executable, "-m", "tests.chat.children", "fill", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
