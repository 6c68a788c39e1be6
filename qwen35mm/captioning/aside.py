"""Sets broken media aside: moves them out of their folder with their text files, since trainers may stop at them.

The journal, `set-aside.jsonl` in the state folder, has the old and the new path of each file. A medium's line is on the
disk before its first file moves, and a line after its last one. So the next run ends what a kill left half done, and
everything can be taken back.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from qwen35mm.captioning.items import BROKEN, Failed, Item, Unreadable
from qwen35mm.captioning.manifest.files import (
    disk_errors,
    is_same,
    json_text,
    move_file,
    replacing,
    sync,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.file_names import fit, fold, parts_inside
from qwen35mm.captioning.sources.candidates import looks_like_medium
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import OutputError

# Suffixes of texts beside a medium, besides those of the run's own text files.
_TEXT_SUFFIXES = frozenset({".txt", ".caption", ".json"})
# Why a medium stays.
CHANGED = "It has changed since it was read"
_MOVED = b'{"moved": true}\n'
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Broken:
    """A medium that nobody may be able to read.

    Attributes:
        name: its path below its source.
        state: its size in bytes and modification time in ns when it failed.
    """

    name: str
    path: Path
    kind: str
    message: str
    state: tuple[int, int]


def broken_medium(entry: Item | Unreadable, failed: Failed) -> Broken | None:
    """The broken medium behind a failure. None if the failure isn't the medium's, or no file has it alone."""
    path = entry.path
    is_expected = isinstance(entry, Item) or (path is not None and looks_like_medium(path.name))
    if path is None or not is_expected or (isinstance(entry, Item) and entry.source != path):
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    is_empty = failed.kind == "unreadable" and status.st_size == 0
    if not path.is_file() or not (failed.kind in BROKEN or is_empty):
        return None
    return Broken(_name_of(entry, path), path, failed.kind, failed.message, (status.st_size, status.st_mtime_ns))


def _name_of(entry: Item | Unreadable, path: Path) -> str:
    """The name of the medium; of a part's video where the part has no file."""
    if isinstance(entry, Item):
        return entry.file_name if entry.part is not None and entry.part.is_clip else entry.medium_name
    name = PurePosixPath(entry.name)
    return str(name.parent if name.name != path.name and name.parent.name == path.name else name)


@dataclass(frozen=True)
class _Group:
    """A medium with its text files, as a line of the journal has it.

    Attributes:
        files: old and new path of each file, the medium's first.
        folder: where broken media go.
    """

    broken: Broken
    folder: Path
    files: Sequence[tuple[Path, Path]]

    def is_away(self) -> bool:
        """Whether one of its files is only at its new path."""
        return any(os.path.lexists(to) and not os.path.lexists(path) for path, to in self.files)


@dataclass
class SetAside:
    """What was set aside.

    Attributes:
        moved: the media.
        refused: media that stay, each with the reason.
        num_texts: text files that were moved with the media.
    """

    moved: list[Broken] = field(default_factory=list)
    refused: list[tuple[Broken, str]] = field(default_factory=list)
    num_texts: int = 0


@dataclass
class TakenBack:
    """What was taken back: how many media and text files, and the files that stay, each with the reason."""

    num: int = 0
    num_texts: int = 0
    kept: list[tuple[Path, str]] = field(default_factory=list)


