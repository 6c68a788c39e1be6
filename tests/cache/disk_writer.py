"""A process that writes entries: `python -m tests.cache.disk_writer DIRECTORY NAME BUDGET SIZE COUNT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qwen35mm.cache.disk import DiskStore
from tests.cache.disk_helpers import KINDS, address_of, tensors_of


def main(directory: str, name: str, budget: str, size: str, count: str) -> None:
    store = DiskStore(Path(directory), max_bytes=int(budget))
    parent = os.getppid()
    print("begins", flush=True)
    for number in range(int(count)):
        if os.getppid() != parent:
            break  # nobody is left who would kill this process
        kind, address = KINDS[number % len(KINDS)], address_of(name, number)
        assert store.write(kind, address, tensors_of(kind, address, int(size)))
        store.touch([(kind, address)])


if __name__ == "__main__":
    main(*sys.argv[1:])
