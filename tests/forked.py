"""`python -m MODULE ARGS` as a process of its own, forked from one that has imported everything already.

A cold start of Python with torch, transformers and Gradio takes 4 to 6 seconds, a fork milliseconds, and its child can
be killed, watched and waited for like any other. What a test says about imports, or about the first start of a
command, needs a real start: `subprocess` with `tests.children.environment`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from tests.children import ROOT, environment

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preload"])
# Where a worker of xdist finds the server that it is forked from.
_ADDRESS, _KEY = "QWEN35MM_TESTS_FORK_SERVER", "QWEN35MM_TESTS_FORK_KEY"
_FORKSERVER: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
# Only reached where a test fails.
PATIENCE_S = 240


class ForkedProcess:
    """A child, with the members of `subprocess.Popen` that tests use; its streams are text.

    Args:
        module, arguments: as in `python -m module arguments`.
        cwd: where it starts; None is the repository.
        env: all its variables; None is `environment()`. The threads of OpenMP stay at one, whatever it says.
    """

    def __init__(
        self, module: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        _start_server()
        child_in, stdin = os.pipe()
        stdout, child_out = os.pipe()
        stderr, child_err = os.pipe()
        streams = [DupFd(number) for number in (child_in, child_out, child_err)]
        variables = environment() if env is None else dict(env)
        self.args = ["python", "-m", module, *map(str, arguments)]
        self._process: Any = _SERVER.Process(
            target=_main, args=(module, self.args[3:], str(cwd or ROOT), variables, streams), daemon=True
        )
        self._process.start()
        for number in (child_in, child_out, child_err):
            os.close(number)
        self.pid: int = self._process.pid
        self.stdin: IO[str] = os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.stderr: IO[str] = os.fdopen(stderr, encoding="utf-8", errors="replace")

    @property
    def returncode(self) -> int | None:
        """As `subprocess.Popen`'s: the exit code, minus the signal's number, or None where it still runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, text: str | None = None, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Writes to it, closes its input, and gives what it wrote until its end: standard output and error."""
        read: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda name=name, stream=stream: read.update({name: stream.read()}), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
        ]
        for thread in threads:
            thread.start()
        try:
            with self.stdin:
                self.stdin.write(text or "")
        except BrokenPipeError:
            pass  # it didn't want to read
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return read["out"], read["err"]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    *arguments: object,
    text: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, "-m", module, ...], capture_output=True, text=True)` gives."""
    process = ForkedProcess(module, *arguments, cwd=cwd, env=env)
    try:
        out, errors = process.communicate(text, timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, errors)


def share_server() -> tuple[Any, ...]:
    """Starts what children are forked from, if nobody has, and gives what `use_server` takes in another process.

    It ends with this process. That it imports what tests do costs 8 seconds of a core, once for all of them.
    """
    _SERVER.set_forkserver_preload(["tests.preload_all"])
    _start_server()
    return _FORKSERVER._forkserver_address, getattr(_FORKSERVER, "_forkserver_authkey", None)


def fork_workers(specs: list[str]) -> list[str]:
    """xdist's `popen`s as ones whose Python is a fork of the server, which this starts."""
    address, key = share_server()
    os.environ |= {_ADDRESS: address, _KEY: (key or b"").hex()}
    fork = shlex.join([sys.executable, str(Path(__file__).with_name("forked_worker.py"))])
    return [f"popen//python={fork}" if spec == "popen" else spec for spec in specs]


def work() -> int:
    """Has a fork take this process's streams and do what xdist sends; gives its exit code."""
    use_server((os.environ.pop(_ADDRESS), bytes.fromhex(os.environ.pop(_KEY)) or None))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork's to answer
    streams = [DupFd(number) for number in range(3)]
    worker: Any = _SERVER.Process(
        target=_main, args=("tests.forked_worker", ["forked"], str(Path.cwd()), dict(os.environ), streams)
    )
    worker.start()
    worker.join()
    return worker.exitcode


def use_server(shared: tuple[Any, ...]) -> None:
    """Has this process's children forked from the server of another one."""
    _FORKSERVER._forkserver_address, _FORKSERVER._forkserver_authkey = shared
    # Each child is handed one: what keeps the server alive is the other process's.
    _FORKSERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    _FORKSERVER.ensure_running = lambda: None


def _start_server() -> None:
    """Starts what children are forked from, once, with the variables that libraries read while they are loaded."""
    kept = dict(os.environ)
    os.environ.update(environment())
    try:
        _FORKSERVER.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _main(module: str, arguments: list[str], cwd: str, variables: dict[str, str], streams: list[Any]) -> None:
    """The child: takes on its surroundings, and ends as an interpreter would."""
    for number, stream in enumerate(streams):
        received = stream.detach()
        os.dup2(received, number)
        os.close(received)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # multiprocessing has put /dev/null in its place
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    # multiprocessing's server ignores SIGINT, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
