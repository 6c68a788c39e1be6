"""A conversation and the reply that ends it, as its next turn will see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen35mm.contract import Finished, Message, Retain, Text
from qwen35mm.prompt.calls import read_calls


@dataclass(frozen=True, eq=False)
class Turn:
    """A conversation that a reply will end, or has ended, for the history commit behind it.

    Attributes:
        messages: with a plan for each medium.
        commits: whether its history is to be computed as the next turn will see it.
        retain: what stays cached of that.
        continues: the last message is the beginning of the reply.
    """

    messages: tuple[Message, ...]
    thinking: bool
    tools: Sequence[dict[str, Any]] | None = None
    conversation: str | None = None
    tenant: str | None = None
    commits: bool = True
    continues: bool = False
    retain: Retain = "conversation"

    def ended_by(self, text: str, reasoning: str) -> Turn | None:
        """The conversation with the whole reply; None where nothing is to be computed of it."""
        messages = self.messages
        if self.continues:
            *messages, before = messages
            text, reasoning = before.text + text, (before.reasoning or "") + reasoning
        if not self.commits or not text:
            return None
        # As the next turn's messages have it, in the control tokens that only a template may write.
        text, calls = read_calls(text, self.tools) if self.tools else (text, ())
        content = (Text(text),) if text or not calls else ()
        reply = Message("assistant", content, reasoning=reasoning or None, tool_calls=calls)
        return replace(self, messages=(*messages, reply), continues=False)


def with_calls(event: Finished, tools: Sequence[dict[str, Any]]) -> Finished:
    """The end of a reply with its calls apart from its text."""
    text, calls = read_calls(event.result.text, tools)
    return Finished(replace(event.result, text=text, tool_calls=calls))
