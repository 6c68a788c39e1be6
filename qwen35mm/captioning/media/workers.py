"""Reads media ahead of the model in child processes; see `qwen35mm.decoding`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from qwen35mm.captioning.items import Failed, Item, Medium, Part, failure_kind
from qwen35mm.captioning.manifest.manifest import file_state, is_settled
from qwen35mm.captioning.media.answers import (
    CHANGED,
    Inspected,
    MediumForm,
    Prepared,
    inspected_answer,
    item_answer,
    read_inspected,
    read_item,
)
from qwen35mm.captioning.media.clips import cut_out, read_clip
from qwen35mm.captioning.media.measures import measures
from qwen35mm.captioning.media.similar import media_similarity
from qwen35mm.captioning.media.splits import Split, joined_at_keys, split_frames, times_of
from qwen35mm.captioning.records import printable
from qwen35mm.decoding import Answer, Decoders, DecodingProcessor
from qwen35mm.decoding.answers import Data, Reads, read_list, require
from qwen35mm.decoding.decoders import timeout_for
from qwen35mm.errors import EngineError
from qwen35mm_preprocess import MediaError, MediaProcessor, VideoClip
from qwen35mm_preprocess.shots import find_cuts
from qwen35mm_preprocess.video_probe import probe_video

T = TypeVar("T")

# A run waits longer for a medium than a person does.
_TIMEOUT_S = 120.0
# Finding the cuts decodes every frame.
_SPLIT_S = 3600.0
# The kind of failure of a part that no clip can be made of.
_NO_CLIP = "no clip"
# The decoder reads a larger file from the disk itself; then it is read once more for its digest.
_WHOLE_BYTES = 64 << 20


def inspect(item: Item, processor: MediaProcessor, *, with_digest: bool, with_plan: bool) -> Inspected:
    """Digest and plan of an item, without decoding it.

    Args:
        with_digest: whether to hash its bytes.
        with_plan: whether to plan it: its size, duration and tokens.
    """
    source = item.read(_WHOLE_BYTES if with_digest and with_plan else 0)
    digest = None
    if with_digest:
        digest = hashlib.sha256(source).digest() if isinstance(source, bytes) else item.digest()
    return Inspected(digest, processor.plan(source, item.kind, _clip(item)) if with_plan else None)


def prepare(
    item: Item,
    processor: MediaProcessor,
    *,
    digest: bytes,
    form: MediumForm,
    with_similarity: bool,
    with_measures: bool = False,
) -> Prepared | Failed:
    """An item as a backend takes it.

    Args:
        digest: SHA-256 of the bytes in the caption's key.
        with_similarity: whether to compute its perceptual hash.
        with_measures: whether to measure it even if the form doesn't need its pixels.
    """
    # Of a part, only its frames are read.
    source = item.read(_WHOLE_BYTES if _clip(item) is None else 0)
    if isinstance(source, bytes) and hashlib.sha256(source).digest() != digest:
        return CHANGED
    medium = similarity = measured = None
    if form == "pixels" or with_similarity or with_measures:
        medium = processor.prepare(source, kind=item.kind, clip=_clip(item))
        processing = processor.image_processing if item.kind == "image" else processor.video_processing
        similarity = media_similarity(medium, processing) if with_similarity else None
        measured = measures(medium, processing)
    if form != "pixels":
        # Imported only here: it takes a tenth of a second.
        from qwen35mm.backends.remote.media import encode_medium
        from qwen35mm.contract import Image, Video

        part = Image(source) if item.kind == "image" else Video(source, clip=_clip(item))
        medium = encode_medium(part, processor, form)
    assert medium is not None
    is_same = isinstance(source, bytes) or _digest(item) == digest
    return Prepared(medium, similarity, measured) if is_same else CHANGED


@dataclass(frozen=True)
class FoundParts:
    """Where a video was split.

    Attributes:
        digest: of its bytes; None if it wasn't asked for.
        times: start and end of each part in seconds.
        num_joined: scenes without a key frame, which are joined with the one before for clips.
    """

    digest: bytes | None
    times: list[tuple[float, float]]
    num_joined: int = 0


def find_parts(item: Item, processor: MediaProcessor, *, split: Split, at_keys: bool, with_digest: bool) -> FoundParts:
    """Splits a video.

    Args:
        at_keys: whether each part must have a key frame, from which a clip can begin; see also `split_frames`.
    """
    source = item.read()
    info = probe_video(source, processor.limits)
    found = split_frames(split, info, lambda: find_cuts(source, info, processor.limits), at_keys=at_keys)
    parts = joined_at_keys(found, info) if at_keys else found
    return FoundParts(_digest(item) if with_digest else None, times_of(parts, info), len(found) - len(parts))


def _clip(item: Item) -> VideoClip | None:
    return None if item.part is None else item.part.clip


def _digest(item: Item) -> bytes:
    """See `Medium.digest`; a file that is read in parts isn't read again for each of them."""
    if item.part is None or not isinstance(item.source, Path):
        return item.digest()
    status = item.source.stat()
    return _digest_of(item.source, *file_state(status)) if is_settled(status) else item.digest()


@functools.lru_cache(maxsize=1)
def _digest_of(path: Path, *_: int) -> bytes:
    return Medium(path.name, path).digest()


