"""From what a protocol asks to what a backend answers. Each protocol makes a `GenerationRequest`."""

from __future__ import annotations

import functools
from typing import Protocol

from qwen35mm.contract import Backend, GenerationRequest
from qwen35mm.engine import constrained_calls
from qwen35mm.engine.grammar import REFUSAL
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import PROMPTS
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Caller


class ServedBackend(Backend, Protocol):
    """A backend with its model in this process: the API tells of its tokens and its template."""

    @property
    def loaded(self) -> LoadedModel: ...


async def check_constraints(request: GenerationRequest, caller: Caller, backend: ServedBackend) -> None:
    """Checks that a reply can be constrained to the schema and to the calls that are asked for.

    Raises:
        ApiError: 400, it can't, and why.
    """
    params = request.params or backend.loaded.generation
    try:
        await constrained_calls(request, params, backend.loaded, person=caller.name or None)
    except RequestError as error:
        named = ("tool_choice", *params.moves_end)
        other = None if str(error).startswith(REFUSAL) else "tools"
        param = max((name for name in named if str(error).startswith(name)), key=len, default=other)
        raise ApiError(400, str(error), param) from None


def tenant_of(caller: Caller, salt: str) -> str | None:
    """Whose words a request holds, for the cache; None is nobody's.

    Args:
        salt: the client's own: the cache finds its words for requests with the same salt only.
    """
    return f"{caller.name}\0{salt}" if caller.name or salt else None


async def num_tokens(request: GenerationRequest, backend: ServedBackend) -> int:
    """Tokens of the prompt that a request becomes.

    Raises:
        PromptError, MediaError: it can't become one.
    """
    count = functools.partial(
        backend.count_tokens, enable_thinking=request.enable_thinking, tools=request.shown_tools or None
    )
    return await PROMPTS.run(count, request.messages)
