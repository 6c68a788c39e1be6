"""What every benchmark prints: the machine and the versions, a table first, and one JSON line last."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35mm.cpu import cpu_capabilities


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: the median, and the range around it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("no measurements")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def text(self, digits: int = 1) -> str:
        """`median (low-high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def machine() -> dict[str, Any]:
    """The hardware and the versions that figures depend on."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "bf16_arithmetic": _has_bfloat16(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "triton": _version("triton"),
        "flash-linear-attention": _version("flash-linear-attention"),
        "causal-conv1d": _version("causal-conv1d"),
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def print_machine(info: dict[str, Any]) -> None:
    """One line with everything `machine` found."""
    print(", ".join(f"{key} {value}" for key, value in info.items() if value is not None))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))


def print_json(benchmark: str, options: argparse.Namespace, **values: Any) -> None:
    """The last line: the options and everything above for a program to read."""
    print(json.dumps({"benchmark": benchmark, **vars(options), **values}, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    assert isinstance(value, Path)
    return str(value)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)


def _has_bfloat16() -> bool:
    capabilities = cpu_capabilities()
    return any(capabilities.get(flag, False) for flag in ("amx_bf16", "avx512_bf16", "bf16"))
