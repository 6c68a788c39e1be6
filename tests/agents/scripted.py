"""A scripted model behind the real server: prompts, tokens, cuts and answers are real; a script replaces the forward
passes. It keeps a record of requests, for agents whose requests nobody has written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35mm.backends.history import ended_by
from qwen35mm.backends.model_backend import ModelBackend
from qwen35mm.cache import CacheSettings, Chain
from qwen35mm.cache.policy import states_to_keep
from qwen35mm.contract import CacheReport, Event, Finished, GenerationRequest, Prefilled, Result, ToolCall
from qwen35mm.engine import CachedPrompt, EngineSettings, Request
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.http.run import ServerThread
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import Prompt
from qwen35mm.server.app import create_app

CONTEXT_LENGTH = 262_144
_ROOT = b"scripted"


@dataclass(frozen=True)
class Said:
    """A reply; it is written in the form of Qwen's templates. Thinking is left out where the prompt closed it."""

    text: str = ""
    thinking: str = "Let me think."
    calls: tuple[ToolCall, ...] = ()


def calls(name: str, /, **arguments: Any) -> Said:
    """A reply that calls one tool."""
    return Said(calls=(ToolCall(name, arguments),))


# What the model replies to a request: a string is taken as the model's own tokens, thinking and marks included.
Script = Callable[[GenerationRequest], Said | str]


def script_of(replies: Sequence[Said | str]) -> Script:
    """Gives the replies one after the other, whatever is asked."""
    left = iter(replies)
    lock = threading.Lock()

    def script(request: GenerationRequest) -> Said | str:
        with lock:
            return next(left)

    return script


@dataclass(frozen=True)
class Asked:
    """A request that was answered.

    Attributes:
        num_cached_tokens: what the engine's cache would have given, with memory for everything.
        reply: the model's tokens as text.
    """

    request: GenerationRequest
    prompt: Prompt
    num_cached_tokens: int
    reply: str

    @property
    def num_read_tokens(self) -> int:
        return len(self.prompt.token_ids) - self.num_cached_tokens


class ScriptedBackend(ModelBackend):
    """Answers with a script's replies, token by token.

    Its cache has the engine's addresses, keeps the states that the engine's keeps, and never evicts.

    Attributes:
        asked: what was answered, in order of the replies' beginnings.
    """

    def __init__(self, loaded: LoadedModel, script: Script, context_length: int = CONTEXT_LENGTH) -> None:
        self.script = script
        self.context_length = context_length
        self.asked: list[Asked] = []
        self._kept: set[bytes] = set()
        super().__init__(loaded)

    def _start(self, settings: EngineSettings, cache: CacheSettings) -> None:
        self._thinking = ThinkingTokens.from_tokenizer(self.loaded.tokenizer)

    async def _answer(
        self, work: Request, request: GenerationRequest | None, *, commits: bool = False
    ) -> AsyncGenerator[Event, None]:
        request = request or GenerationRequest()  # a plain prompt has no messages
        work.check_length(self.context_length)
        tokenizer, num_prompt_tokens = self.loaded.tokenizer, len(work.prompt.token_ids)
        num_cached = self._num_cached(work)
        report = CacheReport(num_cached, {"device": num_cached}, num_prompt_tokens - num_cached)
        said = self.script(request)
        thinks = self._opens_thinking(work.prompt)
        text = said if isinstance(said, str) else rendered(said, thinks=thinks)
        self.asked.append(Asked(request, work.prompt, num_cached, text))
        output = OutputProcessor(
            tokenizer,
            work.params,
            eos_ids=self.loaded.eos_ids,
            thinking=self._thinking,
            num_thought=0 if thinks else None,
        )
        yield Prefilled(num_prompt_tokens, 0.001, 1, report)
        for token_id in [*self._written(text), min(self.loaded.eos_ids)]:
            for delta in output.push(token_id, 0.0):
                yield delta
            if output.finish_reason is not None:
                break
            # The server may send what it has.
            await asyncio.sleep(0)
        assert output.finish_reason is not None
        result = Result(
            output.text,
            output.reasoning,
            output.finish_reason,
            tuple(output.token_ids),
            (),
            num_prompt_tokens,
            len(output.token_ids),
            0.001,
            None,
            seed=1,
            cache=report,
            stopped_by=output.stopped_by,
        )
        if commits and request.messages:
            ended = ended_by(request, output.text, output.reasoning or "")
            if ended is not None:
                self._keep(self.history(ended))
        yield Finished(result)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        return True

    def memory(self) -> dict[str, int]:
        return {f"{part}_bytes": 0 for part in ("kv", "states", "vision")}

    def _num_cached(self, work: Request) -> int:
        """How many of the prompt's tokens are cached. Keeps the prompt."""
        chain = _chain(work)
        found = [index for index, address in enumerate(chain.addresses) if address in self._kept]
        if work.retain != "nothing":
            self._keep(work)
        return chain.stop(found[-1] + 1) if found else 0

    def _keep(self, source: CachedPrompt) -> None:
        chain, prompt = _chain(source), source.prompt
        kept = states_to_keep(prompt.segments, system_stop=prompt.system_stop)
        self._kept.update(chain.addresses[index] for index in kept)

    def _opens_thinking(self, prompt: Prompt) -> bool:
        thinking, tail = self._thinking, prompt.token_ids[prompt.tail_start :].tolist()
        if thinking is None or thinking.start_id not in tail:
            return False
        return thinking.end_id not in tail[len(tail) - tail[::-1].index(thinking.start_id) :]

    def _written(self, text: str) -> list[int]:
        tokenizer = self.loaded.tokenizer
        ids: list[int] = []
        for part in tokenizer.split_controls(text):
            ids += [part] if isinstance(part, int) else tokenizer.encode_plain(part)
        return ids


