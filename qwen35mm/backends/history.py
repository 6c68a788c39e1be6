"""A conversation with its new reply, as the next turn will see it. The history commit computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwen35mm.contract import Finished, GenerationRequest, Message, Text
from qwen35mm.prompt.calls import read_calls


def ended_by(request: GenerationRequest, text: str, reasoning: str) -> GenerationRequest | None:
    """The conversation with the whole reply; None without a reply.

    Args:
        text, reasoning: the reply's, without the beginning that it continues.
    """
    messages = request.messages
    if request.continue_reply:
        *messages, before = messages
        text, reasoning = before.text + text, (before.reasoning or "") + reasoning
    if not text:
        return None
    # The model writes calls in control tokens; in the next turn's messages only the template may write those.
    tools = request.shown_tools
    text, calls = read_calls(text, tools) if tools else (text, ())
    content = (Text(text),) if text or not calls else ()
    reply = Message("assistant", content, reasoning=reasoning or None, tool_calls=calls)
    return replace(request, messages=(*messages, reply), continue_reply=False)


def with_calls(event: Finished, tools: Sequence[Mapping[str, Any]]) -> Finished:
    """The end of a reply, with its calls separated from the text."""
    text, calls = read_calls(event.result.text, tools)
    return Finished(replace(event.result, text=text, tool_calls=calls))
