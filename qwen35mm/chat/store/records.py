"""Stored records of conversations, checked when they come from outside and before they are written.

Their JSON has the fields' names as keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import MediaPlan, VideoClip
from qwen35mm_preprocess.say import Said, Saying, is_said, say

Role = Literal["user", "assistant", "tool"]
ReplyStatus = Literal["running", "finished", "length", "stopped", "failed"]
AttachmentKind = Literal["image", "video", "text"]

T = TypeVar("T")
DIGEST = "^[0-9a-f]{64}$"
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
# Seconds since the epoch, before the year 10000, which calendars can show.
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
# Strict: no "5" for 5.
KEPT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")


def _checked_words(words: str | dict[str, Any]) -> Said:
    if not is_said(words):
        raise ValueError("no text with its values")
    return heard(words)


# The result of `say`, or an English sentence.
Words = Annotated[str | dict[str, Any], AfterValidator(_checked_words)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Crop:
    """Where a crop comes from: a picture or a frame of a video, which may be gone by now.

    digest      of the source file
    name        of the source file
    box         left, top, right and bottom edge in pixels of the upright source
    size        (height, width) of the upright source in pixels
    time_s      the frame's time from the first frame; None for a picture
    """

    __pydantic_config__ = KEPT

    digest: Annotated[str, Field(pattern=DIGEST)]
    name: str
    box: tuple[Count, Count, Count, Count]
    size: tuple[Count, Count]
    time_s: Annotated[float, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        (left, top, right, bottom), (height, width) = self.box, self.size
        if not (left < right <= width and top < bottom <= height):
            raise ValueError("A part of a picture must lie in it.")


@dataclass(frozen=True)
class Attachment:
    """A file that was sent with a message.

    digest      hex SHA-256 of the file's bytes: its key in the media store
    name        the file's name as the person knows it; shown, never used as a path
    plan        how an image or a video goes into the prompt, fixed when it was sent
    clip        the part of a video that the person chose; None is the whole video, sampled by the settings
    crop_of     the source of a crop; None for a whole picture
    """

    __pydantic_config__ = KEPT

    digest: Annotated[str, Field(pattern=DIGEST)]
    kind: AttachmentKind
    name: str
    num_bytes: Count
    plan: MediaPlan | None = None
    clip: VideoClip | None = None
    crop_of: Crop | None = None

    def __post_init__(self) -> None:
        if self.crop_of is not None and self.kind != "image":
            raise ValueError("Only a picture is cut out of something.")


@dataclass(frozen=True)
class Call:
    """A call that an answer makes of a tool.

    name        the tool's, as the model was told
    arguments   any JSON object
    digest      of the tool that the model was told of; None if there was none of this name
    """

    __pydantic_config__ = KEPT

    id: Annotated[str, Field(min_length=1, max_length=200)]
    name: Annotated[str, Field(min_length=1)]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None


def _told_apart(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    # What a person says of one call must not hold for another.
    if len({call.id for call in calls}) < len(calls):
        raise ValueError("two calls have one id")
    return calls


Calls = Annotated[tuple[Call, ...], AfterValidator(_told_apart)]


@dataclass(frozen=True)
class Node:
    """One message.

    id          32 hex digits
    parent      the message before it; None for a first one; edits make several first messages
    created_s   seconds since the epoch
    reasoning   a reply's thinking, without the tags
    thinking_s  seconds that the thinking took
    status      how a reply ended; "finished" for a user's message
    error       why it failed, in words for a person
    notes       for the person: media that were reduced, a limit that was reached
    stats       of a reply: any JSON object
    model       the name of the model that wrote it
    first       the oldest message in a question's own prompt; None takes the conversation's `first`
    edited      of a reply: whether a person has changed its text
    settings    of a reply: its settings (see `settings.made_with`), any JSON object; None if unknown
    calls       of a reply: the tools that it calls, at its end; each has a "tool" message with the result below it
    call        of a result: the id of its call
    """

    __pydantic_config__ = KEPT

    id: Id
    parent: Id | None
    role: Role
    created_s: Time
    text: str = ""
    reasoning: str = ""
    thinking_s: float | None = None
    status: ReplyStatus = "finished"
    error: Words | None = None
    notes: tuple[Words, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    stats: Mapping[str, Any] | None = None
    model: str | None = None
    first: Id | None = None
    edited: bool = False
    settings: Mapping[str, Any] | None = None
    calls: Calls = ()
    call: str | None = None

    @property
    def says_something(self) -> bool:
        """Of a reply: whether later prompts have it."""
        return bool(self.text or self.calls)


@dataclass(frozen=True)
class Conversation:
    """A conversation without its messages.

    updated_s   when a message was last added, changed or deleted, in seconds since the epoch
    head        the leaf that is shown; None without messages
    settings    any JSON object
    first       the oldest message in prompts; None for all
    pinned      whether it is listed above the others
    titled      whether the title is final: a person gave it, or the model was asked
    unseen      whether a reply has ended since the conversation was last opened
    """

    id: str
    title: str
    created_s: float
    updated_s: float
    head: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    first: str | None = None
    pinned: bool = False
    titled: bool = True
    unseen: bool = False


_NODE = TypeAdapter(Node)
_CALLS = TypeAdapter(Calls)
_PLAN = TypeAdapter(MediaPlan)


def checked_node(node: Node) -> Node:
    """The message, unchanged. Raises ConversationDataError for an invalid value."""
    try:
        return _NODE.validate_python(node)
    except ValidationError as error:
        raise ConversationDataError(
            say("A message's {place} can't be saved: it has the wrong form.", place=place_of(error))
        ) from None


def dump_object(values: object, what: str) -> str:
    """A JSON object as text. Raises ConversationDataError, which calls it `what`, for anything else."""
    try:
        if isinstance(values, Mapping):
            text = json.dumps(dict(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            # Half a character can't be stored.
            text.encode()
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConversationDataError(
        say("{what} must be a JSON object: texts, finite numbers, lists and objects of those.", what=what)
    )


def load_object(text: str, what: str) -> dict[str, Any]:
    """The object that `dump_object` wrote. Raises ConversationDataError if it is damaged."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConversationDataError(say("The database is damaged: {what} can't be read.", what=what))
    return values


