"""The errors that qwen35mm_preprocess raises on purpose.

A message says what was expected, what came and what to do. It can be shown to a user: it names a file by its last
component only, and quotes no library.

The root of all qwen35mm errors is here, since this package imports nothing from qwen35mm. qwen35mm.errors has the tree.
"""

from __future__ import annotations


class Qwen35mmError(Exception):
    """Root of the errors that qwen35mm raises on purpose."""


class MediaError(Qwen35mmError, ValueError):
    """Root of the errors about images, videos and their settings."""


class MediaConfigError(MediaError):
    """A preprocessor_config.json, a limit or a budget has unusable values."""


class MediaSourceError(MediaError):
    """There is nothing to read: no such file, a folder, an address, a bad data URI, an empty file."""


class MediaFormatError(MediaError):
    """The content has an unsupported format or codec, or only sound."""


class MediaDecodeError(MediaError):
    """The content is damaged or cut off."""


class MediaLimitError(MediaError):
    """The medium is over a hard limit of `MediaLimits`: bytes, pixels, frames, seconds, aspect ratio."""


class MediaBudgetError(MediaError):
    """The medium doesn't fit its token budget, however few and small its frames."""


class MediaPlanError(MediaError):
    """The media plan is damaged or was made for a checkpoint with other processing."""


class MediaChangedError(MediaPlanError):
    """The medium has changed since its plan was made.

    To use the new content, make a new plan, or prepare `plan.unpinned()`.
    """