def rendered(said: Said, *, thinks: bool) -> str:
    """A reply in the form of Qwen's templates, from after the prompt's `<think>` on."""
    parts = [said.text] if said.text else []
    for call in said.calls:
        values = [
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in call.arguments.items()
        ]
        parts.append(f"<tool_call>\n<function={call.name}>\n{''.join(values)}</function>\n</tool_call>")
    thinking = f"{said.thinking}\n</think>\n\n" if thinks else ""
    return thinking + "\n\n".join(parts)


def is_continued(before: Prompt, after: Prompt) -> bool:
    """Whether a prompt begins with all of another's cut segments, so that their tensors serve both."""
    stop = before.tail_start
    same = np.array_equal(before.token_ids[:stop], after.token_ids[:stop])
    return same and before.segments == after.segments[: len(before.segments)]


@dataclass
class Exchange:
    """A request as it came, and its answer.

    Attributes:
        headers: by their names in small letters.
        body: read as JSON; None if there was none.
        answer: what was sent, as text.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any = None
    status: int = 0
    answer: str = ""

    @property
    def shape(self) -> dict[str, Any]:
        """What was asked, without its texts."""
        return {"request": f"{self.method} {self.path}", "status": self.status, "body": shape_of(self.body)}


# Where a short string says what something is.
_SAID_KEYS = frozenset({"type", "role", "name", "model", "status", "effort", "phase", "detail", "mode", "syntax"})
_MAX_LISTED = 40


def shape_of(value: Any, key: str = "") -> Any:
    """JSON values without their texts: lengths of strings, names of tools, no schemas."""
    if isinstance(value, str):
        return value if key in _SAID_KEYS and len(value) <= 80 else f"<{len(value)} characters>"
    if isinstance(value, dict):
        if key in ("parameters", "input_schema", "schema"):
            return "<schema>"
        return {name: shape_of(each, name) for name, each in value.items()}
    if isinstance(value, list):
        rest = [f"<{len(value) - _MAX_LISTED} more>"] if len(value) > _MAX_LISTED else []
        return [shape_of(each, key) for each in value[:_MAX_LISTED]] + rest
    return value


class Recorder:
    """Notes what goes in and out of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        exchange = Exchange(scope["method"], scope["path"] + (f"?{query}" if query else ""), headers)
        self.exchanges.append(exchange)
        pieces: list[bytes] = []

        async def receive_and_note() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    with contextlib.suppress(ValueError):
                        exchange.body = json.loads(b"".join(pieces)) if any(pieces) else None
            return message

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            else:
                exchange.answer += message.get("body", b"").decode(errors="replace")
            await send(message)

        await self._app(scope, receive_and_note, send_and_note)


@dataclass
class ScriptedServer:
    """A running server.

    Attributes:
        address: without a slash at its end.
        exchanges: what came and what was answered.
    """

    address: str
    backend: ScriptedBackend
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def refused(self) -> list[str]:
        """The answers that were errors."""
        return [f"{e.method} {e.path}: {e.status} {e.answer[:2000]}" for e in self.exchanges if e.status >= 400]


@contextlib.contextmanager
def serving_script(
    loaded: LoadedModel, script: Script, *, context_length: int = CONTEXT_LENGTH, **options: Any
) -> Iterator[ScriptedServer]:
    """Serves a script on a free port until the end of the block.

    Args:
        options: more of `create_app`.
    """
    backend = ScriptedBackend(loaded, script, context_length)
    recorder = Recorder(create_app(backend, **options))
    with contextlib.closing(ServerThread(recorder, host="127.0.0.1", port=0)) as thread:
        yield ScriptedServer(thread.url.rstrip("/"), backend, recorder.exchanges)


def _chain(source: CachedPrompt) -> Chain:
    return Chain.of(source.prompt, _ROOT, salt=source.salt, salt_from=source.salt_from)
