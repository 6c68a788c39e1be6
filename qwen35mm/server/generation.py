"""Between protocols and a backend. Each protocol makes a `GenerationRequest`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from qwen35mm.contract import Backend, GenerationRequest, Message
from qwen35mm.contract.request import person_of
from qwen35mm.engine import constrained_calls
from qwen35mm.engine.grammar import GRAMMAR_REFUSAL, REFUSAL
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import PROMPTS
from qwen35mm.prompt import is_carried, is_ordinary
from qwen35mm.server.constraints import without_effect
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import Notes


class ServedBackend(Backend, Protocol):
    """A backend with its model in this process; the API needs its tokenizer and template."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def has_ended(self) -> bool: ...

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_reply: bool = False,
    ) -> np.ndarray: ...


async def check_constraints(request: GenerationRequest, caller: Caller, backend: ServedBackend, notes: Notes) -> None:
    """Checks that a reply can be constrained to the requested schema, grammar and calls; notes what has no effect, and
    system messages that the template refuses.

    Raises:
        ApiError: 400, it can't; says why.
    """
    params = request.params or backend.loaded.generation
    try:
        calls = await constrained_calls(request, params, backend.loaded, person=caller.name or None)
    except RequestError as error:
        message = str(error)
        other = None if message.startswith((REFUSAL, GRAMMAR_REFUSAL)) else "tools"
        raise ApiError(400, message, "tool_choice" if message.startswith("tool_choice") else other) from None
    for name in without_effect(params, request):
        notes.ignore(name, "doesn't end a constrained answer, which ends where its schema, grammar or calls do")
    if params.grammar is not None and request.tool_choice == "auto" and request.shown_tools:
        notes.ignore("tools", "can't be called by an answer that follows a grammar")
    template, thinks = backend.loaded.template, request.enable_thinking
    thinks = template.default_enable_thinking if thinks is None else thinks
    how = {"enable_thinking": thinks, "options": request.template_options}
    ask = functools.partial(PROMPTS.run_for, caller.name or None, is_carried, request.messages, template, **how)
    if request.messages and not is_ordinary(request.messages) and await ask():
        told = (
            "have system messages that the model's chat template refuses: the first are joined, later ones become turns"
        )
        notes.change("messages", told)
    for said in () if calls is None else calls.unenforced:
        notes.change("tools", f"are strict, and this can't be enforced: {said}")


def tenant_of(caller: Caller, salt: str) -> str | None:
    """Who owns a request's text in the cache; None shares it with everybody.

    Args:
        caller: has equal shares with others, whatever the salts (`person_of`).
        salt: the client's own; only requests with the same salt get cache hits on its text.
    """
    return f"{caller.name}\0{salt}" if caller.name or salt else None


def conversation_of(caller: Caller, key: str | None) -> str | None:
    """The name of a request's conversation, from the client's key for its cache; None without one."""
    return None if not key else f"{caller.name}\0{key[:200]}"


async def num_tokens(request: GenerationRequest, backend: ServedBackend) -> int:
    """The number of prompt tokens of a request. Errors as `prompt_ids`."""
    return len(await prompt_ids(request, backend))


async def prompt_ids(
    request: GenerationRequest, backend: ServedBackend, *, add_generation_prompt: bool = True
) -> np.ndarray:
    """The prompt's token ids, int64 `[T]`.

    Raises:
        PromptError, MediaError: the request can't become a prompt.
    """
    # As the backend decides it.
    never_thinks = request.params is not None and request.params.thinking_budget == 0
    thinking = False if never_thinks and backend.loaded.template.switches_thinking else request.enable_thinking
    made = functools.partial(
        backend.prompt_ids,
        enable_thinking=thinking,
        template_options=request.template_options,
        tools=request.shown_tools or None,
        add_generation_prompt=add_generation_prompt,
        continue_reply=request.continue_reply,
    )
    return await PROMPTS.run_for(person_of(request.tenant), made, request.messages)