class Aside:
    """The media that were set aside, by their journal. Every method may raise OutputError."""

    def __init__(self, manifest: Manifest, journal: Path) -> None:
        self._manifest = manifest
        self._journal = journal
        self._groups, self._pending, self._is_whole = self._read()

    def end(self) -> None:
        """Ends the move that a killed run began."""
        if self._pending is not None:
            self._end(self._pending)
            self._pending = None
        if not self._is_whole:
            self._rewrite()
            self._is_whole = True

    @property
    def folders(self) -> list[Path]:
        """Where media were set aside."""
        pending = [] if self._pending is None else [self._pending]
        return list(dict.fromkeys(group.folder for group in (*self._groups, *pending)))

    @property
    def media(self) -> set[Path]:
        """Where media were that are set aside now, as absolute paths."""
        first = (group.files[0] for group in self._groups)
        return {path for path, to in first if os.path.lexists(to) and not os.path.lexists(path)}

    def set_aside(
        self, broken: Iterable[Broken], folder: Path, *, suffixes: Collection[str], texts: Path | None = None
    ) -> SetAside:
        """Moves media with their text files into a folder, under their names.

        A medium that changed since it failed stays, and so does one with a file that can't be moved.

        Args:
            suffixes: of the run's text files.
            texts: the folder of the text files if they don't lie beside their media.
        """
        done, folder = SetAside(), absolute(folder)
        media = list(broken)
        beside = _Texts(self._manifest, [each.path for each in media], suffixes)
        for each in media:
            if _state(each.path) != each.state:
                done.refused.append((each, CHANGED))
                continue
            path, (*parents, name) = absolute(each.path), parts_inside(each.name)
            found = beside.of(path, None if texts is None else absolute(texts).joinpath(*parents))
            files = _paths([path, *found], folder.joinpath(*parents), name)
            group = _Group(each, folder, files)
            self._append(self._line(group))
            try:
                _move(group)
            except (OSError, OutputError) as error:
                if error.errno in _FULL:
                    with disk_errors(folder.name):
                        raise
                done.refused.append((each, _reason(error)))
                if group.is_away():
                    self._groups.append(group)
                self._rewrite()
                continue
            self._append(_MOVED)
            self._groups.append(group)
            done.moved.append(each)
            done.num_texts += len(files) - 1
            beside.moved(files)
        return done

    def take_back(self) -> TakenBack:
        """Moves everything back, the latest first. A file stays where something else has its old name."""
        done, left = TakenBack(), []
        missing = {group.folder for group in self._groups if not all(os.path.lexists(path) for path, _ in group.files)}
        # An empty folder may be where a disk is mounted. Where no file is missing, a killed way back left it.
        absent = {folder for folder in missing if not _has_files(folder)}
        for group in reversed(self._groups):
            kept: list[tuple[Path, Path]] = []
            for number, (path, to) in enumerate(group.files):
                if not os.path.lexists(to):
                    if group.folder in absent and not os.path.lexists(path):
                        kept.append((path, to))
                        done.kept.append((to, "its folder isn't there: is its disk mounted?"))
                    continue
                try:
                    _make_folder(path.parent)
                    move_file(to, path)
                    done.num += number == 0
                    done.num_texts += number > 0
                except (OSError, OutputError) as error:
                    if error.errno in _FULL:
                        with disk_errors(path.name):
                            raise
                    kept.append((path, to))
                    done.kept.append((to, _reason(error)))
            if kept:
                left.append(_Group(group.broken, group.folder, kept))
            if group.folder not in absent:
                _remove_empty({to.parent for _, to in group.files}, group.folder)
        self._groups = left[::-1]
        self._rewrite()
        return done

    def _read(self) -> tuple[list[_Group], _Group | None, bool]:
        """The groups that were moved, the one that a kill left, and whether each line is whole and counts."""
        groups: list[_Group] = []
        pending: _Group | None = None
        is_whole = True
        with disk_errors(self._journal.name):
            try:
                lines = self._journal.read_bytes().splitlines(keepends=True)
            except FileNotFoundError:
                return [], None, True
        for line in lines:
            if line == _MOVED and pending is not None:
                groups.append(pending)
                pending = None
                continue
            group = self._group(line)
            is_whole &= group is not None and pending is None
            # A line that a kill tore may be a group's last one.
            pending = group or pending
        return groups, pending, is_whole and pending is None

    def _end(self, group: _Group) -> None:
        """Ends what a kill left of a move, unless the medium has changed since."""
        medium, to = group.files[0]
        if not (os.path.lexists(to) or os.path.lexists(medium)):
            # Its disk may not be mounted.
            self._groups.append(group)
        elif os.path.lexists(to) and (not os.path.lexists(medium) or _state(to) == group.broken.state):
            if _is_another(medium, to):
                group = _without_texts_there(group)
            else:
                for path, new in group.files:
                    with contextlib.suppress(OSError, OutputError):
                        if os.path.lexists(path):
                            move_file(path, new)
            self._groups.append(group)
        elif _state(medium) == group.broken.state:
            with contextlib.suppress(OSError, OutputError):
                _move(group)
            if group.is_away():
                self._groups.append(group)
        for _, new in group.files:
            with contextlib.suppress(OSError):
                temporary_for(new).unlink()

    def _line(self, group: _Group) -> bytes:
        def text(path: Path) -> str:
            return os.fsdecode(self._manifest.place(path))

        broken, (num_bytes, mtime_ns) = group.broken, group.broken.state
        values = {
            "name": broken.name,
            "kind": broken.kind,
            "message": broken.message,
            "num_bytes": num_bytes,
            "mtime_ns": mtime_ns,
            "folder": text(group.folder),
            "files": [{"from": text(path), "to": text(to)} for path, to in group.files],
        }
        return json_text(values).encode() + b"\n"

    def _group(self, line: bytes) -> _Group | None:
        """The group of a line; None if a kill tore it."""

        def path(text: str) -> Path:
            return self._manifest.path_of(os.fsencode(text))

        try:
            row = json.loads(line) if line.endswith(b"\n") else {}
            files = [(path(each["from"]), path(each["to"])) for each in row["files"]]
            state = (row["num_bytes"], row["mtime_ns"])
            return _Group(
                Broken(row["name"], files[0][0], row["kind"], row["message"], state), path(row["folder"]), files
            )
        except (ValueError, KeyError, TypeError, IndexError):
            return None

    def _append(self, line: bytes) -> None:
        with disk_errors(self._journal.name):
            is_new = not self._journal.exists()
            with self._journal.open("ab") as file:
                end = file.tell()
                try:
                    file.write(line)
                    sync(file)
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
            if is_new:
                sync_folder(self._journal.parent)

    def _rewrite(self) -> None:
        """Writes the journal anew, without what doesn't count any more."""
        if not self._groups:
            with disk_errors(self._journal.name):
                self._journal.unlink(missing_ok=True)
                sync_folder(self._journal.parent)
            return
        with replacing(self._journal) as file:
            for group in self._groups:
                file.write(self._line(group) + _MOVED)