def _find_parts(item: Item, processor: MediaProcessor, how: dict[str, Any]) -> Answer:
    found = find_parts(item, processor, **how)
    return Answer([None if found.digest is None else found.digest.hex(), found.times, found.num_joined])


def _read_parts(values: Any, data: Data, item: Item) -> FoundParts:
    digest, found, num_joined = values
    require(digest is None or (isinstance(digest, str) and len(digest) == 64), "no digest")
    parts = [(start_s, end_s) for start_s, end_s in read_list(found)]
    require(len(parts) > 0 and all(type(each) is float and each >= 0 for part in parts for each in part), "no parts")
    require(all(start_s <= end_s for start_s, end_s in parts), "no parts")
    require(type(num_joined) is int and num_joined >= 0, "no parts")
    return FoundParts(None if digest is None else bytes.fromhex(digest), parts, num_joined)


def _cut_out(item: Item, processor: MediaProcessor, part: Part) -> Answer:
    return cut_out(item, part, processor.limits)


def _inspect(item: Item, processor: MediaProcessor, how: dict[str, Any]) -> Answer:
    return inspected_answer(inspect(item, processor, **how))


def _prepare(item: Item, processor: MediaProcessor, how: dict[str, Any]) -> Answer:
    return item_answer(prepare(item, processor, **how))


class MediaWorkers:
    """Reads media in child processes, first come, first served.

    If a process dies or exceeds its time, its file is `Failed`. The process is replaced, and other files aren't
    affected.

    Args:
        processor: plans and decodes media.
        num_workers: processes.
        timeout_s: the most seconds per medium; None depends on its kind and size.
    """

    def __init__(self, processor: MediaProcessor, num_workers: int, *, timeout_s: float | None = None) -> None:
        self._processor = processor.direct if isinstance(processor, DecodingProcessor) else processor
        self._decoders = Decoders(processor.limits, timeout_s=timeout_s, most_idle=num_workers)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="qwen35mm-media")

    async def inspect(self, item: Item, *, with_digest: bool, with_plan: bool) -> Inspected | Failed:
        """See `inspect`; `Failed` if the item can't be read."""
        how = {"with_digest": with_digest, "with_plan": with_plan}
        return await self._do(self._look, item, how)

    async def prepare(
        self,
        item: Item,
        digest: bytes,
        form: MediumForm,
        *,
        with_similarity: bool = False,
        with_measures: bool = False,
    ) -> Prepared | Failed:
        """See `prepare`; `Failed` if the item can't be read."""
        how = {
            "digest": digest,
            "form": form,
            "with_similarity": with_similarity,
            "with_measures": with_measures,
        }
        read = partial(read_item, item=item, processor=self._processor, form=form)
        return await self._do(self._call, _prepare, item, how, read)

    async def find_parts(self, item: Item, split: Split, *, at_keys: bool, with_digest: bool) -> FoundParts | Failed:
        """See `find_parts`; `Failed` if the video can't be read. Cuts are found in at most an hour and its share."""
        how = {"split": split, "at_keys": at_keys, "with_digest": with_digest}
        least_s = _SPLIT_S if split.at_cuts else _TIMEOUT_S
        return await self._do(self._call, _find_parts, item, how, partial(_read_parts, item=item), least_s)

    async def cut_out(self, item: Item, part: Part) -> tuple[float, float, bytes] | Failed:
        """Start, end and file of a part, see `cut_out`; `Failed` if it can't be cut out."""
        most_bytes = 2 * self._processor.limits.max_bytes("video")
        clip = await self._do(self._call, _cut_out, item, part, partial(read_clip, most_bytes=most_bytes))
        if isinstance(clip, Failed) and clip.kind == "unsupported":
            # The video could be read: only no clip can be written in its format.
            return replace(clip, kind=_NO_CLIP)
        if clip is not None:
            return clip
        message = (
            f"'{printable(item.name)}' has no key frame from which a clip could begin. Leave --clips out, or encode "
            "the video anew."
        )
        return Failed(_NO_CLIP, message)

    def close(self) -> None:
        """Ends the processes, their current work included, and drops waiting work."""
        self._decoders.close()
        self._threads.shutdown(cancel_futures=True)

    async def _do(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _look(self, item: Item, how: dict[str, Any]) -> Inspected | Failed:
        status = None
        if isinstance(item.source, Path):
            with contextlib.suppress(OSError):
                status = item.source.stat()
        seen = self._call(_inspect, item, how, partial(read_inspected, item=item, processor=self._processor))
        return replace(seen, status=status) if isinstance(seen, Inspected) else seen

    def _call(
        self, function: Callable[..., Answer], item: Item, how: Any, read: Reads[T], least_s: float = _TIMEOUT_S
    ) -> T | Failed:
        try:
            num_bytes = item.num_bytes
        except OSError:
            num_bytes = 0
        asked = {
            "name": printable(item.name),
            "timeout_s": timeout_for(
                num_bytes, self._processor.limits, reads_video=item.kind == "video", least_s=least_s
            ),
        }
        try:
            return self._decoders.call(function, item, self._processor, how, read=read, **asked)
        except EngineError as error:
            return Failed("worker", str(error))
        except MediaError as error:
            return Failed(failure_kind(error), str(error))
