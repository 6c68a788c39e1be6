"""What any protocol asks of the model: each is a translation into one of these."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from qwen35mm.contract import EncodedMedium, Event, Image, Message, SamplingParams, Text, Video
from qwen35mm.engine import held_calls
from qwen35mm.engine.grammar import REFUSAL
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import MEDIA, PROMPTS
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Caller
from qwen35mm_preprocess import MediaBudget, MediaProcessor, PreparedMedia, VideoClip


class Backend(Protocol):
    """What answers; see `qwen35mm.backends.LocalBackend` for what each member means."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def media(self) -> MediaProcessor: ...

    @property
    def context_length(self) -> int: ...

    def memory(self) -> dict[str, Any]: ...

    def count_tokens(
        self,
        messages: list[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> int: ...

    def stream(
        self,
        messages: list[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        conversation: str | None = None,
        tenant: str | None = None,
        continue_reply: bool = False,
    ) -> AsyncGenerator[Event, None]: ...


@dataclass(frozen=True)
class MediumOptions:
    """How a medium is read, where the client says so; None is as the server reads it."""

    budget: MediaBudget | None = None
    num_frames: int | None = None


@dataclass(frozen=True)
class Asked:
    """One request, whatever protocol it came in.

    Attributes:
        tools: definitions in OpenAI's form.
        tool_choice, parallel_tool_calls: as the backend's `stream` takes them.
        media: how each medium is read, in order of appearance.
        salt: the client's own: what it says is never found in the cache by a request with another one.
        conversation: its name, where it has one: a newer turn takes the place of an older one's unfinished history.
    """

    caller: Caller
    messages: list[Message]
    params: SamplingParams
    enable_thinking: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    continues: bool = False
    media: tuple[MediumOptions, ...] = ()
    salt: str = ""
    conversation: str | None = None


async def events_of(asked: Asked, backend: Backend) -> AsyncGenerator[Event, None]:
    """The events of a request. Leaving the iterator ends its work within one step.

    Raises:
        Qwen35mmError: as the backend's `stream`.
    """
    messages = await _planned(asked, backend.media)
    stream = backend.stream(
        messages,
        asked.params,
        enable_thinking=asked.enable_thinking,
        tools=list(asked.tools) or None,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        conversation=asked.conversation,
        tenant=tenant_of(asked.caller, asked.salt),
        continue_reply=asked.continues,
    )
    async with contextlib.aclosing(stream) as events:
        async for event in events:
            yield event


async def check_held(asked: Asked, backend: Backend) -> None:
    """Checks that a reply can be held to the schema and to the calls that are asked for.

    Raises:
        ApiError: 400, it can't, and why.
    """
    try:
        await held_calls(
            asked.tools,
            asked.tool_choice,
            asked.params,
            backend.loaded,
            parallel=asked.parallel_tool_calls,
            person=asked.caller.name or None,
        )
    except RequestError as error:
        named = ("tool_choice", *asked.params.moves_end)
        other = None if str(error).startswith(REFUSAL) else "tools"
        param = max((name for name in named if str(error).startswith(name)), key=len, default=other)
        raise ApiError(400, str(error), param) from None


def tenant_of(caller: Caller, salt: str) -> str | None:
    """Whose words a request holds, for the cache; None is nobody's."""
    return f"{caller.name}\0{salt}" if caller.name or salt else None


async def num_tokens(asked: Asked, backend: Backend) -> int:
    """Tokens of the prompt that a request becomes.

    Raises:
        PromptError, MediaError: it can't become one.
    """
    messages, tools = await _planned(asked, backend.media), list(asked.tools) or None
    count = functools.partial(backend.count_tokens, enable_thinking=asked.enable_thinking, tools=tools)
    return await PROMPTS.run(count, messages)


async def _planned(asked: Asked, media: MediaProcessor) -> list[Message]:
    """The messages, with a plan for each medium that the client has read in its own way."""
    options = iter(asked.media)

    async def planned(part: Text | Image | Video) -> Text | Image | Video:
        how = None if isinstance(part, Text) else next(options, None)
        if isinstance(part, Text) or how is None or how == MediumOptions():
            return part
        clip = VideoClip(num_frames=how.num_frames) if how.num_frames and part.kind == "video" else None
        processor = replace(media, budget=how.budget or media.budget)
        assert not isinstance(part.source, PreparedMedia | EncodedMedium), "a client sends files"
        return replace(part, plan=await MEDIA.run(processor.plan, part.source, part.kind, clip))

    return [
        replace(message, content=tuple([await planned(part) for part in message.content])) for message in asked.messages
    ]
