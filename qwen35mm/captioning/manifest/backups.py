"""What people's files were before a run replaced them: below the state folder, since trainers read their own folder.

One folder a run, in which each file has the place that it has below the run's folder. So a folder of them can be copied
back as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from filecmp import cmp
from pathlib import Path

from qwen35mm.captioning.manifest.files import copy_file, sync_folder

BACKUPS_FOLDER = "backups"
# The place of files that don't lie in the run's folder.
_OUTSIDE = "outside"


class Backups:
    """The backups of one run.

    Args:
        state: the state folder.
        place: a path as the manifest stores it.

    Attributes:
        folder: where the latest ones are; None if there are none yet.
        num_files: how many there are.
    """

    def __init__(self, state: Path, place: Callable[[Path], bytes]) -> None:
        self._root = state / BACKUPS_FOLDER
        self._place = place
        self.folder: Path | None = None
        self.num_files = 0

    def copy(self, path: Path, *, link: bool = False) -> Path:
        """Copies a file; returns the copy. Raises OSError, OutputError.

        Args:
            link: a second name is enough if the disk can: the file will be replaced and never changed.
        """
        self.num_files += 1
        if (made := self._made(path)) is not None:
            self.folder = self.folder or self._root / made.relative_to(self._root).parts[0]
            return made
        backup = self._new(path)
        if not (link and _link(path, backup)):
            copy_file(path, backup)
        return backup

    def move(self, path: Path) -> Path:
        """Moves whatever is at `path`; returns its new path. Raises OSError, OutputError."""
        backup = self._new(path)
        try:
            path.replace(backup)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if path.is_file() and not path.is_symlink():
                copy_file(path, backup)
                path.unlink()
            else:
                shutil.move(path, backup)
        sync_folder(backup.parent)
        sync_folder(path.parent)
        self.num_files += 1
        return backup

    def _made(self, path: Path) -> Path | None:
        """The copy that a killed run made of this file; None if there is none. Raises OSError."""
        size, changed_ns = path.stat().st_size, path.stat().st_mtime_ns
        for folder in sorted(self._root.glob("*"), reverse=True):
            backup = folder / self._inside(path)
            with contextlib.suppress(OSError):
                status = backup.stat()
                if (status.st_size, status.st_mtime_ns) == (size, changed_ns) and cmp(path, backup, shallow=False):
                    return backup
        return None

    def _inside(self, path: Path) -> Path:
        """The place of a file's backup in a run's folder."""
        place = Path(os.fsdecode(self._place(path)))
        return Path(_OUTSIDE, *place.parts[1:]) if place.is_absolute() else place

    def _new(self, path: Path) -> Path:
        """The unused path for a file's backup, whose folder exists."""
        inside = self._inside(path)
        if self.folder is None or os.path.lexists(self.folder / inside):
            self.folder = self._new_folder()
        backup = self.folder / inside
        if not backup.parent.exists():
            backup.parent.mkdir(parents=True)
            for folder in list(backup.parents)[1 : len(inside.parts) + 1]:
                sync_folder(folder)
        return backup

    def _new_folder(self) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        when, number = time.strftime("%Y%m%d-%H%M%S"), 1
        while True:
            folder = self._root / (when + (f"-{number}" if number > 1 else ""))
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                continue
            sync_folder(self._root)
            return folder


def _link(path: Path, backup: Path) -> bool:
    """Gives a file a second name; False if that isn't possible."""
    try:
        os.link(path, backup)
    except OSError:
        return False
    sync_folder(backup.parent)
    return True
