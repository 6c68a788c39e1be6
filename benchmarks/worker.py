"""Engines in processes of their own, which a benchmark asks in turns; and the options that all of these have."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

# Not forked: CUDA doesn't survive that, and each engine shall find an unused process.
_spawn = multiprocessing.get_context("spawn")


class Worker:
    """An engine, `make(arguments, *options)`, in a process of its own; `close`d at its end if it can be.

    Attributes:
        load_s: seconds that it took to make.
    """

    def __init__(self, make: Callable[..., Any], arguments: argparse.Namespace, *options: Any) -> None:
        self._connection, there = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(there, make, arguments, *options))
        self._process.start()
        there.close()
        self.load_s: float = self._read()

    def ask(self, method: str, *values: Any) -> Any:
        """Calls a method of the engine."""
        self._connection.send((method, values))
        return self._read()

    def close(self) -> None:
        """Ends the process and waits until it is gone: it may have something to write first."""
        self._connection.close()
        self._process.join()
        self._check()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._process.kill()
            self._process.join()

    def _read(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            self._check()
            raise

    def _check(self) -> None:
        if self._process.exitcode != 0:
            raise SystemExit(f"a worker ended with status {self._process.exitcode}; its error stands above")


def _serve(connection: Connection, make: Callable[..., Any], arguments: argparse.Namespace, *options: Any) -> None:
    set_threads(arguments)
    started_s = time.perf_counter()
    engine = make(arguments, *options)
    with closing(engine) if hasattr(engine, "close") else nullcontext():
        connection.send(time.perf_counter() - started_s)
        while True:
            try:
                method, values = connection.recv()
            except EOFError:
                return
            connection.send(getattr(engine, method)(*values))


def rounds(
    workers: Mapping[str, Worker], num_rounds: int, method: str, *values: Any, warm: Collection[str] = ()
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """What every engine has answered so far, after each round, so that a machine that slows down does so for all.

    The first round warms up and isn't counted; engines that do so by themselves, those in `warm`, sit it out.
    """
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for round_number in range(num_rounds + 1):
        for name, worker in workers.items():
            if round_number == 0 and name in warm:
                continue
            sample = worker.ask(method, *values)
            print(f"{method} {values}, {name}, round {round_number}: done", file=sys.stderr, flush=True)
            if round_number > 0:
                samples[name].append(sample)
        if round_number > 0:
            yield samples


def in_turns(
    workers: Mapping[str, Worker], num_rounds: int, method: str, *values: Any
) -> dict[str, list[dict[str, Any]]]:
    """The same after the last round."""
    *_, samples = rounds(workers, num_rounds, method, *values)
    return samples


def parser(description: str | None, *, needs_model: bool = True) -> argparse.ArgumentParser:
    """The options that every benchmark of engines has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=needs_model, help="a checkpoint's folder")
    made.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, help="as many as torch takes by itself if left out")
    return made


def numbers(text: str) -> list[int]:
    """An option's "1,2,3"."""
    return [int(number) for number in text.split(",")]


def set_threads(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads or torch.get_num_threads())


def status_bytes(pid: str, field: str) -> int:
    """Bytes that Linux tells of a process; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def child_processes() -> list[str]:
    """This process's own; a thread may end while its list is read."""
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += path.read_text(encoding="utf-8").split()
    return found
