"""Shared by all benchmarks: options, engines in separate processes, and the report.

A benchmark adds its options and defines what one engine measures. `ask_in_turns` warms up, repeats and alternates
between the engines, so that a machine that slows down slows all of them. `report` prints the machine, the tables and
one JSON line. A table is a list of rows, a row maps column titles to values, and the JSON line has the same rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qwen35mm.cpu import cpu_capabilities

# CUDA doesn't survive a fork; spawn also gives every engine a fresh process.
_spawn = multiprocessing.get_context("spawn")

Sample = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity: the median and the range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        if not found:
            raise ValueError("no measurements")
        return cls(statistics.median(found), min(found), max(found), len(found))


class Worker:
    """An engine, `make(arguments, *options)`, in its own process. Closes the engine at the end if it has `close`.

    Attributes:
        load_s: seconds that `make` took.
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
        """Ends the process and waits for it, since it may still write something."""
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


def ask_in_turns(
    workers: Mapping[str, Worker], repeats: int, method: str, *values: Any, warm: Collection[str] = ()
) -> dict[str, list[Sample]]:
    """Each worker's samples by its name; progress goes to stderr.

    The first round is a warm-up and isn't counted. Workers in `warm` warm up themselves and skip it.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in workers}
    for number in range(repeats + 1):
        for name, worker in workers.items():
            if number or name not in warm:
                sample = worker.ask(method, *values)
                print(f"{method} {values}, {name}, round {number}: {str(sample)[:300]}", file=sys.stderr, flush=True)
                samples[name] += [sample] if number else []
    return samples


def parser(description: str | None, *, model: bool = True, repeats: int | None = 3) -> argparse.ArgumentParser:
    """A parser with the options of most benchmarks.

    Args:
        model: adds the options of engines; without it only `--threads`.
        repeats: default of `--repeats`; None omits the option.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        made.add_argument("--model", required=True, help="a checkpoint's folder")
        made.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
        made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, help="PyTorch's own number by default")
    if repeats is not None:
        made.add_argument("--repeats", type=int, default=repeats, help=f"measurements of each number; {repeats}")
    return made


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line and applies `--threads`."""
    arguments = options.parse_args()
    set_threads(arguments)
    return arguments


def numbers(text: str) -> list[int]:
    """Parses an option such as "1,2,3"."""
    return [int(number) for number in text.split(",")]


def set_threads(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads or torch.get_num_threads())


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(benchmark: str, arguments: argparse.Namespace, tables: Mapping[str, Rows], **facts: Any) -> None:
    """Prints options, machine and versions, the tables with their titles, and the JSON line.

    Args:
        facts: all are in the JSON line; strings are also printed below the tables.
    """
    info = machine()
    for values in (vars(arguments), info):
        print(", ".join(f"{name} {value}" for name, value in values.items() if value is not None))
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(rows)
    for text in facts.values():
        if isinstance(text, str):
            print(text)
    line = {"benchmark": benchmark, **vars(arguments), "machine": info, "tables": tables, **facts}
    print(json.dumps(line, default=_plain))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """A Markdown table with aligned columns; the keys of the first row are its header."""
    header = list(rows[0])
    cells = [header, *([cell(row.get(title)) for title in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))


def cell(value: object) -> str:
    """Formats a value for a table: numbers to three digits, a spread as `median (low-high)`."""
    if isinstance(value, Spread):
        digits = _digits(value.median)
        median, low, high = (f"{number:,.{digits}f}" for number in (value.median, value.low, value.high))
        return median if value.count == 1 else f"{median} ({low}-{high})"
    if isinstance(value, float):
        return f"{value:,.{_digits(value)}f}"
    return "-" if value is None else str(value)


def _digits(value: float) -> int:
    """Decimals for three significant digits of a number."""
    return max(0, min(6, 2 - math.floor(math.log10(abs(value))))) if value and math.isfinite(value) else 0


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, Spread) else str(value)


def machine() -> dict[str, Any]:
    """Hardware and versions that the figures depend on."""
    capabilities = cpu_capabilities()
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "bf16_arithmetic": any(capabilities.get(flag, False) for flag in ("amx_bf16", "avx512_bf16", "bf16")),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }
    for package in ("torch", "transformers", "triton", "flash-linear-attention", "causal-conv1d"):
        try:
            info[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            info[package] = None
    return info


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
