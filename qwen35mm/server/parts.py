"""Reads content parts in OpenAI's form: where media come from, and how each is read."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from qwen35mm.contract import Image, Text, Video
from qwen35mm.pools import REQUESTS
from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS
from qwen35mm.server.carried import add_line, carried, json_text, loses
from qwen35mm.server.errors import ApiError
from qwen35mm.server.history import left_out
from qwen35mm.server.notes import UNSUPPORTED, Notes
from qwen35mm_preprocess import MediaBudget, MediaError, MediaProcessor, VideoClip
from qwen35mm_preprocess.frames import clip_of_jpegs
from qwen35mm_preprocess.media import from_base64, is_data_uri, open_stream, read_format

# An image's token limit for OpenAI's detail "low"; "high", "auto" and "original" use the server's limit.
LOW_DETAIL_TOKENS = 256
_DETAILS = ("low", "high", "auto", "original")
# How media are read, by the names of vLLM and of Qwen's own processors; for all media of a request, or for one part.
KWARGS = ("fps", "num_frames", "max_frames", "max_pixels", "video_start", "video_end")
QWEN_NAMES = {"nframes": "num_frames", "sample_fps": "fps"}
# Types of parts. Servers and client libraries have different names for the same.
TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary_text")
IMAGES = ("image_url", "input_image", "image")
VIDEOS = ("video_url", "input_video", "video")
_FILES = ("file", "input_file")
_SOUNDS = ("input_audio", "audio_url", "audio")
_KINDS = (*TEXTS, *IMAGES, *VIDEOS, "file", "input_audio")
_ALL_KINDS = (*TEXTS, *_THOUGHTS, *IMAGES, *VIDEOS, *_FILES, *_SOUNDS)
# Fields of parts that say nothing to the model.
_SAID = ("type", "cache_control", "id", "index")
_SAID_WITH_TEXT = (*_SAID, "content", "annotations", "logprobs", "citations")
_SAID_WITH_MEDIA = (
    *_SAID,
    *KWARGS,
    *QWEN_NAMES,
    "detail",
    "source",
    "url",
    "data",
    "media_type",
    "mime_type",
    "format",
)
_TEXT_FILES = (
    "application/json",
    "application/xml",
    "application/javascript",
    "application/x-yaml",
    "application/toml",
)

_JPEGS = re.compile("data:video/jpe?g[;,]", re.IGNORECASE)
# The family's processors read 768 at most.
_MAX_FRAMES = 4096

# Limits for one request: without them a small request could make the server fetch and keep any amount of data. Media
# that needn't be readable have a number of their own, and half of the bytes.
MAX_FETCHED = 32
MAX_FETCHED_BYTES = 700 * 2**20
# A millisecond or two.
_READ_AT_ONCE = 256

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


@dataclass
class UnreadableError(ApiError):
    """A part that can't be read here.

    Attributes:
        kind, name: what it is, for the text that stands in its place.
    """

    kind: str = "part"
    name: object = None


def is_part(value: Any) -> bool:
    """Whether a value is a content part of a type that `Parts` knows."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    # Some clients leave the type out.
    return kind in _ALL_KINDS if isinstance(kind, str) else len(value) == 1 and next(iter(value)) in _KINDS


