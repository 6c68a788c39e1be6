"""The application without a socket, on a backend that reads what it is asked like the real one and answers at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import torch
from fastapi import FastAPI

from qwen35mm.backends.model_backend import ModelBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import (
    CacheReport,
    Event,
    Finished,
    GenerationRequest,
    Prefilled,
    PromptRead,
    Result,
    TextDelta,
    TokenLogprob,
)
from qwen35mm.engine import EngineSettings, Request

TEXT = "A red circle."


class Instant(ModelBackend):
    """The bundled model's backend as far as the prompt; what it would compute is `TEXT`."""

    def _start(self, settings: EngineSettings, cache: CacheSettings) -> None:
        self.context_length = 4096

    async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
        ids = work.prompt.token_ids.tolist()
        num_tokens = len(ids)
        if work.reading is not None:
            told = [TokenLogprob("x", -1.0, (120,), each) for each in ids[work.reading.start :]]
            states = torch.ones(1, self.loaded.config.text.hidden_size)
            yield PromptRead(tuple(ids), tuple(told), states, CacheReport())
        if not work.replies:
            return
        yield Prefilled(num_tokens, 0.001, 1, CacheReport())
        asked = work.params.logprobs is not None
        logprobs = (TokenLogprob(TEXT, -0.5, tuple(TEXT.encode()), 1),) if asked else ()
        yield TextDelta(TEXT, "answer", 1, 0.0, logprobs)
        result = Result(TEXT, None, "stop", (1,), (), num_tokens, 1, 0.001, None)
        yield Finished(replace(result, logprobs=logprobs if asked else None))

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        return True

    def memory(self) -> dict[str, int]:
        return {f"{part}_bytes": 0 for part in ("kv", "states", "vision")}


class Recording(Instant):
    """Keeps what it was asked last."""

    asked: GenerationRequest

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.asked = request
        async for event in super().stream(request):
            yield event


@dataclass
class Answer:
    """What came back.

    Attributes:
        headers: by their names in small letters.
        is_whole: whether the answer came to its end.
    """

    status: int = 0
    headers: dict[str, list[str]] = field(default_factory=dict)
    content: bytes = b""
    is_whole: bool = False

    def json(self) -> Any:
        return json.loads(self.content)


async def ask(
    app: FastAPI,
    path: str,
    body: bytes | AsyncIterator[bytes] = b"",
    *,
    method: str = "POST",
    query: str = "",
    headers: Iterable[tuple[str, str]] = (),
    hangs_up: asyncio.Event | None = None,
) -> Answer:
    """What the application answers to one request.

    Args:
        path: as in an address, escapes included.
        hangs_up: when the client does; None is one that stays until the end.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), *((n.lower().encode(), v.encode("latin-1")) for n, v in headers)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    pieces = _once(body) if isinstance(body, bytes) else body
    answer = Answer()

    async def receive() -> MutableMapping[str, Any]:
        try:
            return {"type": "http.request", "body": await anext(pieces), "more_body": True}
        except StopAsyncIteration:
            pass
        if not ended.is_set():
            ended.set()
            return {"type": "http.request", "body": b"", "more_body": False}
        await (hangs_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            for name, value in message["headers"]:
                answer.headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        else:
            answer.content += message.get("body", b"")
            answer.is_whole = not message.get("more_body", False)

    ended = asyncio.Event()
    await app(scope, receive, send)
    return answer


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
