"""Texts and token ids without a template: continued, scored or embedded.

Conversations can be embedded too, and answers to them scored.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen35mm.backends.scripting.forms import conversation_of
from qwen35mm.contract import Event, GenerationRequest, Message, Progress, Retain, SamplingParams, pin_plans
from qwen35mm.contract.messages import with_stand_ins
from qwen35mm.contract.plain import Conversation, Plain, Pooling, is_plain
from qwen35mm.contract.request import check_limits, check_params, person_of
from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS
from qwen35mm.engine import DeferredMedia, Reading, Request, check_constraint, check_num_tokens
from qwen35mm.errors import ContextTooLongError, PromptError, RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import GRAMMARS, PROMPTS
from qwen35mm.prompt import Prompt, PromptBuilder
from qwen35mm.prompt.build import num_in_common
from qwen35mm.tokenizer import TooManyTokensError
from qwen35mm_preprocess import MediaPlan, PreparedMedia

# Tokens are counted up to this many contexts, so that the error for a slightly long prompt has the exact number.
_COUNTED_CONTEXTS = 2


@dataclass(frozen=True, eq=False)
class _Source:
    """A prompt with its media, the first token to score, and its messages, if any."""

    prompt: Prompt
    start: int = 0
    media: tuple[PreparedMedia | DeferredMedia, ...] = ()
    messages: tuple[Message, ...] = ()


class PlainPrompts(ABC):
    """What a model in this process does besides conversations; see `scripting/texts.py` for scripts."""

    # Most tokens of a conversation.
    context_length: int
    loaded: LoadedModel
    _prompts: PromptBuilder
    template_options: Mapping[str, Any]

    @abstractmethod
    def _answer(
        self, work: Request, request: GenerationRequest | None, *, commits: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Gives the work to the engine. Leaving the iterator ends it.

        Args:
            request: the request that the work was made from, its media with their plans; None for a plain prompt.
            commits: whether the history with the reply is computed afterwards.
        """

    @abstractmethod
    def _read_media(
        self, messages: Sequence[Message], media: list[PreparedMedia | DeferredMedia | None], person: str | None
    ) -> AsyncGenerator[Progress, None]:
        """Appends the messages' media, None for one whose stand-in takes its place. `person`: see `person_of`."""

    async def stream_prompt(
        self,
        prompt: Plain,
        params: SamplingParams | None = None,
        *,
        control_tokens: bool = False,
        prompt_logprobs: int | None = None,
        finds_thinking: bool = True,
        retain: Retain = "conversation",
        tenant: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Continues a text or token ids.

        Args:
            prompt: a text, or token ids as a list or an array of whole numbers. Ids of a rendered conversation are
                answered like the conversation.
            params: None takes the checkpoint's defaults.
            control_tokens: whether a control token's text, such as `<|im_end|>`, becomes that token; else it is plain
                text.
            prompt_logprobs: yields a PromptRead first, with the log probability of each prompt token but the first, and
                of so many of the likeliest tokens at its place. Computes the whole prompt, without cache hits.
            finds_thinking: whether thinking is separated from the answer; else both are text, with the control tokens
                between them.
            retain, tenant, timeout_s, adapter: as `stream`'s.

        Yields:
            Progress, TextDelta, and finally Finished. Leaving the iterator cancels the work within one step.

        Raises:
            PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        check_params(params)
        check_limits(retain, timeout_s, tenant)
        self.loaded.adapter_number(adapter)
        params = params or self.loaded.generation
        if params.is_constrained:
            await GRAMMARS.run_for(person_of(tenant), check_constraint, params)
        reading = None
        if prompt_logprobs is not None:
            reading = Reading("logprobs", 1, _checked_count(prompt_logprobs, "prompt_logprobs"))
        source = await PROMPTS.run_for(person_of(tenant), self._plain, None, prompt, control_tokens)
        request = self._request(source, reading, arrival_s, retain, tenant, timeout_s, adapter, params)
        request = replace(request, finds_thinking=finds_thinking)
        async with contextlib.aclosing(self._answer(request, None)) as events:
            async for event in events:
                yield event

    async def stream_score(
        self,
        text: Plain,
        given: Plain | Conversation | None = None,
        *,
        num_top: int = 0,
        control_tokens: bool = False,
        enable_thinking: bool = False,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        retain: Retain = "shared",
        tenant: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Scores how likely a text is; arguments as in `score`.

        Yields:
            Progress, and finally a PromptRead with the tokens' `logprobs`.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        check_limits(retain, timeout_s, tenant)
        self.loaded.adapter_number(adapter)
        num_top = _checked_count(num_top, "num_top")
        if given is None or is_plain(given):
            source = await PROMPTS.run_for(person_of(tenant), self._plain, given, text, control_tokens)
        elif isinstance(text, str):
            how = {"enable_thinking": enable_thinking, "template_options": template_options, "tools": tools}
            source = await self._rendered(given, person_of(tenant), text, **how)
        else:
            raise PromptError(f"An answer must be a string; got {type(text).__name__}.")
        if source.start >= len(source.prompt.token_ids):
            raise PromptError("There is nothing to score: no token of the text has another before it.")
        reading = Reading("logprobs", source.start, num_top)
        async with contextlib.aclosing(
            self._read(source, reading, arrival_s, retain, tenant, timeout_s, adapter)
        ) as events:
            async for event in events:
                yield event

    async def stream_embedding(
        self,
        given: Plain | Conversation,
        *,
        pooling: Pooling = "last",
        control_tokens: bool = False,
        enable_thinking: bool = False,
        template_options: Mapping[str, Any] | None = None,
        retain: Retain = "shared",
        tenant: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Reads a final hidden state; arguments as in `embed`, for one input.

        Yields:
            Progress, and finally a PromptRead with `states` [1, hidden].

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        check_limits(retain, timeout_s, tenant)
        self.loaded.adapter_number(adapter)
        if pooling not in ("last", "mean"):
            raise RequestError(f"pooling must be 'last' or 'mean'; got {pooling!r}.")
        if is_plain(given):
            source = await PROMPTS.run_for(person_of(tenant), self._plain, None, given, control_tokens)
        else:
            how = {"enable_thinking": enable_thinking, "template_options": template_options}
            source = await self._rendered(given, person_of(tenant), **how)
        reading = Reading(pooling)
        async with contextlib.aclosing(
            self._read(source, reading, arrival_s, retain, tenant, timeout_s, adapter)
        ) as events:
            async for event in events:
                yield event

    def _read(
        self,
        source: _Source,
        reading: Reading,
        arrival_s: float,
        retain: Retain,
        tenant: str | None,
        timeout_s: float | None,
        adapter: str | None,
    ) -> AsyncGenerator[Event, None]:
        """Reads a prompt, in the engine's queue."""
        request = self._request(source, reading, arrival_s, retain, tenant, timeout_s, adapter)
        return self._answer(request, GenerationRequest(source.messages) if source.messages else None)

    def _request(
        self,
        source: _Source,
        reading: Reading | None,
        arrival_s: float,
        retain: Retain,
        tenant: str | None,
        timeout_s: float | None,
        adapter: str | None,
        params: SamplingParams | None = None,
    ) -> Request:
        """A request for a reply; without `params`, for none."""
        self._check_length(len(source.prompt.token_ids), replies=params is not None)
        return Request(
            source.prompt,
            source.media,
            retain,
            salt=(tenant or "").encode(),
            salt_from=source.prompt.system_stop,
            adapter=adapter,
            # Without a reply, these cost the least.
            params=params or SamplingParams(max_tokens=1),
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            reading=reading,
            replies=params is not None,
        )

    async def _rendered(self, given: Any, person: str | None, answer: str | None = None, **how: Any) -> _Source:
        """A conversation in its template, with an answer if given."""
        messages = conversation_of(given)
        how["template_options"] = {**self.template_options, **(how["template_options"] or {})}
        found: list[PreparedMedia | DeferredMedia | None] = []
        async with contextlib.aclosing(self._read_media(messages, found, person)) as updates:
            async for _ in updates:
                pass
        messages = with_stand_ins(messages, [None if medium is None else medium.plan for medium in found])
        media = [medium for medium in found if medium is not None]
        plans = [medium.plan for medium in media]
        if answer is None:
            prompt, start = await PROMPTS.run_for(person, self._prompt, messages, plans, **how), 0
        else:
            prompt, start = await PROMPTS.run_for(person, self._reply, messages, plans, answer, **how)
        return _Source(prompt, start, tuple(media), tuple(pin_plans(messages, plans)))

    def _prompt(self, messages: Sequence[Message], plans: Sequence[MediaPlan], **how: Any) -> Prompt:
        """Builds the prompt. Stops tokenizing once it is far too long.

        Raises:
            PromptError: the messages can't become a prompt.
            ContextTooLongError: it exceeds two contexts.
        """
        with self._counting():
            return self._prompts.prompt(messages, plans, most_tokens=self._most_tokens, **how)

    def _reply(
        self, messages: Sequence[Message], plans: Sequence[MediaPlan], answer: str, **how: Any
    ) -> tuple[Prompt, int]:
        with self._counting():
            return self._prompts.reply(messages, plans, answer, most_tokens=self._most_tokens, **how)

    def _plain(self, given: Plain | None, text: Plain, control_tokens: bool) -> _Source:
        """A prompt of `given` and `text`, and the index of the text's first token that has a token before it."""
        if not is_plain(text):
            raise PromptError(f"A text must be a string, or token ids; got {type(text).__name__}.")
        before = [] if given is None else self._ids(given, control_tokens)
        if isinstance(given, str) and isinstance(text, str):
            ids = self._ids(given + text, control_tokens)
            start = num_in_common(np.array(before), np.array(ids))
        else:
            ids, start = self._ids(text, control_tokens), len(before)
            ids = [*before, *ids] if start else ids
        start = max(start, 1)
        # The prefix that other texts may share ends here; its last token predicts the first token of this text.
        ends = [start - 1] if 1 < start < len(ids) else []
        return _Source(self._prompts.plain(ids, ends=ends), start)

    def _ids(self, text: Plain, control_tokens: bool) -> Sequence[int] | np.ndarray:
        """Token ids of a text. Given ids are checked later with the whole prompt."""
        if not isinstance(text, str):
            self._check_length(len(text))
            return text
        try:
            return self._prompts.text_ids(text, control_tokens=control_tokens, most_tokens=self._most_tokens)
        except TooManyTokensError as error:
            self._check_length(error.at_least, or_more=True)
            raise

    @property
    def _most_tokens(self) -> int:
        """The most prompt tokens that are counted."""
        return _COUNTED_CONTEXTS * self.context_length

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Turns TooManyTokensError into ContextTooLongError."""
        try:
            yield
        except TooManyTokensError as error:
            check_num_tokens(error.at_least, self.context_length, or_more=True)
            raise

    def _check_length(self, num_tokens: int, *, replies: bool = False, or_more: bool = False) -> None:
        """Raises ContextTooLongError if the text exceeds the context, with a reply's first token if `replies`."""
        if num_tokens + replies > self.context_length:
            raise ContextTooLongError(
                f"The text has {num_tokens:,} tokens{' or more' if or_more else ''}; the context holds "
                f"{self.context_length:,}{', reply included' if replies else ''}. Pass a shorter text, or raise "
                "context_length.",
                num_tokens,
                self.context_length,
            )


def _checked_count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be a whole number from 0 to {MAX_TOP_LOGPROBS}; got {value!r}.")
    return value
