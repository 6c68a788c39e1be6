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

A message says what was expected, what came and what to do. It is fit to be shown to a person:
no stack, no library's own message, no path of the server beyond a file's name.
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
        num_tokens: of the prompt, as far as they were counted; None where that isn't known.
    """

    num_tokens: int | None = None

    def __init__(self, message: object = "", num_tokens: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class RefusedError(RequestError):
    """A server won't answer this request: for its media, its size or its words. Others it may."""


class QueueFullError(RequestError):
    """The waiting line is full: try again later."""


class QuotaError(RequestError):
    """One person, or all of them, have taken as much of a server as they may."""


class BatchError(RequestError):
    """Some of many prompts could not be answered; nothing of the others is lost.

    Attributes:
        results: in the prompts' order: a Result, or the error in its place.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class RequestTimeoutError(RequestError):
    """The request's own deadline has passed; what was written until then stays."""


class EngineError(Qwen35mmError):
    """The engine failed while it worked on a request; other requests go on."""


class StorageError(Qwen35mmError):
    """Kept conversations can't be read or written: a full or failing disk, a damaged or foreign database."""


class NotFoundError(StorageError):
    """This person has no such conversation, message, preset or file; somebody else's is not found either."""


class ConversationDataError(StorageError):
    """A message or a setting that isn't of the kept form, or messages that form no tree."""


class FileTooLargeError(StorageError):
    """A file has more bytes than are allowed."""


class ArchiveError(StorageError):
    """An archive of conversations that is damaged, hostile, too large or of another version."""


class CaptioningError(Qwen35mmError):
    """A captioning run that can't begin or go on: a source, a prompt, a word or a schema that can't be used."""


class OutputError(CaptioningError):
    """Captions can't be written: a full, read-only or failing disk. What was written stays; a later run goes on.

    Attributes:
        errno: what the system said, as in the `errno` module; None where it said nothing.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ClusterError(Qwen35mmError):
    """There is no such Ray cluster, or it has less than was asked for."""


class DocumentError(Qwen35mmError):
    """A text or PDF file that can't be used."""


class EncryptedDocumentError(DocumentError):
    """A PDF that opens with a password only."""


class DamagedDocumentError(DocumentError):
    """A document that is cut off, damaged, or of another kind than it seems."""


class DocumentTooLargeError(DocumentError):
    """A document with more bytes, pages or characters than are allowed."""


class NoTextError(DocumentError):
    """A PDF without text: its pages are pictures, and can be used as such."""


class DecoderCrashError(MediaDecodeError):
    """The process that read a medium died of it, or answered what can't be an answer."""


class DecoderTimeoutError(MediaLimitError):
    """The process that read a medium took longer than it may, and was ended."""


class MissingExtraError(Qwen35mmError):
    """An optional dependency isn't installed; the message names the extra."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the optional extra '{extra}': pip install 'qwen35mm[{extra}]'.")
        self.extra = extra


def report_bug(logger: logging.Logger, what: str, error: BaseException) -> dict[str, Any]:
    """Logs an error that nobody foresaw, with its traceback; what a person is told, with the number to find it by."""
    number = os.urandom(3).hex()
    logger.error("%s (%s)", what, number, exc_info=error)
    return say(
        "Something went wrong inside the program; its log has it under {number}. You can try again.", number=number
    )
