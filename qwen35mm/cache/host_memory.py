"""How much memory this process may use on its host, without psutil."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def host_memory_bytes() -> int | None:
    """Bytes of the machine's memory, or of the container's limit where that is less; None where neither is known."""
    limits = [*_physical(), *cgroup_limits(_CGROUPS, _OWN_CGROUP)]
    return min(limits, default=None)


def cgroup_limits(cgroups: Path, own_cgroup: Path) -> Iterator[int]:
    """Memory limits in bytes of this process's control group and of those above it, versions 1 and 2.

    Args:
        cgroups: where control groups are mounted.
        own_cgroup: the file that names this process's; lines of `id:controllers:path`.
    """
    try:
        lines = own_cgroup.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be that of the host, of which only the upper end is mounted here.
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            limit = _read_limit(base / folder / name)
            if limit is not None:
                yield limit


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    # "max" is no limit; version 1 writes a number beyond any machine's memory instead.
    return int(text) if text.isdecimal() else None


def _physical() -> Iterator[int]:
    try:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return  # Windows has no sysconf.
    if num_bytes > 0:
        yield num_bytes
