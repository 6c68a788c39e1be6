"""OpenAI's older completions: continues texts and token ids, and gives the log-probabilities of their tokens."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from qwen35mm.contract import Event, Finished, Prefilled, PromptRead, Result, SamplingParams, TextDelta, TokenLogprob
from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS
from qwen35mm.engine.logprobs import described
from qwen35mm.http.streams import frame
from qwen35mm.model import LoadedModel
from qwen35mm.server import fields
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import RequestFields, Values
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.chat_completions import StreamOptions, note_stream_options
from qwen35mm.server.openai.texts.inputs import Inputs, inputs_of
from qwen35mm.tokenizer import Tokenizer

MAX_CHOICES = 256
# OpenAI's default.
_MAX_TOKENS = 16
# Each with the values that ask for nothing. Most need a template.
HINTS: dict[str, Values] = {
    "best_of": (1,),
    "add_special_tokens": (True, False),
    "parallel_tool_calls": (),
    "thinking_budget": (),
    "chat_template_kwargs": (),
    "mm_processor_kwargs": (),
}
REFUSED: dict[str, Values] = {"suffix": ("",)}


class CompletionRequest(RequestFields):
    """The body of POST /v1/completions."""

    prompt: Inputs
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] = _MAX_TOKENS
    echo: bool = False
    return_token_ids: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1


@dataclass(frozen=True)
class Choice:
    """One requested completion.

    Attributes:
        prompt: a text, or token ids.
        params: of the reply; None if only the prompt is computed.
        echoes: whether the text begins with the prompt.
        num_top: log-probabilities for each token; None without any.
        is_first: whether it is the first choice of its prompt.
    """

    index: int
    prompt: str | list[int]
    params: SamplingParams | None
    echoes: bool
    num_top: int | None
    is_first: bool


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops what has no effect. Raises ApiError: 400, a field asks for something that can't be done."""
    note_stream_options(body, notes)
    return fields.known_fields(body, notes, hints=HINTS, refused=REFUSED, can_write_nothing=True)


def choices_of(request: CompletionRequest, loaded: LoadedModel) -> list[Choice]:
    """The completions that a body asks for.

    Raises:
        ApiError: 400, a field can't be used; says which and why.
    """
    prompts = inputs_of(request.prompt, "prompt")
    if len(prompts) * request.n > MAX_CHOICES:
        raise ApiError(
            400, f"prompt and n ask for {len(prompts) * request.n:,} texts; {MAX_CHOICES} are allowed at most.", "n"
        )
    if not (request.max_tokens or request.echo):
        raise ApiError(400, "max_tokens must be 1 or more, unless echo is true.", "max_tokens")
    params = request.params(
        loaded, max_tokens=request.max_tokens or 1, effort=None, json_schema=None, logprobs=request.logprobs
    )
    choices = []
    for prompt in prompts:
        for number in range(request.n):
            own = params if params.seed is None else replace(params, seed=(params.seed + number) % 2**63)
            wanted = own if request.max_tokens else None
            choices.append(Choice(len(choices), prompt, wanted, request.echo, request.logprobs, not number))
    return choices


@dataclass(frozen=True)
class Piece:
    """The next part of a completion: a text and its tokens, each with whether it has a log-probability."""

    text: str
    tokens: Sequence[tuple[TokenLogprob, bool]] = ()


