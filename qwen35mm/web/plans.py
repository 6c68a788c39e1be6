"""Media plans that were completed before: with one of them, nothing is decoded or encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from qwen35mm.chat.tree import Attachment
from qwen35mm_preprocess import MediaPlan, VideoProcessing
from qwen35mm_preprocess.budget import with_frames


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
    """Whether reading by `plan` gave `complete`: the same, but for digests, and frames left out with a note."""
    if complete.digest is None or complete.kind != plan.kind:
        return False
    bare = complete.unpinned()
    if plan.frame_indices is None or bare.frame_indices is None:
        return bare == plan
    if not set(bare.frame_indices) <= set(plan.frame_indices):
        return False
    notes = bare.notes[len(plan.notes) :]
    reduced = with_frames(plan, bare.frame_indices, processing.temporal_patch_size, notes)
    num_missing = len(plan.frame_indices) - len(bare.frame_indices)
    return bare == replace(reduced, similar_difference=None) and sum(map(_num_told, notes)) == num_missing


def _num_told(note: str) -> int:
    """Frames that a note says are left out; it begins with their number."""
    found = re.match(r"\d+", note)
    return int(found[0]) if found else 0
