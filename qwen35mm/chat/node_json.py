"""Messages as plain JSON values and back, and the checks of their fields: for the database and for archives."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args

from qwen35mm.chat.plan_json import plan_from_json, plan_to_json
from qwen35mm.chat.tree import Attachment, AttachmentKind, Node, ReplyStatus, Role
from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import MediaPlan, MediaPlanError

NODE_ID = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63
_YEAR_10000_S = 253_402_300_800


def node_to_json(node: Node) -> dict[str, Any]:
    """JSON values that `node_from_json` reads back as an equal message."""
    values = dict(vars(node))
    values["notes"] = list(node.notes)
    values["attachments"] = [attachment_to_json(attachment) for attachment in node.attachments]
    values["stats"] = None if node.stats is None else dict(node.stats)
    return values


def node_from_json(values: object) -> Node:
    """Reads what `node_to_json` wrote.

    Raises:
        ConversationDataError: a key is missing or unknown, or a value is of another type or impossible.
    """
    read = _object_with("message", values, {field.name for field in fields(Node)})
    for name in ("notes", "attachments"):
        if not isinstance(read[name], list):
            raise ConversationDataError(f"A message's {name} must be a list, not {_type_name(read[name])}.")
    read["notes"] = tuple(read["notes"])
    read["attachments"] = tuple(map(attachment_from_json, read["attachments"]))
    check_fields(read)
    return Node(**read)


def attachment_to_json(attachment: Attachment) -> dict[str, Any]:
    """JSON values that `attachment_from_json` reads back as an equal attachment."""
    return {**vars(attachment), "plan": None if attachment.plan is None else plan_to_json(attachment.plan)}


def attachment_from_json(values: object) -> Attachment:
    """Reads what `attachment_to_json` wrote; raises ConversationDataError for anything else."""
    read = _object_with("message's file", values, {field.name for field in fields(Attachment)})
    try:
        read["plan"] = None if read["plan"] is None else plan_from_json(read["plan"])
    except MediaPlanError as error:
        raise ConversationDataError(str(error)) from None
    attachment = Attachment(**read)
    _check_attachment(attachment)
    return attachment


def check_fields(values: Mapping[str, Any]) -> None:
    """Raises ConversationDataError for a value that a message's field of that name can't have."""
    for name, value in values.items():
        is_valid, expected = _FIELDS[name]
        if not is_valid(value):
            raise ConversationDataError(f"A message's {name} must be {expected}, not {_type_name(value)}.")
    for attachment in values.get("attachments", ()):
        _check_attachment(attachment)


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


def is_time(value: object) -> bool:
    """Whether a value is a number of seconds since the epoch, before the year 10000: what a calendar can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _YEAR_10000_S


def _check_attachment(attachment: Attachment) -> None:
    for name, (is_valid, expected) in _ATTACHMENT_FIELDS.items():
        value = getattr(attachment, name)
        if not is_valid(value):
            raise ConversationDataError(f"The {name} of a message's file must be {expected}, not {_type_name(value)}.")


def _object_with(what: str, values: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(values, dict) or set(values) != names:
        raise ConversationDataError(f"A {what} must be a JSON object with the keys {', '.join(sorted(names))}.")
    return dict(values)


def _type_name(value: object) -> str:
    return "a text of another form" if isinstance(value, str) else f"this {type(value).__name__}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_finite(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _matches(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _one_of(kind: object) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in get_args(kind)


def _tuple_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(item, kind) for item in value)


def _optional(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_valid(value)


_Checks = Mapping[str, tuple[Callable[[object], bool], str]]

_FIELDS: _Checks = {
    "id": (_matches(NODE_ID), "32 hex digits"),
    "parent": (_optional(_matches(NODE_ID)), "32 hex digits or none"),
    "role": (_one_of(Role), " or ".join(get_args(Role))),
    "created_s": (is_time, "a number of seconds since 1970"),
    "text": (_is_text, "a text"),
    "reasoning": (_is_text, "a text"),
    "thinking_s": (_optional(_is_finite), "a number of seconds or none"),
    "status": (_one_of(ReplyStatus), f"one of {', '.join(get_args(ReplyStatus))}"),
    "error": (_optional(_is_text), "a text or none"),
    "notes": (_tuple_of(str), "several texts"),
    "attachments": (_tuple_of(Attachment), "several files"),
    "stats": (_optional(lambda value: isinstance(value, Mapping)), "an object or none"),
    "model": (_optional(_is_text), "a text or none"),
}

_ATTACHMENT_FIELDS: _Checks = {
    "digest": (_matches(DIGEST), "64 hex digits"),
    "kind": (_one_of(AttachmentKind), f"one of {', '.join(get_args(AttachmentKind))}"),
    "name": (_is_text, "a text"),
    "num_bytes": (_is_count, "a number of bytes"),
    "plan": (_optional(lambda value: isinstance(value, MediaPlan)), "a media plan or none"),
}
