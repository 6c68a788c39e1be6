"""Texts and token ids at a server: OpenAI's older completions, with `echo` for scores, and embeddings."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import numpy as np

from qwen35mm.backends.remote.attempts import Attempts
from qwen35mm.backends.remote.connection import Connection
from qwen35mm.backends.remote.deadline import Deadline
from qwen35mm.backends.remote.faults import Fault
from qwen35mm.backends.remote.logprobs import read_logprobs
from qwen35mm.backends.remote.programs import is_count
from qwen35mm.backends.remote.reply import Reply
from qwen35mm.backends.remote.request import sampling_fields
from qwen35mm.backends.remote.served import ServedModel
from qwen35mm.backends.scripting.texts import Score, TextModel
from qwen35mm.contract import CacheReport, Event, Finished, GenerationRequest, Result, SamplingParams
from qwen35mm.contract.plain import Conversation, Plain, is_plain
from qwen35mm.errors import PromptError, RequestError

_CONTROL_TOKEN = re.compile(r"<\|[^|<>]+\|>")


class RemoteTexts(TextModel):
    """Texts without a template at a server, as far as it supports them."""

    _attempts: Attempts
    _connection: Connection
    _model: ServedModel
    _whole: bool

    @abstractmethod
    def _request(self, timeout_s: float | None) -> AbstractAsyncContextManager[Deadline]:
        """The turn of one request; the model's name is known in it."""

    @abstractmethod
    def _faults_in_words(self) -> AbstractContextManager[None]:
        """Turns a Fault in the block into an error for a person."""

    async def _stream_prompt(
        self,
        prompt: Plain,
        params: SamplingParams | None,
        *,
        control_tokens: bool,
        timeout_s: float | None,
    ) -> AsyncGenerator[Event, None]:
        """Continues a text or token ids; the server's own tokenizer reads texts.

        Args:
            prompt, params, control_tokens: see `LocalBackend.stream_prompt`; but a server always takes a control
                token's text as the token.
            timeout_s: as a GenerationRequest's.

        Yields, raises: as `stream`.
        """
        given = _sent(prompt, control_tokens)
        asked_s = time.monotonic()
        with self._faults_in_words():
            async with self._request(timeout_s) as deadline:
                program = self._model.program
                fields = sampling_fields(params, program)
                if fields.pop("logprobs", False):
                    fields["logprobs"] = fields.pop("top_logprobs", 0)
                # No server's completions take the chat's form of it.
                if "response_format" in fields:
                    raise RequestError(
                        "A server constrains answers to a schema, but not completions of a text: use generate."
                    )
                about = self._model.spare({**fields, **program.stream_fields})
                body = self._body(prompt=given, stream=True, **about)
                begin = functools.partial(Reply, asked_s, finds_thinking=False)
                learn, whole = self._model.learn, self._whole
                replies = self._attempts.reply("completions", body, about, begin, learn, deadline, whole=whole)
                async with contextlib.aclosing(replies) as events:
                    async for event in events:
                        yield event

    async def _completed(self, prompt: Plain, template: GenerationRequest, control_tokens: bool) -> Result:
        if template.adapter is not None:
            raise RequestError(
                "adapter can't be given to complete on a server: connect to the adapter's name as the model."
            )

        def begin(left_s: float | None) -> AsyncGenerator[Event, None]:
            return self._stream_prompt(prompt, template.params, control_tokens=control_tokens, timeout_s=left_s)

        async with contextlib.aclosing(self.in_turn(begin, template.timeout_s)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event.result
        raise AssertionError("a stream ends with Finished or an error")

    async def _score(self, text: Plain, given: Plain | Conversation | None, options: Mapping[str, Any]) -> Score:
        control_tokens = options.get("control_tokens", False)
        after = _sent(text, control_tokens)
        before = after[:0] if given is None else _sent(given, control_tokens)
        if isinstance(before, str) is not isinstance(after, str):
            raise PromptError("A server scores a text after a text, or token ids after token ids.")
        both = before + after  # pyright: ignore[reportOperatorIssue]
        # Requests one token, since not all servers accept none.
        asked = {"max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": options.get("num_top", 0)}
        found = await self._told("completions", options, prompt=both, **asked)
        with _in_its_form():
            (choice,) = found["choices"]
            num_tokens = found["usage"]["prompt_tokens"]
            cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
            tokens = read_logprobs(choice["logprobs"])[:num_tokens]
            if not is_count(num_tokens) or len(tokens) < num_tokens:
                raise ValueError
            # Where each token's text ends: a token that spans both texts is scored.
            ends = itertools.islice([*choice["logprobs"]["text_offset"], math.inf], 1, num_tokens + 1)
            by_text = isinstance(before, str)
            start = sum(end <= len(before) for end in ends) if by_text else len(before)
        told = tuple(tokens[max(start, 1) :])
        if not told:
            raise PromptError("There is nothing to score: no token of the text has another before it.")
        cached = min(cached, num_tokens) if is_count(cached) else 0
        return Score(told, num_tokens, CacheReport(num_cached_tokens=cached, num_prefilled_tokens=num_tokens - cached))

    async def _embedded(self, given: Plain | Conversation, options: Mapping[str, Any]) -> np.ndarray:
        if options.get("pooling") is not None:
            raise RequestError("The server decides how its embeddings are pooled: leave pooling out.")
        told = _sent(given, options.get("control_tokens", False))
        found = await self._told("embeddings", options, input=told, encoding_format="float")
        with _in_its_form():
            vector = np.array(found["data"][0]["embedding"], np.float32)
            if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
                raise ValueError
        return vector

    async def _told(self, path: str, options: Mapping[str, Any], **fields: Any) -> Any:
        """The answer to a request that isn't streamed; repeats it while that can help."""
        for name in ("enable_thinking", "template_options", "tools"):
            if name in options:
                raise RequestError(f"{name.removeprefix('enable_')} is for conversations: leave it out of texts.")
        with self._faults_in_words():
            async with self._request(options.get("timeout_s")) as deadline:
                body = self._body(**fields)
                return await self._attempts.make(
                    lambda: self._connection.post_json(path, body, fields, deadline), deadline
                )

    def _body(self, **fields: Any) -> bytes:
        return json.dumps({"model": self._model.name, **fields}, ensure_ascii=False).encode("utf-8", "replace")


def _sent(given: object, control_tokens: bool) -> str | list[int]:
    """A text or token ids in the form of a request."""
    if not is_plain(given):
        raise RequestError(
            f"A server takes a text or token ids here; got {type(given).__name__}. Conversations are scored and "
            "embedded by a model in this process."
        )
    if not isinstance(given, str):
        return [int(each) for each in given]
    if not control_tokens and (found := _CONTROL_TOKEN.search(given)):
        raise RequestError(f"A server takes {found[0]} as the control token: set control_tokens=True if you mean that.")
    return given


@contextlib.contextmanager
def _in_its_form() -> Iterator[None]:
    """Refuses answers in another form than OpenAI's, as from servers that ignore `echo`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, Fault):
        raise RequestError(
            "The server's answer has no scores, or no vector, in OpenAI's form: it can't do this. vLLM and "
            "`qwen35mm serve` can."
        ) from None
