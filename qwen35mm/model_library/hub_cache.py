"""Where the Hugging Face cache keeps a model: one folder for each, `refs/`, `snapshots/COMMIT/` and `blobs/`.

Read directly: huggingface_hub's scan looks at every file of every repository, data sets included, and only for sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "models--"


def cache_folder() -> Path:
    """The folder that holds all repositories; HF_HUB_CACHE and HF_HOME move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def repository_folder(hub_id: str) -> Path:
    """The folder of one model, whether it is there or not."""
    return cache_folder() / (_PREFIX + hub_id.replace("/", "--"))


def cached_models() -> Iterator[str]:
    """Hub ids of the models that the cache has anything of, sorted."""
    try:
        names = sorted(path.name for path in cache_folder().iterdir())
    except OSError:
        return
    for name in names:
        parts = name.removeprefix(_PREFIX).split("--")
        if name.startswith(_PREFIX) and len(parts) == 2 and all(parts):
            yield "/".join(parts)


def snapshots(hub_id: str) -> list[Path]:
    """A model's snapshots, perhaps incomplete: first the one that `main` names, then the others, newest first."""
    repository = repository_folder(hub_id)
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in (repository / "snapshots").iterdir():
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path))
    paths = [path for _, path in sorted(found, reverse=True)]
    main = ""
    with contextlib.suppress(OSError, ValueError):
        main = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    return sorted(paths, key=lambda path: path.name != main)
