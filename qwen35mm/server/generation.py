"""Between protocols and a backend. Each protocol makes a `GenerationRequest`."""

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
    """A backend with its model in this process; the API needs its tokenizer and template."""

    @property
    def loaded(self) -> LoadedModel: ...


async def check_constraints(request: GenerationRequest, caller: Caller, backend: ServedBackend) -> None:
    """Checks that a reply can be constrained to the requested schema and calls.

    Raises:
        ApiError: 400, it can't; says why.
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
    """Who owns a request's text in the cache; None shares it with everybody.

    Args:
        salt: the client's own; only requests with the same salt get cache hits on its text.
    """
    return f"{caller.name}\0{salt}" if caller.name or salt else None


def conversation_of(caller: Caller, key: str | None) -> str | None:
    """The name of a request's conversation, from the client's key for its cache; None without one."""
    return None if not key else f"{caller.name}\0{key[:200]}"


async def num_tokens(request: GenerationRequest, backend: ServedBackend) -> int:
    """The number of prompt tokens of a request.

    Raises:
        PromptError, MediaError: the request can't become a prompt.
    """
    # As the backend decides it.
    never_thinks = request.params is not None and request.params.thinking_budget == 0
    thinking = False if never_thinks else request.enable_thinking
    count = functools.partial(backend.count_tokens, enable_thinking=thinking, tools=request.shown_tools or None)
    return await PROMPTS.run(count, request.messages)
