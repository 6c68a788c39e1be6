"""What a call gave, in parts that a model can read: texts, pictures and files."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mcp.types import CallToolResult

MAX_FILES = 8
MAX_FILE_BYTES = 24 << 20
# For those who show a result to a model; a page's own limit may be lower, by its context.
MAX_RESULT_CHARS = 60_000


@dataclass(frozen=True)
class AnsweredFile:
    """A file of a result; `data` is untrusted."""

    name: str
    data: bytes


@dataclass(frozen=True)
class ToolAnswer:
    """A result, or an error in words for the model.

    Attributes:
        text: of any length (see `shortened`); what is left out is said in it.
        has_failed: whether it is an error.
    """

    text: str
    files: tuple[AnsweredFile, ...] = ()
    has_failed: bool = False


def failed(words: str) -> ToolAnswer:
    """An error of ours, in words for the model."""
    return ToolAnswer(f"Error: {words}", has_failed=True)


def answer_of(result: CallToolResult) -> ToolAnswer:
    """A server's result as the model will see it."""
    texts: list[str] = []
    files: list[AnsweredFile] = []
    for number, block in enumerate(result.content, start=1):
        found = _read(block, number)
        if isinstance(found, str):
            texts.append(found)
        elif len(files) == MAX_FILES:
            texts.append(f"[{found.name} is left out: a result may have {MAX_FILES} files]")
        elif len(found.data) > MAX_FILE_BYTES:
            texts.append(f"[{found.name} is left out: a file may have {MAX_FILE_BYTES >> 20} MiB]")
        else:
            files.append(found)
    text = "\n\n".join(text for text in texts if text)
    if result.isError:
        return ToolAnswer(f"Error: {text}" if text else "Error: the tool failed and said nothing.", tuple(files), True)
    return ToolAnswer(text or ("" if files else "The tool gave no result."), tuple(files))


def shortened(text: str, most: int) -> str:
    """The beginning of a text, with a note of what was cut."""
    cut = len(text) - most
    return text if cut <= 0 else f"{text[:most]}\n[cut here: {cut:,} more characters]"


def _read(block: Any, number: int) -> str | AnsweredFile:
    resource: Any = getattr(block, "resource", None)
    match block.type:
        case "text":
            return block.text
        case "image":
            return _file(f"picture-{number}.{block.mimeType.rpartition('/')[2][:8]}", block.data)
        case "audio":
            return "[a sound, which can't be shown]"
        case "resource_link":
            return f"[a link: {block.name}, {block.uri}]"
        case "resource" if hasattr(resource, "text"):
            return f"{resource.uri}\n{resource.text}"
        case "resource":
            return _file(_name(str(resource.uri)) or f"file-{number}", resource.blob)
        case _:
            return "[a part of a kind that can't be shown]"


def _name(uri: str) -> str:
    try:
        return PurePosixPath(urlsplit(uri).path).name[:100]
    except ValueError:
        return ""


def _file(name: str, data: str) -> str | AnsweredFile:
    try:
        return AnsweredFile(name, base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return f"[{name} is left out: it isn't base64]"
