"""Plans of media that were made before, or elsewhere: which of them hold here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from qwen35mm.chat.documents.documents import MAX_KEPT_TEXT_BYTES
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.store.records import Attachment
from qwen35mm.errors import ArchiveError, DocumentTooLargeError
from qwen35mm_preprocess import MediaError, MediaPlan, MediaPlanError, MediaProcessor, VideoClip, VideoProcessing
from qwen35mm_preprocess.say import Said, decimal, said_of, say


def admitted(attachment: Attachment, path: Path, processor: MediaProcessor) -> Attachment:
    """A file that a record from elsewhere names, as it may be kept: it is looked at, and within the limits here.

    A plan for another checkpoint's processing is left out: a new one can be made.

    Raises:
        ArchiveError: the file is of another kind than its record says, or its plan is another medium's.
        MediaError, DocumentError: the file can't be read, or is over a limit.
    """
    if attachment.kind == "text":
        if attachment.num_bytes > MAX_KEPT_TEXT_BYTES:
            raise DocumentTooLargeError(
                say(
                    "The text file '{name}' has {n} MiB; the limit is {most}.",
                    name=attachment.name,
                    n=decimal(attachment.num_bytes / 2**20, 1),
                    most=decimal(MAX_KEPT_TEXT_BYTES / 2**20, 1),
                )
            )
        return replace(attachment, plan=None)
    plan = attachment.plan
    try:
        found = processor.plan(path, attachment.kind, attachment.clip)
        if plan is None or plan.processing != found.processing:
            return replace(attachment, plan=None)
        if plan.kind != found.kind:
            raise ArchiveError(
                say("The file '{name}' is stored as one kind, with a plan for another.", name=attachment.name)
            )
        processor.check(plan, path)
    except MediaPlanError as error:
        raise ArchiveError(
            say("The file '{name}' can't be used: its plan is damaged, or of another version.", name=attachment.name)
        ) from error
    except MediaError as error:
        raise type(error)(with_names(said_of(error), [attachment])) from None
    if attachment.clip is not None and not _is_within(plan, attachment.clip):
        raise ArchiveError(say("The file '{name}' has frames outside the chosen part.", name=attachment.name))
    if (plan.source_size, plan.source_frames) != (found.source_size, found.source_frames):
        raise ArchiveError(
            say(
                "The file '{name}' doesn't match its record: its size in pixels or its number of frames differs.",
                name=attachment.name,
            )
        )
    return attachment


def _is_within(plan: MediaPlan, clip: VideoClip) -> bool:
    """Whether the frames are of the part that was chosen; where none begins in it, it is the one on the screen."""
    times, end_s = plan.frame_times_s or (), math.inf if clip.end_s is None else clip.end_s
    return len(times) == 1 or all(clip.start_s - 0.01 <= time_s <= end_s + 0.01 for time_s in times)


def completed(plan: MediaPlan, digest: str, known: Iterable[Attachment], processing: VideoProcessing) -> MediaPlan:
    """What a new plan of a file became when the file was read before, by the files that are known; else itself.

    Args:
        digest: of the file.
        processing: of the checkpoint's videos.
    """
    for attachment in known:
        before = attachment.plan
        if attachment.digest == digest and before is not None and _came_of(before, plan, processing):
            return before
    return plan


def _came_of(complete: MediaPlan, plan: MediaPlan, processing: VideoProcessing) -> bool:
    """Whether reading by `plan` gave `complete`: the same, but for digests, and frames left out with a note.

    Where similar frames are to be left out and none was, nobody knows whether any was looked for.
    """
    if complete.digest is None or complete.kind != plan.kind:
        return False
    if (plan.similar_difference is not None) != bool(complete.similar_indices):
        return False
    bare = complete.unpinned()
    if plan.frame_indices is None or bare.frame_indices is None:
        return bare == plan
    if not set(bare.frame_indices) <= set(plan.frame_indices):
        return False
    notes = bare.notes[len(plan.notes) :]
    reduced = plan.with_frames(bare.frame_indices, processing.temporal_patch_size, notes)
    num_missing = len(plan.frame_indices) - len(bare.frame_indices)
    reduced = replace(reduced, similar_difference=None, similar_indices=bare.similar_indices)
    return bare == reduced and sum(map(_num_told, notes)) == num_missing


def _num_told(note: Said) -> int:
    """Frames that a note says are left out; one of an earlier version begins with their number."""
    if isinstance(note, dict):
        number = note.get("values", {}).get("n")
        return number if isinstance(number, int) else 0
    found = re.match(r"\d+", str(note))
    return int(found[0]) if found else 0