class Parts:
    """Reads the content parts of one request.

    Args:
        kwargs: how media are read, by `mm_processor_kwargs`.
    """

    def __init__(self, sources: Sources, media: MediaProcessor, kwargs: Mapping[str, Any] | None, notes: Notes) -> None:
        self._sources = sources
        self._media = media
        self._notes = notes
        self._kwargs = dict(kwargs or {})
        self._own = self._reading(self._kwargs, "mm_processor_kwargs")
        # By whether they must be readable: media of past turns leave room for those of the question.
        self._num_fetched: Counter[bool] = Counter()
        self._fetched_bytes = 0
        self._num_read = 0

    async def breathe(self) -> None:
        """Lets others have the event loop now and then: call it for each part, item and call of the request."""
        self._num_read += 1
        if self._num_read % _READ_AT_ONCE == 0:
            await asyncio.sleep(0)

    async def content(self, content: Any, place: str, *, must_read: bool) -> tuple[Text | Image | Video, ...]:
        """Reads a message's content: null, a text, a part, or a list of parts. Empty texts are dropped.

        Args:
            must_read: whether a part that can't be read refuses the request; else a text stands in its place.

        Raises:
            ApiError: 400, says what is wrong and where.
        """
        if content is None or isinstance(content, str):
            return (Text(content),) if content else ()
        listed = content if isinstance(content, list) else [content]
        found: list[Text | Image | Video] = []
        for at, part in enumerate(listed):
            where = f"{place}.{at}" if isinstance(content, list) else place
            await self.breathe()
            line = self._foreign(part, where, must_read=must_read)
            if line is not None:
                add_line(found, line)
                continue
            try:
                read = await self.part(part, where, must_read=must_read)
            except UnreadableError as error:
                if must_read:
                    raise
                self._notes.change(where, "can't be read; a text says so to the model")
                read = Text(left_out(error.kind, error.name))
            found += [] if read is None else [read]
        return tuple(found)

    def _foreign(self, part: Any, place: str, *, must_read: bool) -> str | None:
        """What has no place in a prompt as it is, as text; None for all that `part` reads or refuses."""
        if part is None or isinstance(part, str) or is_part(part):
            value = part.get("text") if isinstance(part, dict) and part.get("type") in TEXTS else None
            if must_read or not isinstance(value, dict | list | int | float):
                return None
            self._notes.change(place, "isn't text; it is read as JSON text")
            return json_text(value)
        if isinstance(part, dict) and isinstance(part.get("type"), str):
            line = None if must_read and loses(part) else carried(part)
            if line is not None:
                self._notes.change(f"{place} of type {part['type']!r:.60}", "is carried as text")
            return line
        if must_read or (isinstance(part, dict) and any(name in part for name in _KINDS)):
            return None
        self._notes.change(place, "isn't a part; it is read as JSON text")
        return json_text(part)

    async def part(self, part: Any, place: str, *, must_read: bool) -> Text | Image | Video | None:
        """Reads one content part; None for one that says nothing.

        Args:
            must_read: whether a medium that the backend can't read refuses the request; else it has a stand-in.

        Raises:
            UnreadableError: 400, it is of a kind that this server doesn't read, or damaged, or can't be fetched.
            ApiError: 400, says what is wrong and where.
        """
        read = await self._part(part, place, must_read)
        if must_read or not isinstance(read, Image | Video):
            return read
        await self._check_format(read, place)
        return replace(read, stand_in=left_out(read.kind))

    async def _part(self, part: Any, place: str, must_read: bool) -> Text | Image | Video | None:
        if part is None or isinstance(part, str):
            return Text(part) if part else None
        if not isinstance(part, dict):
            raise ApiError(400, f"{place} must be an object with a type; got {type(part).__name__}.", place)
        kind = part.get("type") or next((name for name in _KINDS if name in part), None)
        if kind in TEXTS:
            return self._text(part, place)
        if kind in _THOUGHTS:
            return None
        if kind in IMAGES:
            return await self._image(part, place, must_read)
        if kind in VIDEOS:
            return await self._video(part, place, must_read)
        if kind in _FILES:
            return await self._file(part, place)
        if kind in _SOUNDS:
            raise UnreadableError(400, f"{place}: this model can't hear.", place, kind="audio")
        known = "text, image_url, video_url or input_video"
        message = f"{place} must be an object with a type: {known}; got {kind!r:.100}."
        raise UnreadableError(400, message, f"{place}.type", kind=f"{kind!s:.50}")

    async def _check_format(self, part: Image | Video, place: str) -> None:
        """Raises UnreadableError if a medium is too large or, by its first bytes, of no format that is read here."""
        try:
            await REQUESTS.run(self._read_format, part)
        except MediaError as error:
            raise UnreadableError(400, f"{place}: {error}", place, kind=part.kind) from None

    def _read_format(self, part: Image | Video) -> None:
        assert isinstance(part.source, str | bytes | Path), "clients send files"
        with open_stream(part.source, part.kind, self._media.limits) as stream:
            read_format(stream, part.source)

    def _text(self, part: dict[str, Any], place: str) -> Text | None:
        self._notes.ignore_rest(part, (*TEXTS, *_SAID_WITH_TEXT), place)
        value = next((part[name] for name in ("text", "refusal", "content") if part.get(name) is not None), "")
        if not isinstance(value, str):
            raise ApiError(400, f"{place}.text must be a string; got {type(value).__name__}.", f"{place}.text")
        return Text(value) if value else None

    async def _image(self, part: dict[str, Any], place: str, must_read: bool) -> Image:
        name = next((each for each in ("image_url", "image", "source", "url", "data") if part.get(each)), "image_url")
        value, detail = part.get(name), part.get("detail")
        if isinstance(value, dict):
            detail = value.get("detail", detail)
            value = value.get("url") or value.get("data")
        self._notes.ignore_rest(part, (*IMAGES, *_SAID_WITH_MEDIA), place)
        budget, _ = self._budget_of(part, place)
        if detail is not None and detail not in _DETAILS:
            self._notes.ignore(f"{place}.detail", UNSUPPORTED)
        if detail == "low":
            budget = budget or self._media.budget
            least = min(budget.max_image_tokens or LOW_DETAIL_TOKENS, LOW_DETAIL_TOKENS)
            budget = replace(budget, max_image_tokens=least)
        return Image(await self._medium(value, f"{place}.{name}", "image", must_read), budget=budget)

    async def _video(self, part: dict[str, Any], place: str, must_read: bool) -> Video:
        name = next(
            (each for each in ("video_url", "input_video", "video", "url", "data") if part.get(each)), "video_url"
        )
        value = part.get(name)
        if isinstance(value, dict):
            value = value.get("url") or value.get("data")
        self._notes.ignore_rest(part, (*VIDEOS, *_SAID_WITH_MEDIA), place)
        budget, clip = self._budget_of(part, place)
        frames = _frames(value, f"{place}.{name}")
        source = (
            await self._medium(value, f"{place}.{name}", "video", must_read)
            if frames is None
            else await REQUESTS.run(self._clip, frames, None if budget is None else budget.fps, f"{place}.{name}")
        )
        return Video(source, clip=clip, budget=budget)

    def _clip(self, frames: Sequence[str], fps: float | None, place: str) -> bytes:
        """A clip of a video's frames, JPEGs in base64."""
        try:
            most = self._media.limits.max_bytes("image")
            return clip_of_jpegs([from_base64(frame, most) for frame in frames], fps=fps)
        except MediaError as error:
            raise UnreadableError(400, f"{place}: {error}", place, kind="video") from None

    async def _file(self, part: dict[str, Any], place: str) -> Text | Image | Video:
        """A file with its data: a picture, a video or a text."""
        held = part.get("file")
        values = {**part, **(held if isinstance(held, dict) else {})}
        name = values.get("filename")
        data = values.get("file_data")
        if not isinstance(data, str) or not is_data_uri(data):
            message = f"{place}: a file must bring its data along, as a data: URI in file_data."
            raise UnreadableError(400, message, place, kind="file", name=name)
        declared = data[5:].partition(",")[0].partition(";")[0].strip().lower()
        if declared.startswith("image/"):
            return Image(data, budget=self._own[0])
        if declared.startswith("video/"):
            return Video(data, clip=self._own[1], budget=self._own[0])
        if declared.startswith("text/") or declared in _TEXT_FILES:
            try:
                text = await REQUESTS.run(self._decoded, data)
            except (ValueError, MediaError):
                message = f"{place}: the file isn't text in UTF-8, or is too long."
                raise UnreadableError(400, message, place, kind="file", name=name) from None
            return Text(f"{name}:\n{text}" if name else text)
        message = f"{place}: pictures, videos and texts are read here; got a file of type {declared[:50]!r}."
        raise UnreadableError(400, message, place, kind="file", name=name)

    def _decoded(self, uri: str) -> str:
        """The text of a file."""
        if len(uri) > 8 * MAX_OUTSIDE_CHARS:
            raise ValueError("it has more characters than a prompt may have")
        with open_stream(uri, None, self._media.limits) as stream:
            return stream.read().decode()

    async def _medium(self, value: Any, place: str, kind: str, must_read: bool) -> str | bytes | Path:
        if not isinstance(value, str) or not value:
            message = f"{place} must be a string, and not empty; got {type(value).__name__}."
            raise UnreadableError(400, message, place, kind=kind)
        if ":" not in value[:8]:
            try:
                return await REQUESTS.run(from_base64, value, self._media.limits.max_bytes(None))
            except MediaError:
                message = f"{place} must be a data:, https: or file: address, or base64; got {value[:40]!r}."
                raise UnreadableError(400, message, place, kind=kind) from None
        return await self.source(value, place, kind, must_read=must_read)

    def image(self, source: str | bytes | Path) -> Image:
        """An image, with the request's budget."""
        return Image(source, budget=self._own[0])

    def _budget_of(self, part: dict[str, Any], place: str) -> tuple[MediaBudget | None, VideoClip | None]:
        """A part's own budget and clip, or else the request's."""
        told = {QWEN_NAMES.get(name, name): value for name, value in part.items() if value is not None}
        told = {name: told[name] for name in KWARGS if name in told}
        return self._reading({**self._kwargs, **told}, place) if told else self._own

    def _reading(self, kwargs: Mapping[str, Any], place: str) -> tuple[MediaBudget | None, VideoClip | None]:
        """The budget and clip, limited by the server's; None leaves it to the server."""
        for name, value in kwargs.items():
            where = f"{place}.{name}"
            if name not in KWARGS:
                self._notes.ignore(where, UNSUPPORTED)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
                raise ApiError(400, f"{where} must be a number above 0; got {value!r:.100}.", where)
            elif name not in ("video_start", "video_end") and value == 0:
                raise ApiError(400, f"{where} must be a number above 0; got 0.", where)
            elif name in ("num_frames", "max_frames", "max_pixels") and value != int(value):
                raise ApiError(400, f"{where} must be a whole number; got {value!r}.", where)
        said = {name: kwargs[name] for name in KWARGS if name in kwargs}
        if not said:
            return None, None
        budget = self._media.budget
        if "fps" in said:
            budget = replace(budget, fps=float(said["fps"]))
        if "max_frames" in said:
            most = int(said["max_frames"])
            budget = replace(budget, max_frames=min(budget.max_frames or most, most))
        if "max_pixels" in said:
            tokens = max(1, int(said["max_pixels"]) // self._media.image_processing.factor**2)
            budget = replace(budget, max_image_tokens=min(budget.max_image_tokens or tokens, tokens))
        start, end, count = said.get("video_start", 0), said.get("video_end"), said.get("num_frames")
        if end is not None and end < start:
            raise ApiError(400, f"{place}.video_end must be video_start or more; got {end!r}.", f"{place}.video_end")
        if not start and end is None and count is None:
            return budget, None
        return budget, VideoClip(float(start), end, None if count is None else int(count))

    async def source(self, address: str, place: str, kind: str, *, must_read: bool) -> str | bytes | Path:
        """Resolves an address to a source of media.

        Args:
            kind: what it is, for the text that stands in its place.
            must_read: as in `part`.

        Raises:
            UnreadableError: this server doesn't read such addresses, or it is damaged, or can't be fetched.
        """
        if is_data_uri(address):
            return address
        scheme = address[: address[:8].find(":") + 1].lower()
        if scheme in ("http:", "https:"):
            if self._sources.fetch is None:
                message = "Addresses are not fetched here. Send the file as a data: URI, or start with --allow-urls."
                raise UnreadableError(400, f"{place}: {message}", place, kind=kind)
            try:
                return await self._fetched(self._sources.fetch, address, place, must_read)
            except ApiError as error:
                raise UnreadableError(error.status, error.message, error.param, kind=kind) from None
        if scheme == "file:":
            return _file(address, self._sources.root, place, kind)
        message = f"{place} must be a data:, https: or file: address; got {address[:40]!r}."
        raise UnreadableError(400, message, place, kind=kind)

    async def _fetched(self, fetch: Fetch, address: str, place: str, must_read: bool) -> bytes:
        self._num_fetched[must_read] += 1
        if self._num_fetched[must_read] > MAX_FETCHED:
            raise ApiError(400, f"{place}: at most {MAX_FETCHED} addresses of one request are fetched.", place)
        data = await fetch(address, place)
        most_bytes = MAX_FETCHED_BYTES if must_read else MAX_FETCHED_BYTES // 2
        if self._fetched_bytes + len(data) > most_bytes:
            most = f"{most_bytes / 2**20:,.0f} MiB"
            raise ApiError(413, f"{place}: the media at all addresses of this request are larger than {most}.", place)
        self._fetched_bytes += len(data)
        return data


def _frames(value: Any, place: str) -> list[str] | None:
    """The base64 texts of a video that comes as frames: a list, or vLLM's `data:video/jpeg`; None for a file."""
    is_listed = isinstance(value, str) and _JPEGS.match(value) is not None
    if not is_listed and not isinstance(value, list):
        return None
    if (value.count(",") if is_listed else len(value)) > _MAX_FRAMES:
        message = f"{place}: a video may have {_MAX_FRAMES:,} frames. Send the file instead."
        raise UnreadableError(400, message, place, kind="video")
    if isinstance(value, str):
        return value.partition(",")[2].split(",")
    addresses = [each.get("url") if isinstance(each, dict) else each for each in value]
    return [each.partition(",")[2] if is_data_uri(each) else "" for each in addresses]


def _file(address: str, root: Path | None, place: str, kind: str) -> Path:
    """The file of a `file:` address. All refusals have the same message, so that it reveals nothing of the disk."""
    refused = UnreadableError(400, f"{place}: there is no such file under --media-root.", place, kind=kind)
    parts = urlsplit(address)
    if root is None:
        message = f"{place}: files are not read here. Start with --media-root FOLDER."
        raise UnreadableError(400, message, place, kind=kind)
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
