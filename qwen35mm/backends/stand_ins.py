"""Texts in place of media that can't be read."""

from __future__ import annotations

import logging

from qwen35mm.contract import Image, Video
from qwen35mm_preprocess import MediaConfigError, MediaError, MediaPlanError
from qwen35mm_preprocess.say import english, said_of

logger = logging.getLogger(__name__)


def check_stand_in(part: Image | Video, error: MediaError) -> None:
    """Raises the error unless the medium has a stand-in and the error is about what it holds."""
    if part.stand_in is None or isinstance(error, MediaConfigError | MediaPlanError):
        raise error
    logger.info("A text stands in place of a medium that can't be read: %s", english(said_of(error)))
