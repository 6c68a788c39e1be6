"""Token ids of texts and conversations, and the text of either."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen35mm.http.streams import while_connected
from qwen35mm.pools import PROMPTS
from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS
from qwen35mm.server.body import read_object, validated
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import STRICT
from qwen35mm.server.generation import ServedBackend, prompt_ids
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import Notes, notes_of
from qwen35mm.server.openai import chat_completions
from qwen35mm.server.openapi import Route
from qwen35mm.server.parts import Sources
from qwen35mm.server.service import Service

_NUMBERS_AT_ONCE = 10_000
P = ParamSpec("P")
T = TypeVar("T")


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize: a text, or a conversation as for chat completions."""

    model_config = STRICT

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_OUTSIDE_CHARS)]
    return_token_strs: bool = False
    # A text has no special tokens around it, as with the family's tokenizers.
    add_special_tokens: bool | None = None


class ConversationRequest(chat_completions.ChatCompletionRequest):
    """The body of POST /apply-template: a conversation as for chat completions."""

    add_generation_prompt: bool = True
    return_token_strs: bool = False
    add_special_tokens: bool | None = None


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model_config = STRICT

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_OUTSIDE_CHARS)]


class TokenRoutes:
    """Answers with one backend's tokenizer and template."""

    def __init__(self, service: Service, backend: ServedBackend, sources: Sources) -> None:
        self._service = service
        self._backend = backend
        self._sources = sources

    def routes(self) -> list[Route]:
        """The routes to add to the application."""
        return [
            Route("/tokenize", "POST", self.tokenize, TokenizeRequest),
            Route("/detokenize", "POST", self.detokenize, DetokenizeRequest),
            Route("/apply-template", "POST", self.apply_template, ConversationRequest),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, in which control tokens count as plain text, or of a conversation."""
        caller = self._service.caller(request)
        values, notes = await read_object(request), notes_of(request)
        if "messages" in values:
            body = validated(values, ConversationRequest, notes, chat_completions.known_fields)
            ids = await self._ids(request, body, caller, notes)
            return await self._tokens(request, caller, ids, tells_texts=body.return_token_strs)
        # llama.cpp's name.
        if "content" in values and "prompt" not in values:
            values["prompt"] = values.pop("content")
        text = validated(values, TokenizeRequest, notes)
        self._service.check_model(text.model)
        try:
            ids = await self._run(request, caller, self._backend.loaded.tokenizer.encode_plain, text.prompt)
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from None
        return await self._tokens(request, caller, ids, tells_texts=text.return_token_strs)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        caller = self._service.caller(request)
        body = validated(await read_object(request), DetokenizeRequest, notes_of(request))
        self._service.check_model(body.model)
        tokenizer = self._backend.loaded.tokenizer
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < tokenizer.vocab_size:
            raise ApiError(400, f"tokens must be ids from 0 to {tokenizer.vocab_size - 1:,}.", "tokens")
        text = await self._run(request, caller, tokenizer.decode, body.tokens, skip_special=False)
        return JSONResponse({"prompt": text})

    async def apply_template(self, request: Request) -> Response:
        """The text of a conversation's prompt, as the model reads it."""
        caller, notes = self._service.caller(request), notes_of(request)
        body = validated(await read_object(request), ConversationRequest, notes, chat_completions.known_fields)
        ids = await self._ids(request, body, caller, notes)
        text = await self._run(request, caller, self._backend.loaded.tokenizer.decode, ids, skip_special=False)
        return JSONResponse({"prompt": text})

    async def _ids(self, request: Request, body: ConversationRequest, caller: Caller, notes: Notes) -> list[int]:
        self._service.check_model(body.model)
        asking = chat_completions.asked_of(body, caller, self._backend, self._sources, notes)
        asked = await while_connected(request, asking)
        how = {"add_generation_prompt": body.add_generation_prompt}
        return (await while_connected(request, prompt_ids(asked, self._backend, **how))).tolist()

    async def _tokens(self, request: Request, caller: Caller, ids: list[int], *, tells_texts: bool) -> Response:
        content = await self._run(request, caller, self._written, ids, tells_texts)
        return Response(content, media_type="application/json")

    async def _run(
        self, request: Request, caller: Caller, function: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T:
        """Calls the function in the caller's turn. Raises ClientDisconnect: the client hung up."""
        return await while_connected(request, PROMPTS.run_for(caller.name or None, function, *args, **named))

    def _written(self, ids: list[int], tells_texts: bool) -> str:
        """The body of `tokenize`'s answer, written in chunks: one call for millions of numbers would block others."""
        listed = ",".join(
            ",".join(map(str, ids[at : at + _NUMBERS_AT_ONCE])) for at in range(0, len(ids), _NUMBERS_AT_ONCE)
        )
        tokenizer = self._backend.loaded.tokenizer
        texts: Any = [tokenizer.decode([each], skip_special=False) for each in ids] if tells_texts else None
        rest = f'"count":{len(ids)},"max_model_len":{self._backend.context_length},"token_strs":{json.dumps(texts)}'
        return f'{{"tokens":[{listed}],{rest}}}'
