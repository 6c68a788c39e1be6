"""What is kept of conversations, checked when it is read from outside and before it is written.

Their JSON has every field under its own name; a media plan is what `MediaPlan.to_dict` makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, Strict, TypeAdapter, ValidationError

from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import MediaPlan, MediaPlanError

Role = Literal["user", "assistant"]
ReplyStatus = Literal["running", "finished", "length", "stopped", "failed"]
AttachmentKind = Literal["image", "video", "text"]

DIGEST = "^[0-9a-f]{64}$"
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
# Since the epoch, before the year 10000: what a calendar can show.
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
# Values are what they say: no "5" for 5.
_KEPT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")
Count = Annotated[int, Field(ge=0, lt=2**63)]


_Sizes = Annotated[tuple[Count, Count], Strict(False)]
_Counts = Annotated[tuple[Count, ...], Strict(False)]
_Numbers = Annotated[tuple[float, ...], Strict(False)]
_Texts = Annotated[tuple[str, ...], Strict(False)]


# A list counts as a tuple, and nothing else does.
class _PlanValues(BaseModel):
    """The types of what `MediaPlan.to_dict` writes; `MediaPlan` checks what they say together."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    kind: str
    source_size: _Sizes
    size: _Sizes
    grid_thw: Annotated[tuple[Count, Count, Count], Strict(False)]
    num_tokens: Count
    num_prompt_tokens: Count
    cache_bytes: Count
    processing: str
    source_frames: Count | None
    duration_s: float | None
    frame_indices: _Counts | None
    frame_times_s: _Numbers | None
    timestamps_s: _Numbers | None
    similar_difference: float | None
    notes: _Texts
    digest: str | None
    unit_digests: _Texts | None


def read_plan(values: object) -> MediaPlan | None:
    """A plan by its JSON values, None by None, and a plan by itself.

    Raises:
        MediaPlanError: it is damaged or of another version.
    """
    if values is None or isinstance(values, MediaPlan):
        return values
    try:
        return MediaPlan.from_dict(_PlanValues.model_validate(values).model_dump())
    except ValidationError as error:
        raise MediaPlanError(
            f"The media plan is damaged: its {place_of(error)} can't be used. Make a new plan."
        ) from None


@dataclass(frozen=True)
class Attachment:
    """A file that was sent with a message.

    digest      hex SHA-256 of the file's bytes: its key in the media store
    name        the file's name as the person knows it; shown, never used as a path
    plan        what an image or a video costs in the prompt, fixed when it was sent
    """

    __pydantic_config__ = _KEPT

    digest: Annotated[str, Field(pattern=DIGEST)]
    kind: AttachmentKind
    name: str
    num_bytes: Count
    plan: Annotated[MediaPlan | None, PlainValidator(read_plan)] = None


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
    """

    __pydantic_config__ = _KEPT

    id: Id
    parent: Id | None
    role: Role
    created_s: Time
    text: str = ""
    reasoning: str = ""
    thinking_s: float | None = None
    status: ReplyStatus = "finished"
    error: str | None = None
    notes: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    stats: Mapping[str, Any] | None = None
    model: str | None = None


@dataclass(frozen=True)
class Conversation:
    """What is kept of a conversation beside its messages.

    updated_s   when a message was last added, changed or deleted, in seconds since the epoch
    head        the leaf that is shown; None when there is no message
    settings    any JSON object
    first       the oldest message that prompts still hold; None for all
    """

    id: str
    title: str
    created_s: float
    updated_s: float
    head: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    first: str | None = None


_NODE = TypeAdapter(Node)


def checked_node(node: Node) -> Node:
    """The message itself. Raises ConversationDataError for a value that a field can't have."""
    try:
        return _NODE.validate_python(node)
    except ValidationError as error:
        raise ConversationDataError(f"A message's {place_of(error)} can't be kept: it is of another form.") from None


def node_values(node: Node) -> dict[str, Any]:
    """JSON values that `read_node` reads back as an equal message."""
    files = [{**vars(file), "plan": None if file.plan is None else file.plan.to_dict()} for file in node.attachments]
    stats = None if node.stats is None else dict(node.stats)
    return {**vars(node), "notes": list(node.notes), "attachments": files, "stats": stats}


def read_node(values: object) -> Node:
    """A message by its JSON values.

    Raises:
        ConversationDataError: they are none that `node_values` gives: no key is left out, and none is added.
    """
    _check_keys("message", values, Node)
    files = values["attachments"]  # pyright: ignore[reportIndexIssue]
    for file in files if isinstance(files, list) else ():
        _check_keys("message's file", file, Attachment)
    try:
        return _NODE.validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConversationDataError(f"A message's {place_of(error)} is of another form than is kept here.") from None
    except MediaPlanError as error:
        raise ConversationDataError(str(error)) from None


def dump_object(values: object, what: str) -> str:
    """A JSON object as text; raises ConversationDataError, which names it by `what`, for anything else."""
    try:
        if isinstance(values, Mapping):
            return json.dumps(dict(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConversationDataError(f"The {what} must be a JSON object: texts, finite numbers, lists and objects of those.")


def load_object(text: str, what: str) -> dict[str, Any]:
    """The object that `dump_object` wrote; raises ConversationDataError where it is damaged."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConversationDataError(f"The database is damaged: the {what} can't be read.")
    return values


def load_plan(text: str | None) -> MediaPlan | None:
    """A plan of another version is none: a new one can be made, and the conversation stays readable."""
    try:
        return None if text is None else read_plan(json.loads(text))
    except (MediaPlanError, ValueError):
        return None


def _check_keys(what: str, values: object, kind: type) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        raise ConversationDataError(f"A {what} must be a JSON object with the keys {', '.join(sorted(names))}.")


def place_of(error: ValidationError) -> str:
    """Which value was refused, such as "attachments, 0, kind"."""
    return ", ".join(map(str, error.errors(include_url=False, include_context=False)[0]["loc"])) or "value"
