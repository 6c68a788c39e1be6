"""What is kept of conversations, checked when it is read from outside and before it is written.

Their JSON has every field under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import MediaPlan, VideoClip
from qwen35mm_preprocess.say import Said, Saying, is_said, say

Role = Literal["user", "assistant"]
ReplyStatus = Literal["running", "finished", "length", "stopped", "failed"]
AttachmentKind = Literal["image", "video", "text"]

T = TypeVar("T")
DIGEST = "^[0-9a-f]{64}$"
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
# Since the epoch, before the year 10000: what a calendar can show.
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
# Values are what they say: no "5" for 5.
KEPT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")


def _checked_words(words: str | dict[str, Any]) -> Said:
    if not is_said(words):
        raise ValueError("no text with its values")
    return heard(words)


# What `say` gives, or an English sentence.
Words = Annotated[str | dict[str, Any], AfterValidator(_checked_words)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Crop:
    """The part that was cut out of a picture, or of a frame of a video, which may be gone by now.

    digest      of the file that it was cut out of
    name        that file's
    box         left, top, right and bottom edge in pixels of the upright source
    size        (height, width) of that, in pixels
    time_s      the frame's, from the video's first; None for a picture
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
    plan        what an image or a video costs in the prompt, fixed when it was sent
    clip        what the person chose of a video; None is all of it, as the settings say
    crop_of     where a picture was cut out; None is a whole one
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
class Node:
    """One message.

    id          32 hex digits
    parent      the message before it; None for a first one, of which an edited conversation has several
    created_s   seconds since the epoch
    reasoning   a reply's thinking, without its marks
    thinking_s  seconds that the thinking took
    status      how a reply ended; "finished" for a message of the user
    error       why it failed, in words for a person
    notes       what a person should know of it: media that were reduced, a limit that was reached
    stats       of a reply: any JSON object
    model       the name of the model that wrote it
    first       the oldest message that a question's own prompt holds; None for as many as its conversation's
    edited      of a reply: whether a person has changed its words
    settings    of a reply: what it was made with (see `settings.made_with`), any JSON object; None where nobody knows
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


@dataclass(frozen=True)
class Conversation:
    """What is kept of a conversation beside its messages.

    updated_s   when a message was last added, changed or deleted, in seconds since the epoch
    head        the leaf that is shown; None when there is no message
    settings    any JSON object
    first       the oldest message that prompts still hold; None for all
    pinned      whether it stands above the others
    titled      whether the title stays: a person gave it, or the model has had its say
    unseen      whether a reply has ended since the conversation was last looked at
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
_PLAN = TypeAdapter(MediaPlan)


def checked_node(node: Node) -> Node:
    """The message itself. Raises ConversationDataError for a value that a field can't have."""
    try:
        return _NODE.validate_python(node)
    except ValidationError as error:
        raise ConversationDataError(
            say("A message's {place} can't be saved: it has the wrong form.", place=place_of(error))
        ) from None


def dump_object(values: object, what: str) -> str:
    """A JSON object as text; raises ConversationDataError, which names it by `what`, for anything else."""
    try:
        if isinstance(values, Mapping):
            return json.dumps(dict(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConversationDataError(
        say("{what} must be a JSON object: texts, finite numbers, lists and objects of those.", what=what)
    )


def load_object(text: str, what: str) -> dict[str, Any]:
    """The object that `dump_object` wrote; raises ConversationDataError where it is damaged."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConversationDataError(say("The database is damaged: {what} can't be read.", what=what))
    return values


def dump_words(words: str | dict[str, Any] | None) -> str | None:
    """What is said, as a text: an English sentence as it is."""
    return dump_object(words, "message.error") if isinstance(words, dict) else words


def load_words(text: str | None) -> Said | None:
    """What `dump_words` wrote."""
    if text is None or not text.startswith('{"text":'):
        return text
    try:
        return heard(json.loads(text))
    except (ValueError, RecursionError):
        return text


def heard(words: Any) -> Said:
    """What is said, as it was before it was kept."""
    if not is_said(words):
        return str(words)
    return Saying(words) if isinstance(words, dict) else words


def dump_plan(plan: MediaPlan | None) -> str | None:
    """A plan as text for `load_plan`."""
    return None if plan is None else _PLAN.dump_json(plan).decode()


def load_plan(text: str | None) -> MediaPlan | None:
    """A plan of another version is none: a new one can be made, and the conversation stays readable."""
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
        """One of another version is none: what it belongs to stays readable."""
        try:
            return None if text is None else self._adapter.validate_json(text)
        except ValidationError:
            return None

    def checked(self, value: object) -> T | None:
        """Of a JSON value. Raises ValueError where it is of another form."""
        return None if value is None else self._adapter.validate_json(json.dumps(value))


CLIPS = Form(VideoClip)
CROPS = Form(Crop)


def place_of(error: ValidationError) -> str:
    """Which value was refused, such as "attachments, 0, kind"."""
    return ", ".join(map(str, error.errors(include_url=False, include_context=False)[0]["loc"])) or "value"
