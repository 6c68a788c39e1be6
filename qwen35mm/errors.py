"""Every error that qwen35mm raises on purpose.

    Qwen35mmError
    ├── ConfigError
    ├── CheckpointError
    ├── PromptError
    ├── RequestError
    │   ├── ContextTooLongError
    │   ├── RefusedError
    │   ├── QueueFullError
    │   ├── QuotaError
    │   ├── BatchError
    │   ├── ToolError
    │   └── RequestTimeoutError
    ├── EngineError
    ├── StorageError
    │   ├── NotFoundError
    │   ├── ConversationDataError
    │   ├── FileTooLargeError
    │   └── ArchiveError
    ├── CaptioningError
    │   └── OutputError
    ├── ClusterError
    ├── DocumentError
    │   ├── EncryptedDocumentError
    │   ├── DamagedDocumentError
    │   ├── DocumentTooLargeError
    │   └── NoTextError
    ├── MissingExtraError
    └── MediaError: an image or a video that can't be used; its family is in qwen35mm_preprocess.errors
        ├── DecoderCrashError, which is a MediaDecodeError
        └── DecoderTimeoutError, which is a MediaLimitError

A message says what was expected, what came and what to do. It can be shown to a person: it has no stack trace, no
library's own message, and no path of the server beyond a file's name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from qwen35mm_preprocess.errors import MediaDecodeError, MediaError, MediaLimitError, Qwen35mmError
from qwen35mm_preprocess.say import say

__all__ = [
    "ArchiveError",
    "BatchError",
    "CaptioningError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "ContextTooLongError",
    "ConversationDataError",
    "DamagedDocumentError",
    "DecoderCrashError",
    "DecoderTimeoutError",
    "DocumentError",
    "DocumentTooLargeError",
    "EncryptedDocumentError",
    "EngineError",
    "FileTooLargeError",
    "MediaError",
    "MissingExtraError",
    "NoTextError",
    "NotFoundError",
    "OutputError",
    "PromptError",
    "QueueFullError",
    "QuotaError",
    "Qwen35mmError",
    "RefusedError",
    "RequestError",
    "RequestTimeoutError",
    "StorageError",
    "ToolError",
]


class ConfigError(Qwen35mmError):
    """A setting, or a value in a checkpoint's config.json, that can't be used."""


class CheckpointError(Qwen35mmError):
    """A checkpoint folder whose files or tensors are missing, damaged or foreign."""


class PromptError(Qwen35mmError):
    """Messages that can't become a prompt."""


class RequestError(Qwen35mmError):
    """A request that can't be served as asked."""


class ContextTooLongError(RequestError):
    """The prompt, or the prompt and its reply, has more tokens than the context holds.

    Attributes:
        num_tokens: of the prompt, as far as counted; None if unknown.
        context_length: what the context holds, in tokens; None if unknown.
    """

    num_tokens: int | None = None
    context_length: int | None = None

    def __init__(self, message: object = "", num_tokens: int | None = None, context_length: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.context_length = context_length


class RefusedError(RequestError):
    """A server refuses this request for its media, its size or its words; it may accept others."""


class QueueFullError(RequestError):
    """The queue is full: try again later."""


class QuotaError(RequestError):
    """One person, or all together, have used up a server's quota."""


class BatchError(RequestError):
    """Some of many prompts failed; the others' results are kept.

    Attributes:
        results: in the prompts' order, each a Result or an error.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class ToolError(RequestError):
    """A tool server can't be started or asked, or offers what can't be used."""


class RequestTimeoutError(RequestError):
    """The request's own deadline has passed; the text written so far stays."""


class EngineError(Qwen35mmError):
    """The engine failed while it worked on a request; other requests continue."""


class StorageError(Qwen35mmError):
    """Stored conversations can't be read or written: a full or failing disk, a damaged or foreign database."""


class NotFoundError(StorageError):
    """This person has no such conversation, message, preset or file; other people's count as missing too."""


class ConversationDataError(StorageError):
    """A message or a setting has the wrong form, or messages form no tree."""


class FileTooLargeError(StorageError):
    """A file is larger than allowed."""


class ArchiveError(StorageError):
    """An archive of conversations that is damaged, hostile, too large or of another version."""


class CaptioningError(Qwen35mmError):
    """A captioning run can't start or continue: a source, a prompt, a word or a schema is unusable."""


class OutputError(CaptioningError):
    """Captions can't be written: a full, read-only or failing disk. Written ones stay; a later run continues.

    Attributes:
        errno: the system's error number, as in the `errno` module; None if it gave none.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ClusterError(Qwen35mmError):
    """There is no such Ray cluster, or it has fewer resources than requested."""


class DocumentError(Qwen35mmError):
    """A text or PDF file that can't be used."""


class EncryptedDocumentError(DocumentError):
    """A PDF that needs a password."""


class DamagedDocumentError(DocumentError):
    """A document that is cut off, damaged, or of another kind than it seems."""


class DocumentTooLargeError(DocumentError):
    """A document with more bytes, pages or characters than allowed."""


class NoTextError(DocumentError):
    """A PDF without text: its pages are pictures, which can be used as such."""


class DecoderCrashError(MediaDecodeError):
    """The process that read a medium crashed, or gave an impossible answer."""


class DecoderTimeoutError(MediaLimitError):
    """The process that read a medium exceeded its time limit and was ended."""


class MissingExtraError(Qwen35mmError):
    """An optional dependency isn't installed; the message names the extra."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the optional extra '{extra}': pip install 'qwen35mm[{extra}]'.")
        self.extra = extra


def report_bug(logger: logging.Logger, what: str, error: BaseException) -> dict[str, Any]:
    """Logs an unexpected error with its traceback; returns the text for the user, with a number to find it by."""
    number = os.urandom(3).hex()
    logger.error("%s (%s)", what, number, exc_info=error)
    return say(
        "Something went wrong inside the program; its log has it under {number}. You can try again.", number=number
    )
