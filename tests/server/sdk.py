"""What the clients of OpenAI and Anthropic accept, strictly: nothing unknown, nothing missing."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(kind: Any, values: Any, added: Collection[str] = ()) -> None:
    """Fails unless values are strictly what the client's type says.

    Args:
        added: fields that the server adds.
    """
    unknown = set(_additions(_adapter(kind).validate_python(values, strict=True)))
    assert not unknown - set(added)


def _additions(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (value.model_extra or {}).keys()
        value = {name: getattr(value, name) for name in type(value).model_fields}
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _additions(each)


def events_in(stream: str) -> list[tuple[str | None, Any]]:
    """The names and the data of server-sent events; `[DONE]` stays a text."""
    events: list[tuple[str | None, Any]] = []
    for block in filter(None, stream.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        events.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events
