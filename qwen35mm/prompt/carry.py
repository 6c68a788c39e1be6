"""Carries messages that a chat template refuses or leaves out.

The family's templates take one system message, in first place, and need a user's message. Others are carried in turns
that the template writes for a user and that are rewritten afterwards. What a message becomes depends on the messages
before it alone, so a conversation that goes on keeps its cuts:

1. Several system messages at the beginning become one, with an empty line between two.
2. A later one becomes a system turn at its place. For the template it is a tool's result, which doesn't make it leave
   out the thinking before it, as a person's message does. After an answer without calls it is a person's message, since
   a new exchange begins there.
3. One with media becomes a user turn at its place.
4. Without a user's message, an empty one follows the system message. Its turn is taken out of the text again.

The marks are private-use characters that occur in no outside text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qwen35mm.contract import Message, Text
from qwen35mm.prompt.outside import template_message
from qwen35mm.prompt.template import ChatTemplate

_TURN = "<|im_start|>user\n"
_TURN_END = "<|im_end|>\n"
_SYSTEM_TURN = "<|im_start|>system\n"
# Around a user's message that the family's templates don't take for a question.
_RESULT, _RESULT_END = "<tool_response>", "</tool_response>"

NUM_MARKS = 4


def num_leading(messages: Sequence[Message]) -> int:
    """System messages at the beginning that can be one system turn."""
    others = (at for at, message in enumerate(messages) if message.role != "system" or message.media)
    return next(others, len(messages))


def is_ordinary(messages: Sequence[Message]) -> bool:
    """Whether the family's templates take the messages as they are."""
    later = any(message.role == "system" for message in messages[1:])
    first = messages[0]
    return (
        not later
        and not (first.role == "system" and first.media)
        and first.role != "tool"
        and any(message.role == "user" for message in messages)
    )


def is_carried(
    messages: Sequence[Message], template: ChatTemplate, *, enable_thinking: bool, options: Mapping[str, Any]
) -> bool:
    """Whether system messages reach the model otherwise than the template would write them.

    May render the template, unless the messages are ordinary.
    """
    number = num_leading(messages)
    if number > 1 and not template.takes_leading(number):
        return True
    later = any(message.role == "system" for message in messages[number:])
    return later and not template.takes_later(enable_thinking=enable_thinking, options=options)


class Carrier:
    """The messages of one prompt in the form for its template.

    Args:
        hide: puts stand-ins into outside text.
        marks: NUM_MARKS characters that occur in no outside text.
    """

    def __init__(self, hide: Callable[[str], str], marks: Sequence[str]) -> None:
        self._hide = hide
        self._start, self._kept, self._stop, self._nobody = marks

    def carried(
        self, messages: Sequence[Message], template: ChatTemplate, *, takes_later: bool
    ) -> list[dict[str, Any]]:
        """The template's messages.

        Args:
            takes_later: whether it gets system messages as they are if others precede them.
        """
        number = num_leading(messages)
        leading = messages[:number]
        if number > 1 and not template.takes_leading(number):
            texts = [message.text.strip() for message in leading]
            leading = [Message("system", (Text("\n\n".join(filter(None, texts))),))]
        given = [template_message(message, self._hide) for message in leading]
        rest = messages[number:]
        roles = {message.role for message in rest}
        if messages[0].role == "tool" or ("user" not in roles and template.needs_query):
            given.append({"role": "user", "content": self._nobody})
        before: Message | None = None
        for message in rest:
            if message.role != "system":
                before = message
            elif message.media or not takes_later:
                asks = before is not None and before.role == "assistant" and not before.tool_calls
                given += self._turn(message, asks=asks)
                continue
            given.append(template_message(message, self._hide))
        return given

    def rewritten(self, rendered: str) -> str:
        """The template's text with the carried turns as they are meant."""
        rendered = rendered.replace(f"{_TURN}{self._nobody}{_TURN_END}", "").replace(self._nobody, "")
        for wrapper in (_RESULT, ""):
            rendered = rendered.replace(f"{_TURN}{wrapper}{self._start}", _SYSTEM_TURN)
            # Other turns than the family's stay a user's.
            for start in (self._start, self._kept):
                rendered = rendered.replace(wrapper + start, "")
        return rendered.replace(self._stop + _RESULT_END, "").replace(self._stop, "")

    def _turn(self, message: Message, *, asks: bool) -> list[dict[str, Any]]:
        """The user's message that stands for a system message; none if that is empty."""
        start, stop = ("", "") if asks else (_RESULT, _RESULT_END)
        if message.media:
            parts = template_message(message, self._hide)["content"]
            first, last = ({"type": "text", "text": text} for text in (start + self._kept, self._stop + stop))
            return [{"role": "user", "content": [first, *parts, last]}]
        if text := message.text.strip():
            return [{"role": "user", "content": start + self._start + self._hide(text) + self._stop + stop}]
        return []
