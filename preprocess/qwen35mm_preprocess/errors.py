"""Every error that qwen35mm_preprocess raises on purpose.

A message says what was expected, what came and what to do. It is fit to be shown to a person: it names a file by its
last component only, and quotes no library.

The root of all of qwen35mm's errors is here, since this package imports nothing of the other; qwen35mm.errors
has the tree.
"""

from __future__ import annotations


class Qwen35mmError(Exception):
    """Root of the errors that qwen35mm raises on purpose."""


class MediaError(Qwen35mmError, ValueError):
    """Root of the errors about images, videos and the settings that they are read with."""


class MediaConfigError(MediaError):
    """A preprocessor_config.json, a limit or a budget whose values can't be used."""


class MediaSourceError(MediaError):
    """There is nothing to read: no such file, a folder, an address, a bad data URI, an empty file."""


class MediaFormatError(MediaError):
    """The content is not of a format or codec that is read here, or it has no picture: a file with sound only."""


class MediaDecodeError(MediaError):
    """The content is damaged or cut off."""


class MediaLimitError(MediaError):
    """The medium is over a hard limit of `MediaLimits`: bytes, pixels, frames, seconds, aspect ratio."""


class MediaBudgetError(MediaError):
    """The medium doesn't fit its token budget, however few and small its frames."""


class MediaPlanError(MediaError):
    """A media plan that is damaged, or that was made for a checkpoint with other processing."""


class MediaChangedError(MediaPlanError):
    """The medium is no longer the one that its plan was made for.

    To take the new content for what it is, make a new plan, or prepare `plan.unpinned()`.
    """