class _Texts:
    """Finds the text files of broken media: those that the captioner made for them, and those with their names.

    Args:
        media: the broken media.
        suffixes: of the run's text files.
    """

    def __init__(self, manifest: Manifest, media: Sequence[Path], suffixes: Collection[str]) -> None:
        self._suffixes = _TEXT_SUFFIXES | {Path(f"x{each}").suffix.lower() for each in suffixes}
        self._folders: dict[Path, _Listed] = {}
        # Whose a text file's name is, and what the captioner wrote for each broken medium.
        self._owners: dict[Path, Path] = {}
        self._made: dict[Path, list[Path]] = {absolute(path): [] for path in media}
        if not media:
            return
        query = (
            "SELECT claims.place, medium, sidecars.place IS NOT NULL FROM claims LEFT JOIN sidecars USING (place) "
            "WHERE substr(output, 1, 8) = CAST('sidecar:' AS BLOB) AND medium IS NOT NULL"
        )
        for place, medium, was_written in manifest.rows(query):
            text, owner = manifest.path_of(place), manifest.path_of(medium)
            self._owners[text] = owner
            if was_written and owner in self._made:
                self._made[owner].append(text)

    def of(self, medium: Path, folder: Path | None) -> list[Path]:
        """The text files of a medium, also in another folder than its own."""
        found = [path for path in dict.fromkeys(self._made[medium]) if os.path.lexists(path)]
        media = self._listed(medium.parent)
        for each in dict.fromkeys((medium.parent, folder or medium.parent)):
            for name in self._listed(each).beginning_with(f"{medium.stem}."):
                path = each / name
                is_own = self._owners.get(path, medium) == medium and media.owners(name) == {medium.name}
                if is_own and Path(name).suffix.lower() in self._suffixes and path not in found:
                    found.append(path)
        return [path for path in found if path.is_symlink() or path.is_file()]

    def moved(self, files: Sequence[tuple[Path, Path]]) -> None:
        """Forgets files that are there no more."""
        for path, _ in files:
            self._listed(path.parent).discard(path.name)

    def _listed(self, folder: Path) -> _Listed:
        if folder not in self._folders:
            self._folders[folder] = _Listed(folder, {path.name for path in self._made if path.parent == folder})
        return self._folders[folder]


