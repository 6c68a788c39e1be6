"""A conversation with its new reply, as the next turn will see it. The history commit computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwen35mm.contract import Finished, GenerationRequest, Message, Text
from qwen35mm.prompt.replies import is_cut, read_reply


def ended_by(request: GenerationRequest, text: str, reasoning: str, *, cut: bool = False) -> GenerationRequest | None:
    """The conversation with the whole reply; None without a reply.

    Args:
        text, reasoning: the reply's, without the beginning that it continues.
        cut: something else than the model ended the reply.
    """
    messages = request.messages
    if request.continue_reply:
        *messages, before = messages
        text, reasoning = before.text + text, (before.reasoning or "") + reasoning
    # The model writes calls in control tokens; in the next turn's messages only the template may write those.
    read = read_reply(text, reasoning or None, request.shown_tools, is_cut=cut)
    if not text and not read.calls:
        return None
    content = (Text(read.text),) if read.text or not read.calls else ()
    reply = Message("assistant", content, reasoning=read.reasoning or None, tool_calls=read.calls)
    return replace(request, messages=(*messages, reply), continue_reply=False)


def with_calls(event: Finished, tools: Sequence[Mapping[str, Any]]) -> Finished:
    """The end of a reply, with its calls separated from the texts."""
    result = event.result
    read = read_reply(result.text, result.reasoning, tools, is_cut=is_cut(result))
    return Finished(replace(result, text=read.text, reasoning=read.reasoning, tool_calls=read.calls))
