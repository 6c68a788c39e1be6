"""WebDataset tars: their media by offset, without a copy, with the texts of the same key."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm.captioning.items import FileSlice, Unreadable
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, SourceError
from qwen35mm.outside_json import load_json

# A longer text isn't a caption, and isn't read into memory.
MAX_TEXT_BYTES = 2**20
_MAGIC_AT, _MAGIC = 257, b"ustar"


def is_tar(head: bytes) -> bool:
    """Whether a file that starts with `head` (512 bytes) is a tar that isn't compressed."""
    return head[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC


def tar_members(path: Path) -> Iterator[Candidate | Unreadable]:
    """The members of a tar that may be media, with their names, in order.

    Neighbours with the same key (the name up to the first dot of its last part) are a sample. Its `.json` is the
    metadata of its media (under `json` if it isn't an object), and its `.txt` is in their metadata as `txt`. Links,
    folders and names that begin with a dot are skipped.

    Raises:
        SourceError: it isn't a tar, or is damaged. The complete members come first.
        OSError: it can't be read.
    """
    key, media, metadata = "", list[Candidate](), dict[str, Any]()
    num_bytes = path.stat().st_size
    try:
        # "r:" allows no compression.
        with tarfile.open(path, "r:", errors="surrogateescape") as tar:
            for member in _members(tar, path):
                if member.size < 0 or member.offset_data + member.size > num_bytes:
                    raise tarfile.TarError("a member beyond the file's end")
                name = clean(member.name)
                if not member.isreg() or not name or PurePosixPath(name).name.startswith("."):
                    continue
                own_key, suffix = _split(name)
                if own_key != key:
                    yield from media
                    key, media, metadata = own_key, [], {}
                if suffix in ("json", "txt"):
                    metadata.update(_beside(tar, member, suffix))
                elif member.issparse():
                    last = printable(PurePosixPath(name).name)
                    message = f"'{last}' is stored with holes, which is not read here. Make the tar without them."
                    yield Unreadable(name, "unsupported", message)
                else:
                    # All media of a sample share one dict, which is filled until the sample ends.
                    media.append(Candidate(name, FileSlice(path, member.offset_data, member.size), metadata.copy))
    except tarfile.TarError:
        yield from media
        message = f"'{printable(path.name)}' is no tar, or is damaged or cut off. Check that it is there completely."
        raise SourceError("damaged", message) from None
    yield from media


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """The members in order. Raises TarError if the tar is damaged."""
    try:
        while (member := tar.next()) is not None:
            # The library keeps every member: gigabytes of memory for a large tar.
            tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
            yield member
    except (ValueError, IndexError):  # a damaged map of a sparse file
        raise tarfile.TarError from None
    # The library ends silently at a damaged or truncated header. A complete tar ends with a block of zeros.
    with path.open("rb") as file:
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.TarError("no block of zeros at the end")


def _beside(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> dict[str, Any]:
    file = tar.extractfile(member) if member.size <= MAX_TEXT_BYTES else None
    if file is None:
        return {}
    return text_beside(file.read(), suffix)


def text_beside(data: bytes, suffix: str) -> dict[str, Any]:
    """A medium's `.txt` or `.json` as its metadata; empty for damaged JSON."""
    text = data.decode("utf-8", "replace")
    if suffix == "txt":
        return {"txt": text.removesuffix("\n")}
    try:
        value = load_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {"json": value}


def _split(name: str) -> tuple[str, str]:
    """WebDataset's key and suffix: `a/b.seg.png` is `a/b` and `seg.png`."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return folder + slash + stem, suffix.lower()


def clean(name: str) -> str:
    """A member's name below the tar: without a root, `.` and `..`."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))
