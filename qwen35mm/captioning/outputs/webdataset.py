"""WebDataset: tar shards with `KEY.<the medium's suffix>`, `KEY.txt` and `KEY.json`, in this order."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qwen35mm.captioning.manifest.files import json_text, pieces
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.file_names import Claims, owner_of, portable_names
from qwen35mm.captioning.outputs.shards import Shards, ShardWriter
from qwen35mm.captioning.records import Record, still_there

_MEMBERS = 3
# The longest suffix of a member, so that a key fits a disk's names with every one of them.
_ROOM_FOR_SUFFIX = ".webm.json"


class TarShards(Shards):
    """The tar files in `folder`; errors are those of `Shards`."""

    suffix = ".tar"

    def _writer(self, file: BinaryIO, form: Any) -> ShardWriter:
        claims = Claims(self._manifest, b"webdataset:" + self._manifest.place(self._folder))
        return _TarWriter(file, claims, self._manifest)


class _TarWriter(ShardWriter):
    def __init__(self, file: BinaryIO, claims: Claims, manifest: Manifest) -> None:
        self._file = file
        self._claims = claims
        self._manifest = manifest

    def add(self, record: Record) -> None:
        key = self._key(record)
        with still_there(record.item):
            suffix, num_bytes = record.item.suffix(), record.item.num_bytes
        text = record.caption.text.encode("utf-8", "backslashreplace")
        values = json_text(record.to_dict()).encode()
        begin = self._file.tell()
        try:
            self._member(key + suffix, num_bytes, record.pieces())
            self._member(f"{key}.txt", len(text), iter([text]))
            self._member(f"{key}.json", len(values), iter([values]))
        except BaseException:
            self._file.seek(begin)
            self._file.truncate()
            raise

    def copy(self, path: Path, rows: Sequence[int]) -> None:
        wanted = set(rows)
        with path.open("rb") as file:
            for row, (begin, end) in enumerate(_samples(file)):
                if row in wanted:
                    file.seek(begin)
                    for piece in pieces(file, end - begin):
                        self._file.write(piece)

    def end(self) -> None:
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _member(self, name: str, num_bytes: int, content: Iterator[bytes]) -> None:
        info = tarfile.TarInfo(name)
        info.size = num_bytes
        self._file.write(info.tobuf(tarfile.PAX_FORMAT))
        for piece in content:
            self._file.write(piece)
        self._file.write(bytes(-num_bytes % tarfile.BLOCKSIZE))

    def _key(self, record: Record) -> str:
        """The sample's key: its name, with no dot in the last part, where readers end the key."""
        names = portable_names(record.item.name, _ROOM_FOR_SUFFIX, dots=False)
        keys = (name.removesuffix(_ROOM_FOR_SUFFIX) for name in names)
        return self._claims.claim(owner_of(record.item, self._manifest), keys, is_free=lambda _: True)


def _samples(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Where each sample begins and ends in a shard that we wrote."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [(member.offset, member.offset_data + member.size) for member in tar]
    for at in range(0, len(members), _MEMBERS):
        begin, end = members[at][0], members[at + _MEMBERS - 1][1]
        yield begin, end + -end % tarfile.BLOCKSIZE
