"""Scans sources for items: files, folders, lists of files, datasets, tars and zips, lazily and in a stable order.

Names are paths below their source: a file's own name, a folder's files below the folder, a list's files below the
list's folder, a container's rows or members below the container's file name. If an earlier source has given a name
already, the later one gets its source's folder name in front (`b/x.jpg`), and more of its path if that is taken too. So
another source never changes the names of those before it.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, Container, SourceError, probe
from qwen35mm.captioning.sources.datasets import PARQUET_MAGIC, open_dataset_folder, open_parquet
from qwen35mm.captioning.sources.folders import shard_metadata, walk
from qwen35mm.captioning.sources.names import NameFilter, Names, absolute, is_one_of, shard_of
from qwen35mm.captioning.sources.tars import is_tar, tar_members
from qwen35mm.captioning.sources.zips import is_zip, zip_members
from qwen35mm.errors import CaptioningError, MissingExtraError, OutputError
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.formats import HEAD_BYTES

logger = logging.getLogger(__name__)

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")


@dataclass(frozen=True)
class ScanOptions:
    """Which items of the sources are taken.

    Attributes:
        recursive: whether to enter subfolders.
        include, exclude: globs over the name below the source; see `NameFilter`. They don't apply to a file that is a
            source itself.
        image_column: of parquet files and datasets; None if each has only one.
        limits: a medium with more bytes is Unreadable.
        shard: (i, n), from 1: takes the items of shard i of n; see `shard_of`. Every shard reports a folder or a
            container that can't be read.
        without: folders that the run itself writes media to: skipped inside a folder, refused as sources.
        only_files: refuses containers as sources; those in folders too, as soon as there is a manifest.
    """

    recursive: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    image_column: str | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)
    shard: tuple[int, int] | None = None
    without: tuple[Path, ...] = ()
    only_files: bool = False

    def __post_init__(self) -> None:
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise CaptioningError(
                f"Expected a shard from 1/n to n/n, got {self.shard[0]}/{self.shard[1]}. Count from 1."
            )


def scan(
    sources: Sequence[Path | str], options: ScanOptions, manifest: Manifest | None = None
) -> Iterator[Item | Unreadable]:
    """The items of all sources, in their order; folders are listed lazily.

    A source is a file, a folder, a dataset folder, a parquet file, a tar or a zip. As text it may also be `@LIST`, a
    file with one path per line (`@-` is standard input), or `shard-{000..012}.tar`. A file that was already reached is
    skipped. In a folder, files that neither are media nor have a medium's suffix are skipped silently.

    Args:
        manifest: stores folders' metadata files; without one they aren't read.

    Raises:
        CaptioningError: before the first item: there is no such source, it is also an output, or a dataset's image
            column isn't known.
        MissingExtraError: before the first item: a dataset needs pyarrow.
        OutputError: the manifest can't be written.
    """
    given = [path for source in sources for path in _expanded(source)]
    for source in given:
        _check_exists(source)
    scanned = _Scan(options, manifest, Names(is_needed=len(given) > 1 or not all(map(_has_unique_names, given))))
    # Opened before the first item, so that wrong columns of a container are reported at once.
    opened = [
        scanned.open(Path(source), Path(source).name) if (files := _list_file(source)) is None else scanned.read(files)
        for source in given
    ]
    return itertools.chain.from_iterable(opened)


class _Scan:
    """One scan: its options and the names so far."""

    def __init__(self, options: ScanOptions, manifest: Manifest | None, names: Names) -> None:
        self._options = options
        self._manifest = manifest
        self._filter = NameFilter(options.include, options.exclude)
        self._names = names

    def open(self, path: Path, name: str, below: str = "") -> Iterator[Item | Unreadable]:
        """The items in `path`.

        Args:
            name: of a file or a container.
            below: a folder's items have names below this.

        Raises:
            CaptioningError, MissingExtraError: a dataset that can't be read, or a folder that the run writes to.
        """
        options = self._options
        if path.is_dir():
            if is_one_of(path, options.without):
                raise CaptioningError(
                    f"'{printable(path.name)}' is an output of this run and can't be its source as well: each run "
                    "would caption what the last one wrote. Give the output a folder of its own."
                )
            dataset = open_dataset_folder(path, self._filter, options.image_column, without=options.without)
            if dataset is not None:
                self._refuse_container(path)
            elif options.only_files and self._manifest is not None:
                found = walk(path, self._filter, self._manifest, recursive=options.recursive, without=options.without)
                for each in found:
                    if isinstance(each, Container):
                        self._refuse_container(each.path)
            if dataset is None:
                files = walk(path, self._filter, self._manifest, recursive=options.recursive, without=options.without)
                return self._items(files, below, path, below or absolute(path).name, path)
            new = [shard for shard in dataset.shards if self._names.claim_file(shard)]
            return itertools.chain.from_iterable(
                self._items(dataset.rows(shard), below, path, _joined(below, shard.relative_to(path).as_posix()), shard)
                for shard in new
            )
        # Claimed before any folder is listed: a file that is a source itself belongs to that source.
        if not self._names.claim_file(path):
            return iter(())
        head = _head(path)
        if head.startswith(PARQUET_MAGIC) or (head and path.suffix.lower() == ".parquet"):
            self._refuse_container(path)
            rows = open_parquet(path, options.image_column).rows(path)
            return self._items(rows, name, path.parent, name, path)
        if is_tar(head) or (head and path.suffix.lower() == ".tar"):
            self._refuse_container(path)
            return self._items(tar_members(path), name, path.parent, name, path)
        if is_zip(name, head):
            self._refuse_container(path)
            return self._items(zip_members(path, options.limits.max_bytes(None)), name, path.parent, name, path)
        return self._to_the_end(self._file(path, name), path.parent, name, path)

    def _refuse_container(self, path: Path) -> None:
        """Raises CaptioningError if only files are wanted."""
        if self._options.only_files:
            raise CaptioningError(
                f"'{printable(path.name)}' holds media as a tar, a zip or a dataset does, and --set-aside can only "
                "move files. Unpack it, leave it out with --exclude, or leave --set-aside out."
            )

    def read(self, path: str) -> Iterator[Item | Unreadable]:
        """The items of a file list; `-` is standard input. A line that can't be used is Unreadable."""
        name = "standard input" if path == "-" else Path(path).name
        return self._to_the_end(self._lines(path), Path(path).parent, name, Path(path))

    def _lines(self, path: str) -> Iterator[Item | Unreadable]:
        folder = Path() if path == "-" else Path(path).parent
        for line in _lines(path):
            source = folder / line
            name = _name_below(folder, source)
            try:
                _check_exists(source)
                yield from self.open(source, name, below=name)
            except OutputError:
                raise
            except (CaptioningError, MissingExtraError) as error:
                yield Unreadable(name, "unreadable", printable(str(error)), source)

    def _file(self, path: Path, name: str) -> Iterator[Item | Unreadable]:
        candidate = Candidate(name, path, partial(shard_metadata, path), is_expected=True)
        name = self._names.claim(name, path.parent)
        if not self._in_shard(name):
            return
        if name.lower().endswith(_COMPRESSED_TARS):
            message = f"'{printable(path.name)}' is a compressed tar, which is not read here. Uncompress it first."
            yield Unreadable(name, "unsupported", message, path)
            return
        if found := probe(candidate, name, self._options.limits):
            yield found

    def _items(
        self,
        candidates: Iterator[Candidate | Container | Unreadable],
        below: str,
        folder: Path,
        name: str,
        path: Path,
        names: Names | None = None,
    ) -> Iterator[Item | Unreadable]:
        """The items in a folder or a container.

        Args:
            below: a prefix for the candidates' own names.
            folder: makes equal names unique.
            name, path: of the source, for an error that ends it.
            names: the names that are taken; None for those of the whole scan.
        """
        claim = (names or self._names).claim

        def found() -> Iterator[Item | Unreadable]:
            for candidate in candidates:
                if isinstance(candidate, Unreadable):
                    yield replace(candidate, name=claim(_joined(below, candidate.name), folder))
                elif isinstance(candidate, Container):
                    yield from self._contained(candidate, below, folder)
                elif self._filter.takes(candidate.name) and self._is_new(candidate):
                    candidate = replace(candidate, name=_joined(below, candidate.name))
                    own_name = claim(candidate.name, folder)
                    if self._in_shard(own_name) and (item := probe(candidate, own_name, self._options.limits)):
                        yield item

        return self._to_the_end(found(), folder, name, path)

    def _contained(self, container: Container, below: str, folder: Path) -> Iterator[Item | Unreadable]:
        """The items in a tar or a zip in a folder; patterns apply to `CONTAINER/MEMBER`."""
        path = container.path
        # A named pipe could block forever.
        if not path.is_file() or not self._names.claim_file(path):
            return iter(())
        most_bytes = self._options.limits.max_bytes(None)
        members = zip_members(path, most_bytes) if is_zip(path.name) else tar_members(path)
        named = (replace(member, name=f"{container.name}/{member.name}") for member in members)
        names = self._names.for_container()
        return self._items(named, below, folder, _joined(below, container.name), path, names)

    def _to_the_end(
        self, entries: Iterator[Item | Unreadable], folder: Path, name: str, path: Path
    ) -> Iterator[Item | Unreadable]:
        """The entries of one source. An error ends the source, not the run."""
        try:
            yield from entries
            return
        except OutputError:
            raise
        except SourceError as error:
            kind, message = error.kind, str(error)
        except OSError:
            kind, message = "unreadable", f"'{printable(path.name)}' could not be read. Check its path and permissions."
        except Exception as error:
            logger.warning("%s could not be read to its end.", printable(name), exc_info=True)
            kind = "damaged"
            message = (
                f"'{printable(path.name)}' could not be read to its end ({type(error).__name__}), and the rest of it "
                f"is left out. Check that it is whole."
            )
        yield Unreadable(self._names.claim(name, folder), kind, message, path)

    def _is_new(self, candidate: Candidate) -> bool:
        """Whether a candidate is the first with its file. Rows may share a file, and each is an item."""
        source = candidate.source
        return candidate.is_expected or not isinstance(source, Path) or self._names.claim_file(source)

    def _in_shard(self, name: str) -> bool:
        shard = self._options.shard
        return shard is None or shard_of(name, shard[1]) == shard[0]


