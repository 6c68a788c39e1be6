"""What tests run as processes of their own: `python -m tests.chat.children TASK FOLDER [MORE ...]`."""

from __future__ import annotations

import asyncio
import ctypes
import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import StorageError
from tests.chat.chat_kit import ChatKit
from tests.chat.helpers import ME, attach, chat, create, files_in, node
from tests.forked import ForkedProcess

# A lock that is lost in a fork would hold a test for ever.
_HANG_S = 60


def start(task: str, *arguments: object) -> ForkedProcess:
    """Starts a task; its words come through its stdout, its failure through its exit status."""
    return ForkedProcess("tests.chat.children", task, *arguments)


def stream(folder: Path, node_id: str) -> None:
    """Grows a message until it is killed; says every number that was kept, after the call returned."""
    store = ConversationStore(folder)
    (conversation,) = store.find(ME)
    message = store.read(ME, conversation.id)[1].nodes[node_id]
    parent = os.getppid()
    for number in itertools.count():
        if os.getppid() != parent:
            break  # nobody is left who would kill this process
        text = f"{number} {'x' * 40 * (number % 1000)}"
        store.update(ME, replace(message, text=text, notes=(str(number),)))
        os.write(1, f"{number}\n".encode())


def send(folder: Path, number: str, *place: str) -> None:
    """Sends a message, and is killed before a statement of the transaction that keeps it; says so if it gets through.

    Args:
        number: the statement's, from 1.
        place: the conversation, and the reply that the message follows; without them it begins a new one.
    """
    kit = ChatKit(folder)
    kit.store.find(ME)  # opens the database
    statements: list[str] = []

    def trace(statement: str) -> None:
        if statements or statement == "BEGIN IMMEDIATE":
            statements.append(statement)
        if len(statements) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    with kit.store._database.reading() as connection:
        connection.set_trace_callback(trace)
    asyncio.run(kit.send("another question", *place))
    print("sent", flush=True)


def create_many(folder: Path, count: str) -> None:
    """Makes conversations, once it may; opens and closes the database often."""
    print("ready", flush=True)
    sys.stdin.readline()
    store = ConversationStore(folder)
    for number in range(int(count)):
        create(store, ME, title=f"{os.getpid()}")
        if number % 10 == 0:
            store.close()


def fork(folder: Path) -> None:
    """Forks while other threads write: no handle goes along, and both sides go on."""
    signal.alarm(_HANG_S)
    store, idle = ConversationStore(folder / "one"), ConversationStore(folder / "two")
    conversation, _ = chat(store)
    chat(idle)
    stop = threading.Event()
    added: list[str] = []

    def write() -> None:
        while not stop.is_set():
            message = node()
            store.add(ME, conversation.id, message)
            added.append(message.id)

    threads = ThreadPoolExecutor(2)
    writing = [threads.submit(write) for _ in range(2)]
    for _ in range(4):
        child = os.fork()
        if child == 0:
            signal.alarm(_HANG_S)
            status = 1
            try:
                opened = [path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
                assert not [name for name in opened if "sqlite" in name], opened
                for each in (store, idle):
                    create(each, ME, title="child")
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    for each in writing:
        each.result()
    assert len(store.search(ME, "child")) == len(idle.search(ME, "child")) == 4
    assert set(added) <= set(store.read(ME, conversation.id)[1].nodes)
    assert len(added) > 0
    with store._database.reading() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def mount_small(folder: Path) -> None:
    """Puts an empty disk of 4 MiB there, for this process alone: `unshare -rm`, and `mount`."""
    system = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    new_user_and_mounts, private = 0x10020000, 0x44000

    def done(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    done(system.unshare(new_user_and_mounts))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    done(system.mount(b"none", b"/", None, private, None))
    done(system.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=4m"))


def fill(folder: Path) -> None:
    """On a small disk: writes until it is full, and finds what was kept before."""
    mount_small(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(1 << 20))
    store = ConversationStore(folder / "data")
    conversation, last = chat(store)
    attach(store, bytes(10_000), "unused.png")
    kept = ""
    for number in itertools.count():
        text = f"{number}" + "x" * 100_000
        if is_full(lambda text=text: store.update(ME, replace(last, text=text))):
            break
        kept = text
    assert is_full(lambda: store.media.add(io.BytesIO(bytes(100 << 20)), max_bytes=1 << 30))
    assert len(files_in(folder / "data" / "media")) == 1
    assert store.read(ME, conversation.id)[1].nodes[last.id].text == kept
    assert store.media.collect_garbage(min_age_s=0) == 1, "also a full disk can be tidied"
    store.close()
    filler.unlink()
    assert store.read(ME, conversation.id)[1].nodes[last.id].text == kept
    store.update(ME, replace(last, text="room again"))
    assert store.read(ME, conversation.id)[1].nodes[last.id].text == "room again"


def is_full(call: Callable[[], object]) -> bool:
    """Whether a call says that the disk is full; False where it succeeds."""
    try:
        call()
    except StorageError as error:
        if "disk is full" not in str(error):
            raise
        return True
    return False


if __name__ == "__main__":
    tasks = {"stream": stream, "send": send, "create": create_many, "fork": fork, "fill": fill}
    tasks[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
