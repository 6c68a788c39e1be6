"""Finds near-duplicates among the media under review."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image

from qwen35mm.captioning.media.similar import SUGGESTED_MAX_DISTANCE, SimilarIndex, similarity
from qwen35mm.chat.media.thumbnails import make_thumbnail
from qwen35mm.errors import StorageError
from qwen35mm_preprocess import MediaError, MediaLimits

# The longer side of thumbnails in pixels, both for lists and for comparison.
SMALL_SIDE = 160


class Similar:
    """Compares media in a thread; near-duplicates share a group."""

    def __init__(self) -> None:
        self._index = SimilarIndex[int](SUGGESTED_MAX_DISTANCE)
        self._groups: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def begin(self, numbers: Sequence[int], path_of: Callable[[int], Path], limits: MediaLimits) -> None:
        """Starts comparing the new ones of these entries, by their numbers."""
        if self._thread is None or not self._thread.is_alive():
            missing = [number for number in numbers if number not in self._groups]
            self._thread = threading.Thread(target=self._look, args=(missing, path_of, limits), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def among(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """The numbers with a near-duplicate among them, group by group, and how many aren't compared yet."""
        seen = [number for number in numbers if number in self._groups]
        group = self._groups.__getitem__
        groups = [list(members) for _, members in groupby(sorted(seen, key=group), group)]
        near = [number for members in groups if len(members) > 1 for number in members]
        return near, len(numbers) - len(seen)

    def _look(self, numbers: Sequence[int], path_of: Callable[[int], Path], limits: MediaLimits) -> None:
        for number in numbers:
            if self._stopped.is_set():
                return
            try:
                with Image.open(io.BytesIO(make_thumbnail(path_of(number), limits, SMALL_SIDE))) as picture:
                    looks = similarity([np.asarray(picture)])
            except (MediaError, StorageError, OSError):
                # The page shows what is wrong with it.
                self._groups[number] = number
                continue
            found = self._index.find(looks)
            self._groups[number] = number if found is None else self._groups[found]
            self._index.add(looks, number)