def _expanded(source: Path | str) -> list[Path | str]:
    """Replaces `{a..b}` in a text by every number from a to b, as wide as a; an existing file of that name wins."""
    found = _BRACES.search(source) if isinstance(source, str) else None
    if found is None or Path(source).exists():
        return [source]
    first, last = found.groups()
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    before, after = found.string[: found.start()], found.string[found.end() :]
    expanded = [path for number in numbers for path in _expanded(f"{before}{number}{after}")]
    if not expanded:
        raise CaptioningError(f"'{source}' matches no file: expected an ascending range, as in {{000..012}}.")
    return expanded


def _list_file(source: Path | str) -> str | None:
    """The file of a source `@LIST`; None for another source."""
    return source[1:] if isinstance(source, str) and source.startswith("@") else None


def _has_unique_names(source: Path | str) -> bool:
    """Whether a source alone can't give a name or a file twice."""
    return _list_file(source) is None and (Path(source).is_dir() or Path(source).suffix.lower() == ".parquet")


def _check_exists(source: Path | str) -> None:
    """Raises CaptioningError."""
    files = _list_file(source)
    if files == "-":
        return
    try:
        if Path(source).exists() if files is None else Path(files).is_file():
            if files is not None:
                Path(files).open("rb").close()
            return
    except OSError:
        raise CaptioningError(f"'{printable(str(source))}' can't be reached. Check its path and permissions.") from None
    expected = "a file or a folder" if files is None else "a list of files"
    raise CaptioningError(f"There is no '{printable(str(source))}': expected {expected}. Check its path.")


def _head(path: Path) -> bytes:
    """A file's first bytes; empty if it isn't a file or can't be read. Probing it reports that."""
    try:
        # A named pipe or a device could block forever.
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _lines(path: str) -> Iterator[str]:
    """The paths in a file list; bytes that aren't UTF-8 stay as in file names."""
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
        for number, line in enumerate(file):
            text = line.removeprefix(codecs.BOM_UTF8 if number == 0 else b"").rstrip(b"\r\n")
            if text.strip() and not text.startswith(b"#"):
                yield text.decode("utf-8", "surrogateescape")


def _name_below(folder: Path, path: Path) -> str:
    """The path below the list's folder; for a file elsewhere, its whole path without the root."""
    base, whole = absolute(folder), absolute(path)
    try:
        return _joined(whole.relative_to(base).as_posix(), "")
    except ValueError:
        return whole.relative_to(whole.anchor).as_posix()


def _joined(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part not in ("", "."))
