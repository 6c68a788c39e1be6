"""Reads and writes the committed tables of kernel configurations, one JSON file for each measured card.

    {"card": "NVIDIA H200", ..., "kernels": {"gdn_scan": {"Hv32_K128_V128": {"blocks": ..., ...}}}}

Everything besides "kernels" only documents the numbers' origin.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
_FIELDS = ("blocks", "num_stages", "num_warps")


@dataclass(frozen=True)
class Config:
    """A kernel's configuration.

    Attributes:
        blocks: constexpr arguments of the kernel, by name.
        num_warps: warps of a program.
        num_stages: stages of its pipelined loops.
    """

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal configurations, and hashable."""
        return (*sorted(self.blocks.items()), self.num_warps, self.num_stages)


# By kernel and shape.
Table = dict[tuple[str, str], Config]


def table_path(card: str) -> Path:
    """The path of a card's table, which need not exist: "NVIDIA H200" -> configs/nvidia_h200.json."""
    return CONFIGS / ("_".join("".join(c if c.isalnum() else " " for c in card.lower()).split()) + ".json")


def read_table(path: Path) -> Table:
    """A card's table; empty if there is no file.

    Raises:
        ValueError: the file or an entry is malformed. Names the file, the kernel and the shape.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} isn't JSON: {error}") from error
    kernels = content.get("kernels") if isinstance(content, dict) else None
    if not isinstance(kernels, dict):
        raise ValueError(f'{path} must be an object with "kernels", as benchmarks/tune_kernels.py writes it.')
    table: Table = {}
    for kernel, shapes in kernels.items():
        if not isinstance(shapes, dict):
            raise ValueError(f"{path}, {kernel}: must map shapes to configurations, got {shapes!r}.")
        for shape, entry in shapes.items():
            table[kernel, shape] = _as_config(entry, f"{path}, {kernel}, {shape}")
    return table


def write_table(path: Path, table: Table, origin: Mapping[str, str | None]) -> None:
    """Writes a table atomically: readers see the old table or the new one.

    Args:
        origin: the card and versions that the numbers depend on.
    """
    kernels: dict[str, dict[str, Any]] = {}
    for (kernel, shape), config in table.items():
        entry = {"blocks": dict(config.blocks), "num_stages": config.num_stages, "num_warps": config.num_warps}
        kernels.setdefault(kernel, {})[shape] = entry
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**origin, "kernels": kernels}, indent=1, sort_keys=True) + "\n", "utf-8")
    new.replace(path)


def _as_config(entry: object, where: str) -> Config:
    if not isinstance(entry, dict) or sorted(entry) != sorted(_FIELDS):
        raise ValueError(f"{where}: must have {', '.join(_FIELDS)} and nothing else, got {entry!r}.")
    blocks = entry["blocks"]
    if not isinstance(blocks, dict):
        raise ValueError(f"{where}: blocks must map names to sizes, got {blocks!r}.")
    for name, number in (*blocks.items(), ("num_warps", entry["num_warps"]), ("num_stages", entry["num_stages"])):
        if type(number) is not int or number < 1:
            raise ValueError(f"{where}: {name} must be a whole number of at least 1, got {number!r}.")
    return Config(blocks, entry["num_warps"], entry["num_stages"])
