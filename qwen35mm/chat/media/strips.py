"""Film strips: the frames that the model sees of a video, as small pictures with times."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from qwen35mm.chat.media.chapters import Chapter, find_chapters, read_chapters
from qwen35mm.chat.replies.drafts import Draft
from qwen35mm.chat.replies.past import Past
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.turns import Person, Question, Turns
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Attachment
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.contract import Backend
from qwen35mm.decoding import Answer, asked_by, read_by
from qwen35mm.decoding.answers import Data, read_list, require
from qwen35mm.errors import NotFoundError, PromptError, RequestError
from qwen35mm.pools import DRAFTS, STRIPS, Asker
from qwen35mm_preprocess import MediaError, MediaLimitError, MediaLimits, MediaPlan, VideoProcessing
from qwen35mm_preprocess.say import decimal, said_of, say
from qwen35mm_preprocess.types import Progress
from qwen35mm_preprocess.video import sampled_frames

T = TypeVar("T")

MAX_STRIP_S = 60.0
MAX_KEPT_BYTES = 64 << 20
_MAX_KEPT_CHAPTERS = 100
_SIDE = 240
# Strips of more frames have smaller pictures, to stay below a few megabytes.
_MANY = 96
_SMALL_SIDE = 128


class _Frame(NamedTuple):
    """A frame. `picture` is a data: URI; `is_same` says whether it is similar to the frame before."""

    index: int
    time_s: float
    is_same: bool
    picture: str


class Strips:
    """Makes strips and caches the last ones.

    Args:
        turns: plans messages that aren't sent yet.
    """

    def __init__(self, backend: Backend, store: ConversationStore, turns: Turns) -> None:
        self._backend = backend
        self._store = store
        self._turns = turns
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], list[_Frame]] = OrderedDict()
        self._kept_bytes = 0
        self._chapters: OrderedDict[str, list[Chapter]] = OrderedDict()

    async def draft(self, person: Person, question: Question, asker: Asker) -> dict[str, Any]:
        """The strip of the first file of an unsent message, as JSON values.

        Args:
            asker: the work ends when they leave.

        Raises:
            PromptError: the file is not a video.
            MediaError: the file can't be read or takes too long; the message names it.
        """
        return await self._shown(person, await self._planned(person, question), asker)

    async def chapters(self, person: Person, question: Question, asker: Asker) -> dict[str, Any]:
        """The chapters of the first file of an unsent message, as JSON values. Raises what `draft` does."""
        found = await self._read(person, await self._planned(person, question), self._find_chapters, asker)
        return {
            "chapters": [
                {"start_s": each.start_s, "end_s": each.end_s, "picture": _data_uri(each.picture)} for each in found
            ]
        }

    async def _planned(self, person: Person, question: Question) -> Attachment:
        """The first file of an unsent message, with the plan by which the model would see it."""

        def plan() -> Attachment:
            draft = self._turns.draft(person, question)[0]
            if not draft.node.attachments:
                raise PromptError(say("Name the video whose frames are to be shown."))
            return self._turns.drafts.plan(draft).node.attachments[0]

        return await DRAFTS.run_for(person.line, plan)

    def _find_chapters(self, digest: str, _plan: MediaPlan, asker: Asker) -> list[Chapter]:
        with self._lock:
            if digest in self._chapters:
                return self._chapters[digest]
        media, path = self._backend.media, self._store.media.path(digest)
        with _ending(asker, digest) as go_on:
            how = {"read": read_chapters, "progress": go_on}
            found = read_by(asked_by(media, asker), path, find_chapters, media.limits, **how)
        with self._lock:
            self._chapters[digest] = found
            while len(self._chapters) > _MAX_KEPT_CHAPTERS:
                self._chapters.popitem(last=False)
        return found

    async def sent(self, person: Person, conversation: str, node: str, at: int, asker: Asker) -> dict[str, Any]:
        """The strip of a message's file as it was sent. Raises what `draft` does, and NotFoundError."""

        def find() -> Attachment:
            kept, tree = self._store.read(person.owner, conversation)
            files = tree.nodes[node].attachments if node in tree.nodes else ()
            if not 0 <= at < len(files):
                raise NotFoundError(say("This file no longer exists."))
            alone = replace(tree.nodes[node], attachments=(files[at],))
            return self._turns.drafts.plan(Draft(Past(), alone, Settings.kept(kept.settings))).node.attachments[0]

        return await self._shown(person, await DRAFTS.run_for(person.line, find), asker)

    async def _read(
        self, person: Person, file: Attachment, read: Callable[[str, MediaPlan, Asker], list[T]], asker: Asker
    ) -> list[T]:
        """What `read` finds in a video. Raises PromptError; MediaError, which names the file."""
        if file.kind != "video" or file.plan is None:
            raise PromptError(say("Only a video has frames to show."))
        try:
            return await STRIPS.run_for(person.line or "", read, file.digest, file.plan, asker)
        except MediaError as error:
            raise type(error)(with_names(said_of(error), [file])) from None

    async def _shown(self, person: Person, file: Attachment, asker: Asker) -> dict[str, Any]:
        frames = await self._read(person, file, self._frames, asker)
        media, plan = self._backend.media, file.plan
        assert plan is not None
        drops, dropped = plan.similar_difference is not None, frozenset(plan.similar_indices)
        most = media.budget.max_frames or media.video_processing.max_frames
        return {
            "frames": [
                {
                    "time_s": frame.time_s,
                    "is_same": frame.is_same,
                    "is_kept": frame.index not in dropped and not (drops and frame.is_same),
                    "picture": frame.picture,
                }
                for frame in frames
            ],
            "duration_s": plan.duration_s,
            "size": list(plan.size),
            "most": min(most, plan.source_frames or most),
        }

    def _frames(self, digest: str, plan: MediaPlan, asker: Asker) -> list[_Frame]:
        # All that decides the pictures. Dropped frames are shown, too.
        key = (digest, plan.size, frozenset((*(plan.frame_indices or ()), *plan.similar_indices)))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        frames = self._make(digest, plan, asker)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = frames
                self._kept_bytes += _num_bytes(frames)
            while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return frames

    def _make(self, digest: str, plan: MediaPlan, asker: Asker) -> list[_Frame]:
        media, path = self._backend.media, self._store.media.path(digest)
        media.check(plan, path)
        side = _SIDE if len(plan.frame_indices or ()) <= _MANY else _SMALL_SIDE
        with _ending(asker, digest) as go_on:
            difference = media.budget.similar_difference
            asked = (plan, media.video_processing, media.limits, difference, side)
            read = partial(_read_frames, plan=plan, side=side)
            return read_by(asked_by(media, asker), path, _decode, *asked, read=read, progress=go_on)


