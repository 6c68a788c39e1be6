"""Turns videos into their parts: items of a range each, or of a clip that is cut out.

Where a video was split is in the manifest under its bytes and the kind of split, so a later run finds the same parts
without decoding. A clip's name is claimed for good, and its file is complete as soon as it has that name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace
from pathlib import Path

from qwen35mm.captioning.items import Failed, Item, Medium, Part, Unreadable
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.manifest.files import disk_errors, is_gone, replacing
from qwen35mm.captioning.manifest.manifest import is_settled
from qwen35mm.captioning.media.splits import Split
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.outputs.file_names import Claims, owner_of, portable_names
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.names import absolute

_log = logging.getLogger(__name__)

# Clips of one video that are cut out at the same time.
_CLIPS_AT_ONCE = 4


class Splitter:
    """Splits the videos of a run. Every method may raise OutputError.

    Args:
        captions_wholes: whether whole videos get a caption, too.
        clips: the folder in which each part becomes a file; None for parts without files.
        without: absolute paths of clips that are left out.
    """

    def __init__(
        self,
        split: Split,
        ledger: Ledger,
        workers: MediaWorkers,
        clips: Path | None = None,
        *,
        without: Collection[Path] = (),
        captions_wholes: bool = False,
    ) -> None:
        self._split = split
        self._do, self._manifest = ledger.do, ledger.manifest
        self._workers = workers
        self._clips = clips
        self._without = without
        # By the name of a split video, how many parts it has; 0 where it stays whole.
        self._num_parts: dict[str, int] = {}
        # The files of videos that are in parts and get no caption as a whole, by their names and places.
        self._captions_wholes = captions_wholes
        self._split_names: dict[str, bytes | None] = {}
        self._split_places: set[bytes] = set()
        self._claims = None if clips is None else Claims(self._manifest, b"clips:" + self._manifest.place(clips))

    async def of(self, item: Item) -> AsyncGenerator[Item | Unreadable, None]:
        """The parts of an item. An image stays whole, and so does a video of a single part without a folder of clips.

        What can't be split or cut out is Unreadable.
        """
        if item.kind != "video" or item.part is not None:
            yield item
            return
        found = await self.find(item)
        if isinstance(found, Failed):
            yield Unreadable(item.name, found.kind, found.message, item.path)
        elif self._clips is None:
            parts = found[1]
            self._remember(item, len(parts) if len(parts) > 1 else 0)
            if len(parts) == 1:
                yield item
                return
            for number, (start_s, end_s) in enumerate(parts, 1):
                yield _part_of(item, Part(number, start_s, end_s))
        else:
            self._remember(item, len(found[1]))
            async for clip in self._cut(item, *found):
                yield clip

    def _remember(self, item: Item, num_parts: int) -> None:
        self._num_parts[item.name] = num_parts
        if num_parts and not self._captions_wholes:
            place = None if item.path is None else self._manifest.place(item.path)
            self._split_names[item.name] = place
            if place is not None:
                self._split_places.add(place)

    def is_old(self, name: str | None, place: bytes | None) -> bool:
        """Whether an item is of no use with this split: a part that its video has no more, or a whole that is in parts.

        Args:
            name: the item's; None if only its file is known.
            place: of its file, see `Manifest.place`; None if it lies in a container.
        """
        if name is None:
            return place in self._split_places
        if name in self._split_names:
            return self._split_names[name] == place
        video, _, number = name.rpartition("/")
        return number.isdecimal() and int(number) > self._num_parts.get(video, int(number))

    def old_clips(self, *, removes: bool) -> set[Path]:
        """The absolute paths of clips of parts that another split made, unless a person has changed them.

        Args:
            removes: removes them as well. Then clips that are gone already count too: a kill may have left their
                captions.
        """
        if self._claims is None or self._clips is None:
            return set()
        found: set[Path] = set()
        for owner, name, _ in self._claims.of_files():
            if not self.is_old(os.fsdecode(owner.partition(b"\0")[0]), None):
                continue
            path = absolute(self._clips / os.fsdecode(name))
            with disk_errors(path.name):
                if removes and is_gone(path):
                    found.add(path)
                elif path.is_file() and Medium(path.name, path).digest() in self._claims.put(owner):
                    found.add(path)
                    if removes:
                        path.unlink()
        return found

    async def digest(self, item: Item) -> bytes | None:
        """The digest of a video that was split; None if it can't be read any more."""
        found = await self.find(item)
        return None if isinstance(found, Failed) else found[0]

    async def find(self, item: Item) -> tuple[bytes, list[tuple[float, float]]] | Failed:
        """A video's digest, and start and end of each part in seconds."""
        text = self._split.text if self._clips is None else f"{self._split.text} joined"
        status = known = None
        if isinstance(item.source, Path):
            try:
                status = item.source.stat()
            except OSError as error:
                return Failed("unreadable", f"The file can't be read: {error.strerror}.")
            known = await self._do(self._manifest.digest, item.source, status)
            if known is not None and (parts := await self._do(self._manifest.parts, known, text)) is not None:
                return known, parts
        found = await self._workers.find_parts(
            item, self._split, at_keys=self._clips is not None, with_digest=known is None
        )
        if isinstance(found, Failed):
            return found
        content, parts = known or found.digest, found.times
        if found.num_joined:
            _log.warning(
                "%s: %d of its scenes have no key frame, from which a clip could begin. Each is in one clip with the "
                "scene before it.",
                printable(item.name),
                found.num_joined,
            )
        assert content is not None, "it was asked for"
        if known is None and status is not None and is_settled(status):
            assert isinstance(item.source, Path)
            await self._do(self._manifest.remember_digest, item.source, status, content)
        await self._do(self._manifest.remember_parts, content, text, parts)
        return content, parts

    async def _cut(
        self, item: Item, content: bytes, parts: list[tuple[float, float]]
    ) -> AsyncGenerator[Item | Unreadable, None]:
        """Cuts the parts out, a few at the same time; those that are there already are kept."""
        text = f"{self._split.text} joined cut"
        cut = await self._do(self._manifest.parts, content, text) or []
        numbered = list(enumerate(parts, 1))
        real: list[tuple[float, float]] = []
        for first in range(0, len(numbered), _CLIPS_AT_ONCE):
            some = numbered[first : first + _CLIPS_AT_ONCE]
            known = [cut[number - 1] if number <= len(cut) else None for number, _ in some]
            made = await asyncio.gather(
                *(self._clip(item, number, times, there) for (number, times), there in zip(some, known, strict=True))
            )
            for clip, times in made:
                real.append(times)
                if clip is not None:
                    yield clip
        if real != cut:
            await self._do(self._manifest.remember_parts, content, text, real)

    async def _clip(
        self, item: Item, number: int, times: tuple[float, float], known: tuple[float, float] | None
    ) -> tuple[Item | Unreadable | None, tuple[float, float]]:
        """The clip of a part, and its start and end; no clip if it is left out.

        Args:
            known: start and end of the clip that was cut out before.
        """
        asked = _part_of(item, Part(number, *times))
        path = await self._do(self._claim, asked)
        if absolute(path) in self._without:
            return None, known or times
        if known is None or not path.is_file():
            made = await self._workers.cut_out(item, Part(number, *times))
            if isinstance(made, Failed):
                return Unreadable(asked.name, made.kind, made.message, item.path), times
            *between, data = made
            known = (between[0], between[1])
            await self._do(self._write, asked, path, data)
        clip = replace(asked, source=path, path=path, part=Part(number, *known, is_clip=True))
        return clip, known

    def _claim(self, part: Item) -> Path:
        assert self._clips is not None
        assert self._claims is not None
        folder = self._clips
        name = self._claims.claim(
            owner_of(part, self._manifest),
            portable_names(part.file_name, part.suffix()),
            is_free=lambda name: not os.path.lexists(folder / name),
            medium=part.path,
        )
        return folder / name

    def _write(self, part: Item, path: Path, data: bytes) -> None:
        """Writes a clip, unless it is there, or a person changed the one that is there."""
        assert self._claims is not None
        owner, digest = owner_of(part, self._manifest), hashlib.sha256(data).digest()
        put = self._claims.put(owner)
        with disk_errors(path.name):
            found = Medium(path.name, path).digest() if path.is_file() else None
            path.parent.mkdir(parents=True, exist_ok=True)
        if found is not None and put and found not in (*put, digest):
            return
        self._claims.remember_put(owner, *put[-1:], digest)
        if found == digest:
            return
        with replacing(path) as file:
            file.write(data)


def _part_of(item: Item, part: Part) -> Item:
    return replace(item, name=f"{item.name}/{part.number:04}", part=part)