def dump_words(words: str | dict[str, Any] | None) -> str | None:
    """A `Said` as text; leaves an English sentence unchanged."""
    return dump_object(words, "message.error") if isinstance(words, dict) else words


def load_words(text: str | None) -> Said | None:
    """The `Said` that `dump_words` wrote."""
    if text is None or not text.startswith('{"text":'):
        return text
    try:
        return heard(json.loads(text))
    except (ValueError, RecursionError):
        return text


def dump_calls(calls: tuple[Call, ...]) -> str | None:
    """A reply's calls as text for `load_calls`. Raises ConversationDataError."""
    if not calls:
        return None
    return dump_object({"calls": [{**vars(call)} for call in calls]}, "message.calls")


def call_words(calls: tuple[Call, ...]) -> str | None:
    """What the search finds of a reply's calls: the tools' names, and the values without their JSON."""
    words: list[str] = []
    left: list[Any] = [value for call in reversed(calls) for value in (call.arguments, call.name)]
    while left:
        value = left.pop()
        if isinstance(value, Mapping | list | tuple):
            left += reversed([*(value.values() if isinstance(value, Mapping) else value)])
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            words.append(str(value).replace("\0", " "))
    return "\n".join(words) or None


def load_calls(text: str | None) -> tuple[Call, ...]:
    """The calls that `dump_calls` wrote. Raises ConversationDataError if they are damaged."""
    if text is None:
        return ()
    try:
        return _CALLS.validate_json(json.dumps(load_object(text, "message.calls").get("calls")))
    except ValidationError:
        raise ConversationDataError(
            say("The database is damaged: {what} can't be read.", what="message.calls")
        ) from None


def heard(words: Any) -> Said:
    """The `Said` of a stored JSON value; the value as text if it is none."""
    if not is_said(words):
        return str(words)
    return Saying(words) if isinstance(words, dict) else words


def dump_plan(plan: MediaPlan | None) -> str | None:
    """A plan as text for `load_plan`."""
    return None if plan is None else _PLAN.dump_json(plan).decode()


def load_plan(text: str | None) -> MediaPlan | None:
    """The plan; None for another version's, so that the conversation stays readable and is planned anew."""
    try:
        plan = None if text is None else _PLAN.validate_json(text)
    except ValidationError:
        return None
    # A missing key was unknown to the version that wrote the plan.
    return plan if plan is None or _PLAN.dump_python(plan, mode="json") == json.loads(text or "") else None


class Form(Generic[T]):
    """A part of a record as a JSON text, or as a value from outside."""

    def __init__(self, kind: type[T]) -> None:
        self._adapter = TypeAdapter(kind)

    def dump(self, part: T | None) -> str | None:
        """A text for `load`."""
        return None if part is None else self._adapter.dump_json(part).decode()

    def load(self, text: str | None) -> T | None:
        """The part; None for another version's, so that the record stays readable."""
        try:
            return None if text is None else self._adapter.validate_json(text)
        except ValidationError:
            return None

    def checked(self, value: object) -> T | None:
        """The part of a JSON value. Raises ValueError for an invalid one."""
        return None if value is None else self._adapter.validate_json(json.dumps(value))


def file_name(name: str) -> str:
    """The last component of a name, without control and direction characters."""
    name = re.sub(r"[\x00-\x1f\x7f\u202a-\u202e\u2066-\u2069]", "", name.replace("\\", "/").rsplit("/", 1)[-1])
    return name.strip()[-120:] or "file"


CLIPS = Form(VideoClip)
CROPS = Form(Crop)


def place_of(error: ValidationError) -> str:
    """Which value is invalid, for example "attachments, 0, kind"."""
    return ", ".join(map(str, error.errors(include_url=False, include_context=False)[0]["loc"])) or "value"