class _Listed:
    """A folder's files. A text file is of the medium whose name, or name without suffix, it begins with."""

    def __init__(self, folder: Path, broken: Collection[str]) -> None:
        try:
            self._names = sorted(os.listdir(folder))  # noqa: PTH208 - a folder may have a hundred thousand files
        except OSError:
            self._names = []
        self._media: dict[str, set[str]] = {}
        for name in self._names:
            if name in broken or looks_like_medium(name):
                for key in (name, Path(name).stem):
                    self._media.setdefault(key, set()).add(name)

    def beginning_with(self, text: str) -> Iterator[str]:
        """The files whose names begin with a text."""
        for name in self._names[bisect_left(self._names, text) :]:
            if not name.startswith(text):
                break
            yield name

    def owners(self, name: str) -> set[str]:
        """The media that a text file belongs to: those with the longest name that it begins with."""
        while "." in name:
            name = name.rpartition(".")[0]
            if found := self._media.get(name):
                return found
        return set()

    def discard(self, name: str) -> None:
        for key in (name, Path(name).stem):
            self._media.get(key, set()).discard(name)


def _reason(error: OSError | OutputError) -> str:
    if isinstance(error, FileExistsError):
        return "Something else has its name"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")


def _state(path: Path) -> tuple[int, int] | None:
    """See `Broken.state`; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _is_another(path: Path, other: Path) -> bool:
    """Whether something else than a file or its copy is at a path."""
    try:
        return os.path.lexists(path) and not is_same(path, other)
    except OSError:
        return True


def _without_texts_there(group: _Group) -> _Group:
    """The group without the texts that are still at their old paths: they belong to the medium that is there now."""
    for path, to in group.files[1:]:
        with contextlib.suppress(OSError):
            if os.path.lexists(path) and os.path.lexists(to) and is_same(path, to):
                to.unlink()
    files = [each for each in group.files if each == group.files[0] or not os.path.lexists(each[0])]
    return _Group(group.broken, group.folder, files)


def _paths(files: Sequence[Path], folder: Path, name: str) -> list[tuple[Path, Path]]:
    """Old and new paths: with one number for all where a name is taken, so that they still belong together."""
    stem = files[0].stem
    for number in itertools.count(1):
        new, used = [], set()
        own = Path(name).stem + (f"-{number}" if number > 1 else "")
        for path in files:
            rest = path.name[len(stem) :] if path.name.startswith(stem) else f".{path.name}"
            marks = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
            to = next(each for mark in marks if fold(each := fit(own, f"{mark}{rest}")) not in used)
            used.add(fold(to))
            new.append((path, folder / to))
        if not any(os.path.lexists(to) for _, to in new):
            return new
    raise AssertionError("the numbers have no end")


def _move(group: _Group) -> None:
    """Moves a group's files, or none of them. Raises OSError, OutputError."""
    _make_folder(group.files[0][1].parent)
    try:
        for path, to in group.files:
            if os.path.lexists(path):
                move_file(path, to)
    except (OSError, OutputError):
        for path, to in reversed(group.files):
            with contextlib.suppress(OSError, OutputError):
                if os.path.lexists(to) and (not os.path.lexists(path) or is_same(to, path)):
                    move_file(to, path)
        _remove_empty({to.parent for _, to in group.files}, group.folder)
        raise


def _make_folder(folder: Path) -> None:
    """Makes a folder, durably. Raises OSError."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_folder(each.parent)


def _has_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as found:
            return any(found)
    except OSError:
        return False


def _remove_empty(folders: Collection[Path], root: Path) -> None:
    """Removes empty folders up to a root, and the root if it is empty."""
    for folder in folders:
        for each in (folder, *folder.parents):
            if not each.is_relative_to(root):
                break
            try:
                each.rmdir()
            except OSError:
                break