@contextlib.contextmanager
def _ending(asker: Asker, digest: str) -> Iterator[Progress]:
    """Yields a progress callback that ends the work when it takes too long or the asker leaves."""
    end_s = time.monotonic() + MAX_STRIP_S
    gone = threading.Event()

    def go_on(done: int, total: int) -> None:
        if gone.is_set():
            raise RequestError(say("Nothing waits for these frames any more."))
        if time.monotonic() > end_s:
            raise MediaLimitError(
                say(
                    "The frames of '{digest}' take too long to show ({done} of {total} came in {s} seconds). "
                    "Choose fewer, or a part. You can still ask the model about them.",
                    digest=digest,
                    done=done,
                    total=total,
                    s=decimal(MAX_STRIP_S, 0),
                )
            )

    with asker.ending(gone.set):
        yield go_on


def _decode(
    path: Path,
    plan: MediaPlan,
    processing: VideoProcessing,
    limits: MediaLimits,
    difference: float,
    side: int,
    progress: Progress,
) -> Answer:
    frames, pictures = [], []
    for each in sampled_frames(path, plan, processing, limits, difference, progress):
        pictures.append(_picture(each.pixels, side))
        frames.append([each.index, each.time_s, each.is_similar, len(pictures[-1])])
    return Answer(frames, pictures)


def _read_frames(values: Any, data: Data, plan: MediaPlan, side: int) -> list[_Frame]:
    known = {*(plan.frame_indices or ()), *plan.similar_indices}
    require(len(values) <= len(known), "more frames than were asked for")
    pictures = data.take(len(values) * 4 * side**2)
    frames, start = [], 0
    for index, time_s, is_same, num_bytes in read_list(values):
        require(index in known and type(is_same) is bool and type(num_bytes) is int, "no frame")
        require(type(time_s) is float and math.isfinite(time_s) and num_bytes >= 0, "no frame")
        frames.append(_Frame(index, time_s, is_same, _data_uri(pictures[start : start + num_bytes])))
        start += num_bytes
    require(start == len(pictures), "pictures of other sizes")
    return frames


def _picture(pixels: Any, side: int) -> bytes:
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    return data.getvalue()


def _data_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _num_bytes(frames: list[_Frame]) -> int:
    return sum(len(frame.picture) for frame in frames)
