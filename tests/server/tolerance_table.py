"""The table of docs/api.md that says how requests' fields are treated, made from the code.

`python -m tests.server.tolerance_table` prints it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from qwen35mm.server import constraints, other_names, parts
from qwen35mm.server.anthropic import blocks
from qwen35mm.server.anthropic import request as messages
from qwen35mm.server.openai import chat_completions, chat_messages
from qwen35mm.server.openai.responses import bodies, item_reader

CHAT, RESPONSES, MESSAGES, OPENAI = "chat completions", "Responses", "Anthropic's messages", "both of OpenAI"
FOLLOWED = constraints.NAMES
_MOST_COLUMNS = 68


def table() -> str:
    """The table, in Markdown. A long list goes on in a row without names."""
    names = [f"{other} = {own}" for other, own in other_names.NAMES.items()]
    rows: list[tuple[str, str, Iterable[str]]] = [
        ("read by another name", OPENAI, names),
        ("asks for thinking", OPENAI, other_names.THINKING),
        ("", MESSAGES, ("thinking", "output_config.effort")),
        ("what the answer follows", OPENAI, FOLLOWED),
        ("", MESSAGES, ("output_config.format", "output_format")),
        ("of one medium", OPENAI, (*parts.KWARGS, *parts.QWEN_NAMES)),
        ("roles", CHAT, chat_messages.ROLES),
        ("", RESPONSES, item_reader.ROLES),
        ("", MESSAGES, blocks.ROLES),
        ("content", CHAT, (*parts.TEXTS, *parts.IMAGES, *parts.VIDEOS, "file")),
        ("", RESPONSES, item_reader.KNOWN),
        ("", MESSAGES, blocks.FIELDS),
        ("ignored with a note", CHAT, chat_completions.HINTS),
        ("", RESPONSES, bodies.HINTS),
        ("", MESSAGES, messages.HINTS),
        ("refused", CHAT, chat_completions.REFUSED),
        ("", RESPONSES, bodies.REFUSED),
        ("", MESSAGES, messages.REFUSED),
    ]
    lines = ["| | where | fields |", "|---|---|---|"]
    for what, where, fields in rows:
        wrapped = textwrap.wrap(", ".join(f"`{name}`".replace(" ", "\xa0") for name in fields), _MOST_COLUMNS)
        for at, line in enumerate(wrapped):
            lines.append(f"| {'' if at else what} | {'' if at else where} | {line} |".replace("|  |", "| |"))
    return "\n".join(lines).replace("\xa0", " ").replace("|  |", "| |")


if __name__ == "__main__":
    print(table())
