"""Lists for a person: `failures.jsonl`, items without a caption, and `problems.jsonl`, captions with flags.

The manifest stores both, so a run rewrites each file at its begin and end. In between it appends a line for each new
entry; an item may be listed twice until the end. `skipped.jsonl` has what filters left out; each run begins it anew.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Failed, Item, Unreadable
from qwen35mm.captioning.manifest.files import disk_errors, json_text, replacing
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable


class Listings:
    """The files of one run. Every method may raise OutputError."""

    def __init__(
        self, manifest: Manifest, failures: Path, problems: Path, skipped: Path, *, begins: bool = True
    ) -> None:
        self._manifest = manifest
        self._failures = failures
        self._problems = problems
        self._skipped = skipped
        self._begins = begins

    def begin(self) -> None:
        """Writes both files, and forgets what an earlier run's filters left out."""
        self.write()
        if self._begins:
            _rewrite(self._skipped, iter(()))

    def skip(self, item: Item, reason: str) -> None:
        """Lists an item that a filter leaves out, and forgets its failure."""
        self._manifest.forget_failure(item.name)
        _append(self._skipped, _row(*_of(item), reason=printable(reason)))

    def write(self) -> None:
        """Writes both files from the manifest; an empty one is removed."""
        _rewrite(self._failures, (_row(*_of(each), **_reason(each)) for each in self._manifest.failures()))
        _rewrite(self._problems, (_row(name, path, flags=flags) for name, path, flags in self._all_problems()))

    def fail(self, item: Item | Unreadable, key: bytes | None, failed: Failed) -> None:
        """Stores why an item has no caption; see `Manifest.fail`."""
        self._manifest.fail(item, key, failed)
        _append(self._failures, _row(*_of(item), **_reason(failed)))

    def settle(self, item: Item, flags: tuple[str, ...]) -> None:
        """Stores the flags of an item's caption and forgets its failure."""
        name, path = os.fsencode(item.name), None if item.path is None else os.fsencode(item.path)
        with self._manifest.writing(durable=False) as connection:
            connection.execute("DELETE FROM failures WHERE name = ?", (name,))
            connection.execute("DELETE FROM problems WHERE name = ?", (name,))
            if flags:
                statement = "INSERT INTO problems (name, path, flags) VALUES (?, ?, ?)"
                connection.execute(statement, (name, path, json.dumps(flags)))
        if flags:
            _append(self._problems, _row(*_of(item), flags=flags))

    def forget(self, name: str) -> None:
        """Forgets the failure and flags of an item that is gone, or whose caption another person wrote."""
        self._manifest.forget_failure(name)
        self._manifest.change("DELETE FROM problems WHERE name = ?", os.fsencode(name))

    def forget_file(self, path: Path) -> None:
        """Forgets the failures and flags of a file's items: the file was moved away."""
        with self._manifest.writing(durable=False) as connection:
            for table in ("failures", "problems"):
                connection.execute(f"DELETE FROM {table} WHERE path = ?", (os.fsencode(path),))

    def listed(self) -> Iterator[tuple[str, Path | None]]:
        """Names and paths of all items in either file."""
        yield from map(_of, self._manifest.failures())
        for name, path, _ in self._all_problems():
            yield name, path

    def failed(self) -> Counter[str]:
        """How many items have no caption, by failure kind."""
        return Counter(dict(self._manifest.rows("SELECT kind, count(*) FROM failures GROUP BY kind")))

    def flagged(self) -> Counter[str]:
        """How many captions have each kind of flag."""
        return Counter(kind for _, _, flags in self._all_problems() for kind in {flag_kind(flag) for flag in flags})

    def _all_problems(self) -> Iterator[tuple[str, Path | None, list[str]]]:
        query = "SELECT sequence, name, path, flags FROM problems WHERE sequence > ? ORDER BY sequence LIMIT ?"
        for _, name, path, flags in self._manifest.many_rows(query):
            yield os.fsdecode(name), None if path is None else Path(os.fsdecode(path)), json.loads(flags)


def flag_kind(flag: str) -> str:
    """A flag's kind, without its details: `missing` of `missing: red`."""
    return flag.partition(":")[0]


def by_count(numbers: Mapping[str, int]) -> str:
    """Counts with their kinds, the largest first, such as "3 damaged, 1 refused"."""
    ordered = sorted(numbers.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{number:,} {kind}" for kind, number in ordered)


def _of(item: Item | Unreadable) -> tuple[str, Path | None]:
    return item.name, item.path


def _reason(failed: Failed | Unreadable) -> dict[str, str]:
    return {"kind": failed.kind, "message": printable(failed.message)}


def _row(name: str, path: Path | None, **values: Any) -> bytes:
    shown = None if path is None else printable(str(path))
    return json_text({"name": printable(name), "path": shown, **values}).encode() + b"\n"


def _append(path: Path, line: bytes) -> None:
    # A line that is torn or lost is written again from the manifest.
    with disk_errors(path.name), path.open("ab", buffering=0) as file:
        file.write(line)


def _rewrite(path: Path, lines: Iterator[bytes]) -> None:
    first = next(lines, None)
    if first is None:
        with disk_errors(path.name):
            path.unlink(missing_ok=True)
        return
    with replacing(path) as file:
        file.write(first)
        file.writelines(lines)
