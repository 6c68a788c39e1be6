"""Texts with placeholders: prompts, the system prompt, prefix, suffix and trigger word share one language.

`{name}`, `{stem}`, `{folder}`, `{width}`, `{height}`, `{duration}` (in seconds, such as 12.4), `{sidecar}` and
`{metadata.KEY}` stand for the item's values; dots in KEY lead into nested objects. In `{sidecar|DEFAULT}`, the default
replaces a missing or empty value. Without a default, a missing value fails the item. `{{` and `}}` are braces. Values
are inserted as they are, and their braces have no meaning.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import printable
from qwen35mm.errors import CaptioningError

PLACEHOLDERS = ("name", "stem", "folder", "width", "height", "duration", "sidecar", "metadata")
"""The placeholders; `metadata` takes a key, as in `{metadata.title}`."""

FACTS = frozenset({"width", "height", "duration", "sidecar"})
"""The placeholders that need a look at the medium or its sidecar."""

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class _Placeholder:
    """`written` is a name of `PLACEHOLDERS`; `metadata` includes its key."""

    written: str
    default: str | None


class Template:
    """A text with placeholders.

    Args:
        what: the text's name in errors, such as `prompt`.

    Raises:
        CaptioningError: an unknown placeholder, or a brace that is neither doubled nor a placeholder's.
    """

    def __init__(self, text: str, what: str = "prompt") -> None:
        self.text = text
        self._what = what
        self._parts = _parse(text, what)
        placeholders = (part.written for part in self._parts if isinstance(part, _Placeholder))
        self._needs = frozenset(written.partition(".")[0] for written in placeholders)

    def needs(self) -> frozenset[str]:
        """The `PLACEHOLDERS` in it."""
        return self._needs

    def fill(self, item: Item, facts: Mapping[str, Any] | None = None) -> str:
        """The text for an item.

        Args:
            facts: JSON values of `FACTS`, such as width and height in pixels, as displayed; a missing value is None.
                `facts` may be None if `needs()` contains none of them.

        Raises:
            CaptioningError: the item lacks the value of a placeholder without a default.
        """
        if all(isinstance(part, str) for part in self._parts):
            return "".join(map(str, self._parts))
        values = self._values(item, facts)
        return "".join(part if isinstance(part, str) else self._value(part, item, values) for part in self._parts)

    def defaulted(self, item: Item, facts: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The placeholders whose default `fill` takes, since the item lacks their values."""
        with_default = [part for part in self._parts if isinstance(part, _Placeholder) and part.default is not None]
        if not with_default:
            return ()
        values = self._values(item, facts)
        return tuple(part.written for part in with_default if not _as_text(_look_up(values, part.written)))

    def _values(self, item: Item, facts: Mapping[str, Any] | None) -> dict[str, Any]:
        assert facts is not None or not self.needs() & FACTS, "needs() says that this text has to know the medium"
        values = {"name": printable(item.name), "stem": printable(item.stem), "folder": printable(item.folder)}
        return {**values, "metadata": item.metadata, **(facts or {})}

    def _value(self, placeholder: _Placeholder, item: Item, values: Mapping[str, Any]) -> str:
        value = _as_text(_look_up(values, placeholder.written))
        if placeholder.default is not None and not value:
            return placeholder.default
        if value is None:
            raise CaptioningError(
                f"The {self._what} asks for {{{placeholder.written}}}, which {printable(item.name)} doesn't have. Give "
                f"the placeholder a default, as in {{{placeholder.written}|unknown}}, or leave the item out."
            )
        return value


def trigger_of(text: str) -> Template:
    """A trigger word's template. Raises CaptioningError for a wrong placeholder."""
    trigger = Template(text, "trigger word")
    if wrong := sorted(trigger.needs() & FACTS):
        raise CaptioningError(
            f"A trigger word can't have {{{wrong[0]}}}: it takes {{folder}}, {{name}}, {{stem}} and {{metadata.KEY}}."
        )
    return trigger


def new_path(text: str, what: str) -> str:
    """A path that a person gave, which takes no placeholders. One that exists is taken as it is.

    Raises:
        CaptioningError: a new path has placeholders, or a brace that isn't doubled.
    """
    if not _BRACES.search(text) or os.path.lexists(text):
        return text
    template = Template(text, what)
    if template.needs():
        raise CaptioningError(f"The {what} takes no placeholders; got {text!r}. Write literal braces twice.")
    return text.replace("{{", "{").replace("}}", "}")


def _parse(text: str, what: str) -> tuple[str | _Placeholder, ...]:
    parts: list[str | _Placeholder] = []
    end = 0
    for match in _BRACES.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        if match[1] is not None:
            parts.append(_placeholder(match[1]))
        elif match[0] in ("{{", "}}"):
            parts.append(match[0][0])
        else:
            raise CaptioningError(
                f"The {what} has a single {match[0]!r} after {text[: match.start()][-20:]!r}. Write it twice for a "
                f"brace: {match[0] * 2}"
            )
    parts.append(text[end:])
    return tuple(part for part in parts if part)


def _placeholder(inner: str) -> _Placeholder:
    written, bar, default = inner.partition("|")
    name, dot, key = written.partition(".")
    if name not in PLACEHOLDERS or bool(dot) != (name == "metadata") or (dot and not key):
        known = ", ".join("{metadata.KEY}" if known == "metadata" else f"{{{known}}}" for known in PLACEHOLDERS)
        raise CaptioningError(f"Unknown placeholder {{{written}}}. Known are {known}; write literal braces twice.")
    return _Placeholder(written, default if bar else None)


def _look_up(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key whose dots belong to it or lead into nested objects; None if there is none."""
    if key in values:
        return values[key]
    head, _, rest = key.partition(".")
    inner = values.get(head)
    return _look_up(inner, rest) if rest and isinstance(inner, Mapping) else None


def _as_text(value: Any) -> str | None:
    """A JSON value as a person would write it: a flat list with commas, any other list or object as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and not any(isinstance(part, list | tuple | Mapping | None) for part in value):
        return ", ".join(_as_text(part) or "" for part in value)
    return json.dumps(value, ensure_ascii=False)
