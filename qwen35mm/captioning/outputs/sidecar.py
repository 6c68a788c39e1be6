"""Captions as text files beside their media.

A new text is written under a temporary name. Then the manifest stores the digests of the old and the new file, and the
new file is renamed. A leftover temporary file shows that the rename didn't happen, so the manifest's entry is undone.
So it is always known whether a file is ours or a person's, however the last run ended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import disk_errors, json_text, replacing, temporary_for
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import IsOld, Output, OutputSettings, Wants
from qwen35mm.captioning.outputs.file_names import Claims, fold, numbered, owner_of, parts_inside
from qwen35mm.captioning.records import Caption, Record, printable
from qwen35mm.captioning.texts.cleanup import add_to, holds, replaced_in, with_trigger
from qwen35mm.errors import CaptioningError, OutputError
from qwen35mm_preprocess import MediaKind
from qwen35mm_preprocess.formats import HEAD_BYTES, sniff

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
_MARK = "\ufeff"
# Errors of one file or folder, not of the disk.
_OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


@dataclass(frozen=True)
class _Text:
    """A text file's content, and what the manifest knows of it: see the table `sidecars`.

    Attributes:
        content: None if there is no file.
        written: the digest of our last write; None if we never wrote it.
        keys_written: the keys of our captions in that write, the newest last.
        original: the person's text that was there before us.
        overwrote: whether our last write was in the mode `overwrite`.
    """

    path: Path
    content: bytes | None
    written: bytes | None = None
    keys_written: tuple[bytes, ...] = ()
    original: str | None = None
    overwrote: bool = False

    @property
    def keys(self) -> tuple[bytes, ...] | None:
        """The keys of our captions in a file that nobody changed; None for a person's file and if there is none."""
        return self.keys_written if self.content is not None and _digest(self.content) == self.written else None

    @property
    def is_anybodys(self) -> bool:
        """Whether a person wrote some of the content."""
        if self.content is None or not self.content.strip():
            return False
        return self.keys is None or (
            self.original is not None and holds(self.content.decode("utf-8", "replace"), self.original)
        )


