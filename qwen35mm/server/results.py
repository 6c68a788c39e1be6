"""Puts tools' results in the order of their calls: templates write no ids, so the order says which is whose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qwen35mm.contract import Message, Text

NO_RESULT = "(no result)"


def in_order_of_calls(messages: Sequence[Message], *, moves_media: bool = True) -> list[Message]:
    """A conversation in which each answer's results stand in the order of its calls.

    A call without a result gets one that says so if a later call has one. Results of unknown calls stay where they are.

    Args:
        moves_media: whether results with media may be moved.
    """
    found: list[Message] = []
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        run = list(group)
        if role == "tool" and found and found[-1].role == "assistant":
            has_media = any(message.media for message in run)
            run = run if has_media and not moves_media else _ordered(found[-1], run)
        found += run
    return found


def _ordered(answer: Message, results: list[Message]) -> list[Message]:
    ids = [call.id for call in answer.tool_calls]
    told = [result.tool_call_id for result in results]
    is_unsure = None in ids or None in told or len({*ids}) < len(ids) or len({*told}) < len(told)
    if is_unsure or not {*told} <= {*ids}:
        return results
    by_id = {result.tool_call_id: result for result in results}
    places = {name: at for at, name in enumerate(ids)}
    last = max(places[name] for name in told)
    missing = (Text(NO_RESULT),)
    return [by_id.get(each) or Message("tool", missing, tool_call_id=each) for each in ids[: last + 1]]
