"""The journal of runs that changed many captions, so that a run can be taken back.

One file a run, in the folder `edits` of the captions' state folder. Each change is on the disk here, with the text
before and the digest of the text after, before the caption itself is changed. So after a kill every caption is either
as before or as the journal says, and both can be told by the digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen35mm.captioning.manifest.files import disk_errors, sync, sync_folder
from qwen35mm.captioning.records import printable
from qwen35mm.errors import OutputError

EDITS_FOLDER = "edits"
_FORM = 1
_SUFFIX = ".jsonl"
# A run that was taken back is kept under this name: some of its texts may be nowhere else.
_UNDONE = ".undone"


@dataclass(frozen=True)
class Step:
    """One change of a run.

    Attributes:
        at: the caption's place, as JSON.
        before: the text before, byte for byte; None if there was none.
        after: SHA-256 of the text after, in hexadecimal digits; empty if only `accepted` changes.
        accepted: the accepted digest before and after, if that changes.
    """

    at: Any
    before: str | None = None
    after: str = ""
    accepted: tuple[str | None, str | None] | None = None


@dataclass(frozen=True)
class Run:
    """A run in the journal.

    Attributes:
        made: when it began, in seconds since 1970.
        label: what it did, in a person's words.
    """

    path: Path
    made: float
    label: str

    @property
    def name(self) -> str:
        return self.path.name

    def steps(self) -> Iterator[Step]:
        """Its changes, in order. A line that a kill tore changed nothing. Raises OutputError."""
        with disk_errors(self.path.name), self.path.open("rb") as file:
            next(file)
            for line in file:
                if line.endswith(b"\n"):
                    values = json.loads(line)
                    accepted = values.pop("accepted")
                    yield Step(**values, accepted=None if accepted is None else tuple(accepted))

    def add(self, steps: Sequence[Step]) -> None:
        """Stores changes that follow, durably. Raises OutputError."""
        with disk_errors(self.path.name), self.path.open("ab") as file:
            end = file.tell()
            try:
                file.write(b"".join(json.dumps(asdict(step)).encode() + b"\n" for step in steps))
                sync(file)
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def mark_undone(self) -> None:
        """Marks the run as taken back. Raises OutputError."""
        with disk_errors(self.path.name):
            self.path.rename(self.path.with_suffix(_UNDONE))
            sync_folder(self.path.parent)


class Journal:
    """The runs over one folder's or file's captions.

    Args:
        state: the captions' state folder.
        captions: identifies the captions there; other captions may share the folder.
    """

    def __init__(self, state: Path, captions: str) -> None:
        self._folder = state / EDITS_FOLDER
        self._captions = printable(captions)

    def begin(self, label: str, made: float | None = None) -> Run:
        """A new run without changes. Raises OutputError."""
        made = time.time() if made is None else made
        with disk_errors(EDITS_FOLDER):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._free(time.strftime("%Y%m%d-%H%M%S", time.localtime(made)))
            head = {"form": _FORM, "captions": self._captions, "made": made, "label": printable(label)}
            with path.open("xb") as file:
                file.write(json.dumps(head).encode() + b"\n")
                sync(file)
            sync_folder(self._folder)
        return Run(path, made, printable(label))

    def runs(self) -> list[Run]:
        """The runs that weren't taken back, the latest first. Raises OutputError."""
        found: list[Run] = []
        with disk_errors(EDITS_FOLDER):
            for path in self._folder.glob(f"*{_SUFFIX}"):
                with path.open("rb") as file:
                    head = _head(file.readline())
                if head is not None and head["captions"] == self._captions:
                    found.append(Run(path, head["made"], head["label"]))
        return sorted(found, key=lambda run: (run.made, run.path.name), reverse=True)

    def _free(self, name: str) -> Path:
        number = 1
        while True:
            path = self._folder / f"{name}-{number}{_SUFFIX}"
            if not os.path.lexists(path) and not os.path.lexists(path.with_suffix(_UNDONE)):
                return path
            number += 1


def _head(line: bytes) -> dict[str, Any] | None:
    """A file's first line; None if a kill tore it. Raises OutputError: a later version wrote it."""
    try:
        head = json.loads(line)
    except ValueError:
        return None
    if not isinstance(head, dict) or not {"form", "captions", "made", "label"} <= head.keys():
        return None
    if head["form"] != _FORM:
        raise OutputError("A later version of qwen35mm wrote the journal of edits: take them back with that version.")
    return head