class Sidecars(Output):
    """One text file per item, beside its medium or, under the item's name, in `settings.folder`.

    `a.txt` for `a.jpg`; if another item has that, the full name, as in `a.png.txt`, and then numbered names. Videos may
    have a suffix of their own.

    Args:
        others: the suffixes of all the run's text files. With `.txt` and `.short.txt`, `a.short.txt` could be that of
            `a.jpg` or of `a.short.jpg`; the first to claim it has it.
        is_lines: whether a file has all of an item's captions, one a line.
    """

    def __init__(
        self,
        manifest: Manifest,
        suffix: str,
        settings: OutputSettings,
        *,
        others: Collection[str] = (),
        is_lines: bool = False,
    ) -> None:
        self._manifest = manifest
        self._folder = settings.folder
        self._mode = settings.mode
        self._appends = settings.mode in ("append", "prepend")
        self._one_line = settings.one_line
        self._separator = settings.separator if settings.separator is not None else " " if settings.one_line else "\n"
        self._keep_tokens = settings.keep_tokens
        self._last: bytes | None = None
        # The first text file without its usual name, since another medium has that, and its medium.
        self._shared: tuple[str, str] | None = None
        place = b"" if self._folder is None else manifest.place(self._folder)
        self._suffixes: dict[MediaKind, str] = {"image": suffix, "video": settings.video_suffix or suffix}
        self._claims = {
            each: Claims(manifest, os.fsencode(f"sidecar:{each}:") + place) for each in self._suffixes.values()
        }
        self._is_lines = is_lines
        names = (os.fsencode(f"sidecar:{other}:") + place for other in others if other not in self._claims)
        self._other_claims = [Claims(manifest, name) for name in names]
        for (begun,) in manifest.rows("SELECT place FROM sidecars_begun"):
            self._mend(begun)

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`. Raises CaptioningError for an item of a container without `settings.folder`."""
        text = self._text(item)
        return Wants.KEPT if text is None else self._wants(text, key)

    def original(self, item: Item, *, overwritten: bool = False) -> str | None:
        """The person's own text for this item: the text before ours, or a later edit. None if there is none.

        Args:
            overwritten: rather the text before ours where the mode `overwrite` replaced it, whatever came later.
        """
        if self._folder is None and item.path is None:
            return None
        text = self._text(item)
        if text is None:
            return None
        return text.original if overwritten and text.overwrote else self._original(text)

    def write(self, record: Record) -> None:
        """See `Output`."""
        old = self._text(record.item)
        if old is None or self._wants(old, record.key) is not Wants.CAPTION:
            return
        answered = self._answered(old, record) if self._appends else {}
        new = self._compose(old, record, answered)
        try:
            with _errors_of_one_file(record.item):
                if self._folder is not None:
                    with disk_errors(printable(old.path.parent.name)):
                        old.path.parent.mkdir(parents=True, exist_ok=True)
                self._begin(old.path)
                if not self._appends and old.content is not None and old.is_anybodys:
                    with disk_errors(printable(old.path.name)):
                        self._manifest.backups.copy(_target(old.path), link=True)
                with replacing(_target(old.path), lambda: self._record(old, new, record.key, answered)) as file:
                    file.write(new)
        except CaptioningError:
            with contextlib.suppress(OutputError):
                self._mend(self._manifest.place(old.path))
            raise

    def _wants(self, text: _Text, key: bytes | None) -> Wants:
        # A file of ours that a person has emptied stays empty.
        if text.content is None or not (text.content.strip() or text.keys_written):
            return Wants.CAPTION
        if text.keys:
            if key in (text.keys if self._appends else text.keys[-1:]):
                return Wants.CAPTION if self._mode == "overwrite" and self._was_added(text) else Wants.DONE
            # A file that we appended to has a person's text as well.
            return Wants.KEPT if self._mode == "skip" and text.is_anybodys else Wants.CAPTION
        if self._mode == "skip":
            return Wants.KEPT
        if self._mode == "overwrite":
            # This caption has overwritten the person's text once: what came later is what they want.
            return Wants.KEPT if text.overwrote and key in text.keys_written[-1:] else Wants.CAPTION
        # Ours was added once, and a person has changed the file since: what stays of ours is up to them.
        return Wants.KEPT if key in text.keys_written else Wants.CAPTION

    def _was_added(self, text: _Text) -> bool:
        """Whether our last caption was added to a person's text, so that it doesn't stand alone."""
        if not text.is_anybodys:
            return False
        caption = self._manifest.caption(text.keys_written[-1])
        return caption is not None and text.content != _encoded(self._shown(caption).rstrip("\n"))

    def _answered(self, text: _Text, record: Record) -> dict[bytes, Caption]:
        """Our captions in a file that answer the same question, by key: with other settings, or by another model."""
        found = {key: self._manifest.caption(key) for key in text.keys_written if key != record.key}
        return {
            key: caption
            for key, caption in found.items()
            if caption is not None and caption.prompt == record.caption.prompt
        }

    def _compose(self, old: _Text, record: Record, answered: Mapping[bytes, Caption]) -> bytes:
        """The file's new bytes, with a newline at the end.

        Args:
            answered: the captions that this one takes the place of.
        """
        own, content = self._shown(record.caption).rstrip("\n"), old.content
        if not self._appends or content is None or not content.strip():
            return _encoded(own)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise CaptioningError(
                f"The text file of {printable(record.item.name)} isn't UTF-8, so nothing can be added to it. "
                "Save it as UTF-8."
            ) from error
        theirs = text.removeprefix(_MARK)
        added = self._added(theirs.rstrip("\r\n"), own, old.original or "", record.trigger, answered.values())
        return _encoded(added if theirs == text else _MARK + added)

    def _added(self, theirs: str, own: str, original: str, trigger: str, answered: Collection[Caption]) -> str:
        """A text with our caption: in the place of an earlier answer to its question, else before or after the rest.

        Where a person has changed the earlier answer, theirs stays, and only the trigger word is added. Where each line
        is a caption of its own, a trigger word at the front would be in one of them.
        """
        is_first, trigger = self._mode == "prepend", "" if self._is_lines else trigger
        for caption in answered:
            for shown in dict.fromkeys((self._shown(caption).rstrip("\n"), caption.text)):
                replaced = replaced_in(theirs, shown, own, original=original, trigger=trigger, first=is_first)
                if replaced is not None:
                    return replaced
        if answered:
            return with_trigger(theirs, trigger)
        if self._is_lines:
            return "\n".join((own, theirs) if is_first else (theirs, own))
        return add_to(theirs, own, separator=self._separator, trigger=trigger, first=is_first, keep=self._keep_tokens)

    def gone(self) -> set[Path]:
        """See `Output`."""
        return {
            self._manifest.path_of(medium)
            for _, place, medium in self._of_files()
            if self._manifest.is_gone(medium)
            and self._manifest.row("SELECT 1 FROM sidecars WHERE place = ?", place)
            and self._manifest.path_of(place).exists()
        }

    def prune(self, media: Collection[Path]) -> None:
        """See `Output`. A text that a person wrote or changed stays, and so does one that ours was added to."""
        for _, place, medium in self._of_files():
            if self._manifest.path_of(medium) in media:
                self._remove(place)

    def of_other_splits(self, is_old: IsOld, *, removes: bool) -> int:
        """See `Output`."""

        def is_of_other(owner: bytes, medium: bytes) -> bool:
            # A medium's own text file beside it has only the medium's place as its owner.
            name = None if owner == medium else os.fsdecode(owner.partition(b"\0")[0])
            return is_old(name, medium)

        found = self._of_files()
        places = [place for owner, place, medium in found if is_of_other(owner, medium) and self._is_ours(place)]
        for place in places if removes else ():
            self._remove(place)
        return len(places)

    def _of_files(self) -> list[tuple[bytes, bytes, bytes]]:
        """See `Claims.of_files`."""
        return [each for claims in self._claims.values() for each in claims.of_files()]

    def _is_ours(self, place: bytes) -> bool:
        """Whether a text file is there that nobody else wrote in."""
        text = self._known(self._manifest.path_of(place))
        return text is not None and text.content is not None and bool(text.keys_written) and not text.is_anybodys

    def _remove(self, place: bytes) -> None:
        """Removes a text file of ours."""
        path = self._manifest.path_of(place)
        with disk_errors(printable(path.name)), contextlib.suppress(PermissionError):
            text = self._known(path)
            if text is None or not text.keys_written or (text.content is not None and text.is_anybodys):
                return
            # Removed first: after a kill, the row has no file, which counts as no caption.
            path.unlink(missing_ok=True)
            with self._manifest.writing() as connection:
                connection.execute("DELETE FROM sidecars WHERE place = ?", (place,))

    def finish(self) -> None:
        """See `Output`. Warns of media whose names lead to the same text file."""
        if self._shared is not None:
            path, name = self._shared
            _log.warning(
                "The caption of %s is in %s, since another medium has that name but for its suffix. Most trainers read "
                "one text file for both: rename one of them, and others that are like that. For a picture and a clip, "
                "as of a Live Photo, --video-suffix .video.txt gives clips text files of their own.",
                printable(name),
                printable(path),
            )

    def _shown(self, caption: Caption) -> str:
        """A caption as its text file contains it."""
        if self._is_lines:
            return "\n".join(" ".join(text.split()) for text in (caption.text, *caption.others.values()))
        if not self._one_line:
            return caption.text
        return json_text(caption.data) if caption.data is not None else " ".join(caption.text.split())

    def _record(self, old: _Text, new: bytes, key: bytes, answered: Container[bytes]) -> None:
        """Stores the digests of the old and the new file in the manifest, durably, before the rename.

        Args:
            answered: the keys of the captions that this one took the place of.
        """
        before, keys_before = None, ()
        if old.content is not None:
            before = _digest(old.content)
            keys_before = old.keys if old.keys is not None else old.keys_written if self._appends else ()
        keys_written = (*(each for each in keys_before if each not in answered), key) if self._appends else (key,)
        keys = b"".join(keys_before), b"".join(keys_written)
        overwrote = self._mode == "overwrite"
        values = (self._manifest.place(old.path), before, _digest(new), *keys, self._original(old), overwrote)
        statement = "INSERT OR REPLACE INTO sidecars VALUES (?, ?, ?, ?, ?, ?, 1, ?)"
        self._manifest.change(statement, *values, durable=True)

    def _original(self, text: _Text) -> str | None:
        if text.content is None:
            return None
        if text.keys is not None:
            return text.original
        own = text.content.decode("utf-8-sig", "replace")
        for key in text.keys_written:
            caption = self._manifest.caption(key)
            for shown in () if caption is None else (caption.text, self._shown(caption)):
                own = _without(own, shown)
        return own.strip() or None

    def _text(self, item: Item) -> _Text | None:
        """The item's sidecar; None if there is something else than a text file, or it can't be read."""
        return self._known(self._path(item))

    def _known(self, path: Path) -> _Text | None:
        try:
            content = _read(path)
        except OSError:
            return None
        query = "SELECT written, keys_written, original, overwrote FROM sidecars WHERE place = ?"
        row = self._manifest.row(query, self._manifest.place(path))
        if row is None:
            return _Text(path, content)
        written, keys, original, overwrote = row
        split = tuple(keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES))
        return _Text(path, content, written, split, original, bool(overwrote))

    def _path(self, item: Item) -> Path:
        """The path of the item's sidecar, which is claimed permanently."""
        if self._folder is not None:
            owner, parts = owner_of(item, self._manifest), parts_inside(item.file_name)
            directory, name = self._folder.joinpath(*parts[:-1]), parts[-1]
        elif item.path is not None:
            owner, directory, name = self._manifest.place(item.path), item.path.parent, item.path.name
            if item.part is not None and not item.part.is_clip:
                owner, name = owner_of(item, self._manifest), PurePosixPath(item.file_name).name
        else:
            raise CaptioningError(
                f"{printable(item.name)} lies in a container, beside which there is no place for text files. "
                "Name a folder for them, or another kind of output."
            )

        def is_free(place: str) -> bool:
            if any(claims.is_claimed(place) for claims in self._other_claims):
                return False
            path = self._manifest.path_of(os.fsencode(place))
            return not _is_medium(path) and (item.path is None or fold(str(path)) != fold(os.path.abspath(item.path)))  # noqa: PTH100

        suffix = self._suffixes[item.kind]
        stem = PurePosixPath(name).stem
        paths = (directory / candidate for candidate in numbered(stem, name, suffix))
        places = (os.fsdecode(self._manifest.place(path)) for path in paths)
        place = self._claims[suffix].claim(owner, places, is_free=is_free, medium=item.path)
        path = self._manifest.path_of(os.fsencode(place))
        if self._shared is None and path.name != stem + suffix:
            self._shared = path.name, item.name
        return path

    def _begin(self, path: Path) -> None:
        """Stores in the manifest where a temporary file will be. By now, the previous file is certainly renamed."""
        place = self._manifest.place(path)
        with self._manifest.writing(durable=False) as connection:
            connection.execute("UPDATE sidecars SET pending = 0 WHERE place = ?", (self._last,))
            connection.execute("DELETE FROM sidecars_begun WHERE place = ?", (self._last,))
            connection.execute("INSERT OR REPLACE INTO sidecars_begun VALUES (?)", (place,))
        self._last = place

    def _mend(self, place: bytes) -> None:
        """Undoes the record of a file that was not renamed, and removes its temporary file."""
        temporary = temporary_for(_target(self._manifest.path_of(place)))
        if temporary.exists():
            with self._manifest.writing() as connection:
                connection.execute(
                    "DELETE FROM sidecars WHERE place = ? AND pending AND (before IS NULL OR keys_before = x'')",
                    (place,),
                )
                connection.execute(
                    "UPDATE sidecars SET written = before, keys_written = keys_before, pending = 0 "
                    "WHERE place = ? AND pending",
                    (place,),
                )
            with contextlib.suppress(OSError):
                temporary.unlink()
        with self._manifest.writing(durable=False) as connection:
            connection.execute("UPDATE sidecars SET pending = 0 WHERE place = ?", (place,))
            connection.execute("DELETE FROM sidecars_begun WHERE place = ?", (place,))


@contextlib.contextmanager
def _errors_of_one_file(item: Item) -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        if error.errno not in _OF_ONE_FILE:
            raise
        raise CaptioningError(f"The caption of {printable(item.name)} can't be written. {error}") from error


def _without(text: str, caption: str) -> str:
    """A file's text without our caption, whose trigger word may stand apart from it at the front."""
    if not caption or caption in text:
        return text.replace(caption, "") if caption else text
    for match in re.finditer(", ", caption):
        trigger, rest = caption[: match.end()], caption[match.end() :]
        if rest and text.startswith(trigger) and rest in text:
            return text.removeprefix(trigger).replace(rest, "")
    return text


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _read(path: Path) -> bytes | None:
    """A sidecar's bytes; None if there is nothing. Never waits for a pipe.

    Raises:
        OSError: it isn't a text file but a folder, a pipe or a broken link, or it can't be read.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.read_bytes()
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            return None  # writing says why
        if error.errno == errno.ENOENT and not path.is_symlink():
            return None
        raise


def _is_medium(path: Path) -> bool:
    """Whether `path` is a picture or a video, whatever its name. A text has no zero bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return b"\x00" in head and sniff(head) is not None


def _target(path: Path) -> Path:
    """The file to replace: a link's target, or the path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
