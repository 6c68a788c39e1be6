"""WebDataset: tar shards with `KEY.<the medium's suffix>`, `KEY.txt` and `KEY.json`, in this order."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from qwen35mm.captioning.manifest.files import json_text, pieces
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import OutputSettings
from qwen35mm.captioning.outputs.file_names import Claims, owner_of, portable_names
from qwen35mm.captioning.outputs.shards import Shards
from qwen35mm.captioning.records import Record, still_there

_MEMBERS = 3
# The longest suffix of a member: with it, a key is still a valid file name.
_ROOM_FOR_SUFFIX = ".webm.json"


class TarShards(Shards):
    """The tar files in `folder`; errors are those of `Shards`."""

    suffix = ".tar"

    def __init__(self, manifest: Manifest, folder: Path, settings: OutputSettings) -> None:
        self._claims = Claims(manifest, b"webdataset:" + manifest.place(folder))
        super().__init__(manifest, folder, settings)

    def _add(self, file: BinaryIO, record: Record) -> None:
        key = self._key(record)
        with still_there(record.item):
            suffix, num_bytes = record.item.suffix(), record.item.num_bytes
        text = record.caption.text.encode("utf-8", "backslashreplace")
        values = json_text(record.to_dict()).encode()
        begin = file.tell()
        try:
            _write_member(file, key + suffix, num_bytes, record.pieces())
            _write_member(file, f"{key}.txt", len(text), [text])
            _write_member(file, f"{key}.json", len(values), [values])
        except BaseException:
            file.seek(begin)
            file.truncate()
            raise

    def _copy(self, file: BinaryIO, path: Path, rows: Sequence[int]) -> None:
        wanted = set(rows)
        with path.open("rb") as old:
            for row, (begin, end) in enumerate(_samples(old)):
                if row in wanted:
                    old.seek(begin)
                    for piece in pieces(old, end - begin):
                        file.write(piece)

    def _end(self, file: BinaryIO) -> None:
        file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _key(self, record: Record) -> str:
        """The sample's key: its name without dots in the last part, since readers end the key at the first dot."""
        names = portable_names(record.item.file_name, _ROOM_FOR_SUFFIX, dots=False)
        keys = (name.removesuffix(_ROOM_FOR_SUFFIX) for name in names)
        return self._claims.claim(owner_of(record.item, self._manifest), keys, is_free=lambda _: True)


def _samples(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The begin and end of each sample in a shard that we wrote, in bytes."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [(member.offset, member.offset_data + member.size) for member in tar]
    for at in range(0, len(members), _MEMBERS):
        begin, end = members[at][0], members[at + _MEMBERS - 1][1]
        yield begin, end + -end % tarfile.BLOCKSIZE


def _write_member(file: BinaryIO, name: str, num_bytes: int, content: Iterable[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    file.write(info.tobuf(tarfile.PAX_FORMAT))
    for piece in content:
        file.write(piece)
    file.write(bytes(-num_bytes % tarfile.BLOCKSIZE))
