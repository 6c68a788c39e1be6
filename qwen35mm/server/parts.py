"""Reads content parts in OpenAI's form: where media come from, and how each is read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import Notes
from qwen35mm_preprocess import MediaBudget, MediaProcessor, VideoClip
from qwen35mm_preprocess.media import is_data_uri

# An image's token limit for OpenAI's detail "low"; "high", "auto" and "original" use the server's limit.
LOW_DETAIL_TOKENS = 256
_DETAILS = ("low", "high", "auto", "original")
# The names of vLLM and of Qwen's own processors.
_KWARGS = ("fps", "num_frames", "max_frames", "max_pixels")

# Limits for one request: without them a small request could make the server fetch and keep any amount of data.
MAX_FETCHED = 32
MAX_FETCHED_BYTES = 700 * 2**20

Fetch = Callable[[str, str], Awaitable[bytes]]


@dataclass(frozen=True)
class Sources:
    """Where media may come from besides the request itself.

    Attributes:
        root: the folder that `file:` addresses must be in; None refuses all.
        fetch: reads an `http:` or `https:` address, given the place in the request; None refuses all.
    """

    root: Path | None = None
    fetch: Fetch | None = None


class Parts:
    """Reads the messages of one request."""

    def __init__(self, sources: Sources, media: MediaProcessor, kwargs: dict[str, Any] | None, notes: Notes) -> None:
        self._notes = notes
        self._sources = sources
        self._budget = media.budget
        self._own, self._clip = _budget(media, kwargs or {})
        self._num_fetched = self._fetched_bytes = 0

    async def message(self, values: dict[str, Any], place: str) -> Message:
        """Reads one message; `place` is its path in the request, for errors.

        Raises:
            ApiError: 400, says what is wrong and where.
            PromptError: it can't be a message for another reason.
        """
        content = values.get("content")
        if isinstance(content, list):
            parts = [await self.part(part, f"{place}.content.{at}") for at, part in enumerate(content)]
            return replace(Message.from_dict({**values, "content": None}), content=tuple(parts))
        return Message.from_dict(values, allow_paths=False)

    async def part(self, part: Any, place: str) -> Text | Image | Video:
        """Reads one content part. Raises ApiError: 400, says what is wrong and where."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text"):
            return Text(_text(part.get("text"), f"{place}.text"))
        if kind == "refusal":
            return Text(_text(part.get("refusal"), f"{place}.refusal"))
        if kind in ("image_url", "input_image"):
            value, detail = part.get("image_url"), part.get("detail")
            if isinstance(value, dict):
                value, detail = value.get("url"), value.get("detail", detail)
            budget = self._detailed(detail, f"{place}.image_url.detail")
            return Image(await self.source(_text(value, f"{place}.image_url"), f"{place}.image_url"), budget=budget)
        if kind in ("video_url", "input_video"):
            value = part.get(kind) if kind == "video_url" else part.get("input_video", part.get("video_url"))
            if isinstance(value, dict):
                value = value.get("url") or value.get("data")
            address = _text(value, f"{place}.{kind}")
            source = _decoded(address, place) if kind == "input_video" and ":" not in address[:8] else None
            source = source or await self.source(address, f"{place}.{kind}")
            return Video(source, clip=self._clip, budget=self._own)
        known = "text, image_url, video_url or input_video"
        raise ApiError(400, f"{place} must be an object with a type: {known}; got {kind!r}.", f"{place}.type")

    def image(self, source: str | bytes | Path) -> Image:
        """An image, with the request's budget."""
        return Image(source, budget=self._own)

    def _detailed(self, detail: Any, place: str) -> MediaBudget | None:
        if detail is not None and detail not in _DETAILS:
            raise ApiError(400, f"{place} must be one of {', '.join(_DETAILS)}; got {detail!r}.", place)
        if detail != "low":
            return self._own
        budget = self._own or self._budget
        least = min(budget.max_image_tokens or LOW_DETAIL_TOKENS, LOW_DETAIL_TOKENS)
        return replace(budget, max_image_tokens=least)

    async def source(self, address: str, place: str) -> str | bytes | Path:
        """Resolves an address to a source of media.

        Raises:
            ApiError: 400, this server doesn't read it, or it can't be read.
        """
        if is_data_uri(address):
            return address
        scheme = address[: address[:8].find(":") + 1].lower()
        if scheme in ("http:", "https:"):
            if self._sources.fetch is None:
                message = "Addresses are not fetched here. Send the file as a data: URI, or start with --allow-urls."
                raise ApiError(400, f"{place}: {message}", place)
            return await self._fetched(self._sources.fetch, address, place)
        if scheme == "file:":
            return _file(address, self._sources.root, place)
        raise ApiError(400, f"{place} must be a data:, https: or file: address; got {address[:40]!r}.", place)

    async def _fetched(self, fetch: Fetch, address: str, place: str) -> bytes:
        self._num_fetched += 1
        if self._num_fetched > MAX_FETCHED:
            raise ApiError(400, f"{place}: at most {MAX_FETCHED} addresses of one request are fetched.", place)
        data = await fetch(address, place)
        self._fetched_bytes += len(data)
        if self._fetched_bytes > MAX_FETCHED_BYTES:
            most = f"{MAX_FETCHED_BYTES / 2**20:,.0f} MiB"
            raise ApiError(413, f"{place}: the media at all addresses of this request are larger than {most}.", place)
        return data


def _budget(media: MediaProcessor, kwargs: dict[str, Any]) -> tuple[MediaBudget | None, VideoClip | None]:
    """The budget and clip of `mm_processor_kwargs`, capped at the server's; None leaves it to the server."""
    for name, value in kwargs.items():
        place = f"mm_processor_kwargs.{name}"
        if name not in _KWARGS:
            raise ApiError(400, f"{place} isn't known here: {', '.join(_KWARGS)} are.", place, "unknown_field")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ApiError(400, f"{place} must be a number above 0; got {value!r}.", place)
        if name != "fps" and not isinstance(value, int):
            raise ApiError(400, f"{place} must be a whole number; got {value!r}.", place)
    if not kwargs:
        return None, None
    budget = media.budget
    if "fps" in kwargs:
        budget = replace(budget, fps=float(kwargs["fps"]))
    if "max_frames" in kwargs:
        budget = replace(budget, max_frames=min(budget.max_frames or kwargs["max_frames"], kwargs["max_frames"]))
    if "max_pixels" in kwargs:
        tokens = max(1, kwargs["max_pixels"] // media.image_processing.factor**2)
        budget = replace(budget, max_image_tokens=min(budget.max_image_tokens or tokens, tokens))
    num_frames = kwargs.get("num_frames")
    return budget, None if num_frames is None else VideoClip(num_frames=num_frames)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place} must be a string, and not empty; got {type(value).__name__}.", place)
    return value


def _decoded(data: str, place: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{place}.input_video.data isn't base64.", f"{place}.input_video.data") from None


def _file(address: str, root: Path | None, place: str) -> Path:
    """The file of a `file:` address. All refusals have the same message, so that it reveals nothing of the disk."""
    refused = ApiError(400, f"{place}: there is no such file under --media-root.", place)
    parts = urlsplit(address)
    if root is None:
        raise ApiError(400, f"{place}: files are not read here. Start with --media-root FOLDER.", place)
    named = unquote(parts.path).replace("\\", "/")
    if named.startswith("//"):
        # On Windows this is a path on another machine, which would learn who asks.
        raise refused
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(root.resolve()) or not path.is_file():
        raise refused
    return path