class ChoiceReader:
    """Reads the events of one completion. `tells_ids`: its end has the token ids of the prompt and the reply."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, *, tells_ids: bool = False) -> None:
        self.choice = choice
        self._tells_ids = tells_ids
        self._tokenizer = tokenizer
        self._pieces: list[Piece] = []
        self._num_told = 0
        self._num_chars = 0
        self._has_begun = False
        self.result: Result | None = None
        self.read: PromptRead | None = None

    def take(self, event: Event) -> Iterator[Piece]:
        """Reads the next event and yields what it adds."""
        if isinstance(event, PromptRead):
            self.read = event
        if isinstance(event, PromptRead | Prefilled) and self.choice.echoes and not self._has_begun:
            self._has_begun = True
            yield self._told(self._prompt())
        elif isinstance(event, TextDelta):
            self._num_told += len(event.logprobs)
            yield self._told(Piece(event.text, [(each, True) for each in event.logprobs]))
        elif isinstance(event, Finished):
            self.result = event.result
            # The token that ended the reply has no text.
            rest = (event.result.logprobs or ())[self._num_told :]
            if rest:
                yield self._told(Piece("", [(each, True) for each in rest]))

    def _told(self, piece: Piece) -> Piece:
        self._pieces.append(piece)
        return piece

    def _prompt(self) -> Piece:
        prompt = self.choice.prompt
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=False)
        if self.read is None or self.choice.num_top is None:
            return Piece(text)
        first = described(self._tokenizer, self.read.token_ids[0], 0.0)
        return Piece(text, [(first, False), *((each, True) for each in self.read.logprobs)])

    def whole(self) -> dict[str, Any]:
        """The choice, once it is finished."""
        pieces = self._pieces
        text = "".join(piece.text for piece in pieces)
        told = Piece(text, [token for piece in pieces for token in piece.tokens])
        return self.written(told, **self.end)

    @property
    def end(self) -> dict[str, Any]:
        """Why it ended; `stop_reason` is vLLM's field for the request's stop string or token."""
        result = self.result
        if result is None:
            return {"finish_reason": "length", "stop_reason": None}
        ids = {"token_ids": list(result.token_ids), "prompt_token_ids": list(result.prompt_token_ids)}
        why = {"finish_reason": result.finish_reason, "stop_reason": result.stopped_by}
        return why | (ids if self._tells_ids else {})

    def written(self, piece: Piece, **end: Any) -> dict[str, Any]:
        """A piece in OpenAI's form."""
        logprobs = None if self.choice.num_top is None else self._logprobs(piece.tokens)
        return {"index": self.choice.index, "text": piece.text, "logprobs": logprobs, "finish_reason": None, **end}

    def _logprobs(self, tokens: Sequence[tuple[TokenLogprob, bool]]) -> dict[str, Any]:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        offsets = []
        for told, _ in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(utf8.decode(bytes(told.bytes)))
        return {
            "tokens": [_name(told) for told, _ in tokens],
            "token_logprobs": [told.logprob if has_any else None for told, has_any in tokens],
            "top_logprobs": [_top(told) if has_any else None for told, has_any in tokens],
            "text_offset": offsets,
        }


class Completions:
    """All completions of one request.

    Args:
        model: the model's name in the answer.
        fingerprint: of what computes the answer.
    """

    def __init__(self, model: str, readers: Sequence[ChoiceReader], *, fingerprint: str, includes_usage: bool) -> None:
        self._readers = readers
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head |= {"model": model, "system_fingerprint": fingerprint}
        self._includes_usage = includes_usage

    def whole(self) -> dict[str, Any]:
        """The whole answer, once all completions are finished."""
        return {**self._head, "choices": [reader.whole() for reader in self._readers], "usage": self._usage()}

    async def frames(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream, one completion after the other."""
        readers = iter(self._readers)
        reader = next(readers)
        async for event in events:
            for piece in reader.take(event):
                yield frame({**self._head, "choices": [reader.written(piece)]})
            if isinstance(event, PromptRead if reader.choice.params is None else Finished):
                yield frame({**self._head, "choices": [reader.written(Piece(""), **reader.end)]})
                reader = next(readers, reader)
        if self._includes_usage:
            yield frame({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _usage(self) -> dict[str, Any]:
        results = [reader.result for reader in self._readers if reader.result is not None]
        firsts = [reader for reader in self._readers if reader.choice.is_first]
        num_prompt = sum(_num_prompt_tokens(reader) for reader in firsts)
        num_generated = sum(result.num_generated_tokens for result in results)
        cached = sum(each.cache.num_cached_tokens for reader in firsts if (each := reader.result or reader.read))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _num_prompt_tokens(reader: ChoiceReader) -> int:
    if reader.result is not None:
        return reader.result.num_prompt_tokens
    return 0 if reader.read is None else len(reader.read.token_ids)


def _top(told: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by their names, and the token itself if it isn't among them."""
    return {_name(each): each.logprob for each in (told, *told.top)}


def _name(told: TokenLogprob) -> str:
    """A token's text. Like OpenAI, names a part of a character by its bytes."""
    spelt = bytes(told.bytes)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
