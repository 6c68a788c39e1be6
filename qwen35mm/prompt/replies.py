"""Whole replies: the answer, the thinking and the calls in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen35mm.contract import Result, ToolCall
from qwen35mm.prompt.calls import read_calls


@dataclass(frozen=True)
class ReadReply:
    """A reply's parts; a call is in neither text."""

    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...] = ()


def read_reply(
    text: str, reasoning: str | None, tools: Sequence[Mapping[str, Any]], *, is_cut: bool = False
) -> ReadReply:
    """Finds the calls of a reply.

    A model may call before it closes its thinking: without any answer, calls at the thinking's very end count.

    Args:
        tools: those that may be called; without any, everything is text.
        is_cut: a limit or the request's stop ended the reply.
    """
    if not tools:
        return ReadReply(text, reasoning)
    if text or not reasoning:
        text, calls = read_calls(text, tools, is_cut=is_cut)
        return ReadReply(text, reasoning, calls)
    thought, calls = read_calls(reasoning, tools, is_cut=is_cut, only_last=True)
    return ReadReply(text, thought, calls)


def is_cut(result: Result) -> bool:
    """Whether something else than the model ended the reply."""
    return result.finish_reason != "stop" or result.stopped_by is not None
