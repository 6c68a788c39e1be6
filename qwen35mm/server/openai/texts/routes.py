"""The routes for plain text, without a template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen35mm.contract import Event
from qwen35mm.errors import ContextTooLongError, PromptError
from qwen35mm.http.streams import frame
from qwen35mm.server.body import read_body
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.generation import ServedBackend, tenant_of
from qwen35mm.server.identity import system_fingerprint
from qwen35mm.server.keys import Caller
from qwen35mm.server.openai.texts import embeddings
from qwen35mm.server.openai.texts.completions import (
    Choice,
    ChoiceReader,
    CompletionRequest,
    Completions,
    choices_of,
    known_fields,
)
from qwen35mm.server.openai.texts.embeddings import EmbeddingRequest, VectorReader, check_dimensions
from qwen35mm.server.openai.texts.inputs import inputs_of
from qwen35mm.server.openapi import Route
from qwen35mm.server.service import Service


class TextBackend(Protocol):
    """Continues and embeds texts; `qwen35mm.backends.LocalBackend` describes each member."""

    def stream_prompt(self, prompt: Any, params: Any = None, **options: Any) -> AsyncGenerator[Event, None]: ...

    def stream_score(self, text: Any, **options: Any) -> AsyncGenerator[Event, None]: ...

    def stream_embedding(self, given: Any, **options: Any) -> AsyncGenerator[Event, None]: ...


class TextRoutes:
    """Answers completions and embeddings with one backend."""

    def __init__(self, service: Service, backend: ServedBackend) -> None:
        self._service = service
        self._backend = backend

    def routes(self) -> list[Route]:
        """The routes to add to the application."""
        return [
            Route("/v1/completions", "POST", self.completions, CompletionRequest),
            Route("/v1/embeddings", "POST", self.embeddings, EmbeddingRequest),
        ]

    async def completions(self, request: Request) -> Response:
        """Continue texts, without a template; `echo` and `logprobs` give the log-probabilities of the prompt."""
        caller = self._service.caller(request)
        body = await read_body(request, CompletionRequest, known_fields)
        model = self._service.check_model(body.model)
        loaded, tenant = self._backend.loaded, tenant_of(caller, body.cache_salt or "")
        readers = [
            ChoiceReader(choice, loaded.tokenizer, tells_ids=body.return_token_ids)
            for choice in choices_of(body, loaded)
        ]
        adapter = self._service.adapter_of(body.model)
        streams = [self._completion(caller, reader.choice, tenant, adapter) for reader in readers]
        usage = body.stream_options is not None and body.stream_options.include_usage
        fingerprint = system_fingerprint(self._backend.loaded, adapter)
        reply = Completions(model, readers, fingerprint=fingerprint, includes_usage=usage)
        if body.stream:
            return await self._service.stream_events(request, _chained(streams), reply.frames, lambda e: frame(e.body))
        await self._service.read(request, list(zip(streams, readers, strict=True)))
        return JSONResponse(reply.whole())

    async def embeddings(self, request: Request) -> Response:
        """Embed texts: final hidden states of a chat model, which wasn't trained for embeddings."""
        caller = self._service.caller(request)
        body = await read_body(request, EmbeddingRequest, embeddings.known_fields)
        model = self._service.check_model(body.model)
        loaded, tenant = self._backend.loaded, tenant_of(caller, body.cache_salt or "")
        check_dimensions(body.dimensions, loaded.config.text.hidden_size)
        inputs = inputs_of(body.input, "input")
        readers = [VectorReader() for _ in inputs]
        how = {"tenant": tenant, "adapter": self._service.adapter_of(body.model)}
        streams = [self._embedding(caller, given, how, is_more=at > 0) for at, given in enumerate(inputs)]
        await self._service.read(request, list(zip(streams, readers, strict=True)))
        return JSONResponse(embeddings.whole(model, readers, body.encoding_format))

    def _completion(
        self, caller: Caller, choice: Choice, tenant: str | None, adapter: str | None
    ) -> AsyncGenerator[Event, None]:
        def begin() -> AsyncGenerator[Event, None]:
            how: dict[str, Any] = {"control_tokens": True, "tenant": tenant, "adapter": adapter}
            if choice.params is None:
                return self._texts.stream_score(choice.prompt, num_top=choice.num_top or 0, **how)
            if choice.echoes and choice.num_top is not None:
                # The whole prompt is computed again for its log-probabilities, and a follow-up is unlikely.
                how |= {"prompt_logprobs": choice.num_top, "retain": "shared"}
            return self._texts.stream_prompt(choice.prompt, choice.params, finds_thinking=False, **how)

        return _about("prompt", self._service.in_turn(caller, begin, is_more=choice.index > 0))

    def _embedding(
        self, caller: Caller, given: Any, how: Mapping[str, Any], *, is_more: bool
    ) -> AsyncGenerator[Event, None]:
        def begin() -> AsyncGenerator[Event, None]:
            return self._texts.stream_embedding(given, **how)

        return _about("input", self._service.in_turn(caller, begin, is_more=is_more))

    @property
    def _texts(self) -> TextBackend:
        backend: Any = self._backend
        if not hasattr(backend, "stream_prompt"):
            raise ApiError(501, "This model takes only conversations.", code="unsupported")
        return backend


async def _about(field: str, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Passes events on. Errors of the prompt name `field`."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except ContextTooLongError as error:
        raise replace(api_error(error), param=field) from None
    except PromptError as error:
        raise ApiError(400, str(error), field) from None


async def _chained(streams: list[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Yields the events of one stream after the other."""
    for stream in streams:
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                yield event
