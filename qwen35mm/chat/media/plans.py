"""Checks whether plans of media from earlier or from elsewhere can be used here."""

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
    """Reads and checks an imported file against its record and the limits here; returns the attachment to store.

    Drops a plan for another checkpoint's processing, since a new one can be made.

    Raises:
        ArchiveError: the file or its plan doesn't match its record.
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
    """Whether the frames lie in the clip. A single frame may begin before it and still be on the screen."""
    times, end_s = plan.frame_times_s or (), math.inf if clip.end_s is None else clip.end_s
    return len(times) == 1 or all(clip.start_s - 0.01 <= time_s <= end_s + 0.01 for time_s in times)


def completed(plan: MediaPlan, digest: str, known: Iterable[Attachment], processing: VideoProcessing) -> MediaPlan:
    """The completed plan if a known file was already read by `plan`; else `plan` itself.

    Args:
        digest: of the file.
        processing: the checkpoint's video processing.
    """
    for attachment in known:
        before = attachment.plan
        if attachment.digest == digest and before is not None and _came_of(before, plan, processing):
            return before
    return plan


def _came_of(complete: MediaPlan, plan: MediaPlan, processing: VideoProcessing) -> bool:
    """Whether reading by `plan` gave `complete`: equal except for digests, and frames dropped with a note.

    If `plan` drops similar frames and `complete` dropped none, it is unknown whether it looked for any: False.
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
    """The number of dropped frames in a note; notes of earlier versions begin with it."""
    if isinstance(note, dict):
        number = note.get("values", {}).get("n")
        return number if isinstance(number, int) else 0
    found = re.match(r"\d+", str(note))
    return int(found[0]) if found else 0
