"""Control groups, which limit containers on Linux; other systems have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def control_groups(controller: str, cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> Iterator[Path]:
    """Folders of this process's control group and its parents, versions 1 and 2; some may not exist.

    Args:
        controller: such as "memory" or "cpu".
        cgroups: where control groups are mounted.
        own_cgroup: the file that names this process's groups, in lines of `id:controllers:path`.
    """
    try:
        lines = own_cgroup.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        # Inside a container the path may be the host's, with only its upper end mounted here.
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield (cgroups / controller if controllers else cgroups) / folder


def read_words(path: Path) -> list[str]:
    """The words of a control group's file; none if it can't be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []
