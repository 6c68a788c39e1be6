"""Processes that write into a cache folder and may be killed at any moment.

A test starts this file once as a process of its own, which imports torch once and then forks each child: a fork takes
milliseconds, an import seconds, and forking the test's own process, with all its threads, may hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from qwen35mm.cache.disk import DiskStore, Kind
from tests.cache.disk_helpers import METADATA, ROOT, address_of, tensors_of

KINDS: tuple[Kind, ...] = ("state", "kv", "vision")
REPOSITORY = Path(__file__).resolve().parents[2]


class Children:
    """The test's side: starts children, kills them, waits for them."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.cache.disk_children"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPOSITORY,
        )
        self._running: set[int] = set()
        self._ask({"ready": True})

    def start(self, directory: Path, name: str, *, max_bytes: int, size: int, count: int) -> int:
        """A child that writes `count` entries named after it; its process id, once it begins with the first."""
        task = {"directory": str(directory), "name": name, "max_bytes": max_bytes, "size": size, "count": count}
        child = self._ask({"start": task})
        self._running.add(child)
        return child

    def kill(self, child: int) -> None:
        """kill -9, and waits until nothing of it is left; it must still have been at work."""
        os.kill(child, signal.SIGKILL)
        assert self.wait(child) == -signal.SIGKILL

    def wait(self, child: int) -> int:
        """Waits for a child's end; its exit status, a signal as a negative number."""
        self._running.discard(child)
        return self._ask({"wait": child})

    def close(self) -> None:
        """Ends everything, also what a failed test left running."""
        for child in list(self._running):
            self.kill(child)
        self._server.communicate(timeout=60)

    def _ask(self, command: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the server of children is gone; its own words are on stderr"
        return json.loads(answer)


def write_entries(task: dict, ready: int) -> None:
    """A child's work: entries that follow from the task's name and their number."""
    store = DiskStore(Path(task["directory"]), root=ROOT, max_bytes=task["max_bytes"])
    parent = os.getppid()
    os.write(ready, b".")
    for number in range(task["count"]):
        if os.getppid() != parent:
            break  # nobody is left who would kill this child
        kind, address = KINDS[number % len(KINDS)], address_of(task["name"], number)
        tensors = tensors_of(kind, address, task["size"])
        assert store.write(kind, address, tensors, METADATA)
        store.touch([(kind, address)])


def _fork(task: dict) -> int:
    tensors_of("state", ROOT, task["size"])  # what all entries are made of is made before the fork
    is_ready, ready = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(is_ready)
            write_entries(task, ready)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(ready)
    assert os.read(is_ready, 1) == b".", "a child failed before its first entry"
    os.close(is_ready)
    return child


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        answer = 0
        if "start" in command:
            answer = _fork(command["start"])
        elif "wait" in command:
            answer = os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
