"""For scripts: texts and token ids without a template, continued, scored and embedded."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from qwen35mm.backends.scripting import loop
from qwen35mm.backends.scripting.forms import (
    GenerateOptions,
    Params,
    Tools,
    checked_bool,
    checked_names,
    named_options,
    tools_of,
)
from qwen35mm.backends.scripting.model import Batch, OnError, ScriptedModel
from qwen35mm.contract import CacheReport, GenerationRequest, Result, Retain, TokenLogprob
from qwen35mm.contract.plain import Conversation, Plain, Pooling
from qwen35mm.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ReadOptions(TypedDict, total=False):
    """Options of reading texts: see `TextModel.score` and `TextModel.embed`."""

    control_tokens: bool
    thinking: bool
    template_options: Mapping[str, Any] | None
    retain: Retain
    tenant: str | None
    timeout_s: float | None


class ScoreOptions(ReadOptions, total=False):
    """Options of scoring: see `TextModel.score`."""

    num_top: int
    tools: Tools | None


class EmbedOptions(ReadOptions, total=False):
    """Options of embedding: see `TextModel.embed`."""

    pooling: Pooling


@dataclass(frozen=True)
class Score:
    """How likely a text is to a model, token by token, each given all before it.

    Attributes:
        tokens: the text's, except a first one with nothing before it.
        num_prompt_tokens: tokens of the text and of what precedes it.
        cache: how many of these were cached.
    """

    tokens: tuple[TokenLogprob, ...]
    num_prompt_tokens: int
    cache: CacheReport = field(default_factory=CacheReport)

    @property
    def logprob(self) -> float:
        """Natural logarithm of the text's probability: the sum over its tokens."""
        return math.fsum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """Exp of the mean of -logprob over its tokens."""
        return math.exp(-self.logprob / len(self.tokens))


class TextModel(ScriptedModel):
    """What a model does for scripts besides conversations."""

    def complete(
        self,
        prompts: Plain | Iterable[Plain],
        params: Params | None = None,
        *,
        control_tokens: bool = False,
        n: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Continues one text or many, without a template.

        Args:
            prompts: one is a string, or token ids as a list or an array of whole numbers. Many are a list of them, or
                any other iterable. Ids of a rendered conversation are answered like the conversation.
            control_tokens: whether a control token's text, such as `<|im_end|>`, becomes that token; else it is plain
                text.
            params, n, on_error, progress: as in `generate`.
            options: as in `generate`, without `thinking` and `tools`, which belong to templates.

        Returns:
            The Result of one, or a list in the prompts' order.

        Raises:
            Qwen35mmError: a single prompt's error, or one that concerns all.
            BatchError: some of many failed.
        """
        batch = self._completions(prompts, params, options, control_tokens, n, on_error)
        return batch.waited(progress)

    async def acomplete(
        self,
        prompts: Plain | Iterable[Plain],
        params: Params | None = None,
        *,
        control_tokens: bool = False,
        n: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """`complete` for programs with an event loop."""
        batch = self._completions(prompts, params, options, control_tokens, n, on_error)
        return await batch.awaited(progress)

    def score(self, text: Plain, given: Plain | Conversation | None = None, **options: Unpack[ScoreOptions]) -> Score:
        """How likely a text is, token by token, in the model's own distribution, before any sampling parameter.

        Args:
            text: a string, or token ids.
            given: what it follows: a string, token ids, or a conversation that it answers (a Message, a dict, or a list
                of them), media included. Two strings are tokenized as one; a token that spans both is scored. With
                None, the text's first token has no score.
            num_top: how many of the likeliest tokens to report at each place; default 0.
            control_tokens: as in `complete`, for texts; an answer has none.
            thinking: for a conversation: whether the model would think first. Then the scored text starts with the end
                of its thinking.
            tools, template_options: for a conversation, as in `generate`.
            retain, tenant, timeout_s: as in `generate`.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        return loop.run(self._score(text, given, _read_options(options, ScoreOptions)))

    async def ascore(
        self, text: Plain, given: Plain | Conversation | None = None, **options: Unpack[ScoreOptions]
    ) -> Score:
        """`score` for programs with an event loop."""
        return await loop.arun(self._score(text, given, _read_options(options, ScoreOptions)))

    def embed(
        self,
        inputs: Plain | Conversation | Iterable[Plain | Conversation],
        *,
        progress: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> np.ndarray:
        """The final hidden state of one text or conversation, or of many: the model predicts the next token from it.

        Chat models aren't trained for this. Texts of the same meaning lie closer together, but models made for
        embeddings do much better.

        Args:
            inputs: one is a string, token ids, or a conversation (a Message, a dict, or a list of them), media
                included, in the form in which it would be answered. Many are a list of strings or of lists, or any
                other iterable.
            progress: shows a bar.
            pooling: "last" (default), the last token's state; or "mean" of all tokens'.
            control_tokens: as in `complete`.
            thinking: for conversations: whether the model would think first.
            retain, tenant, timeout_s: as in `generate`.

        Returns:
            float32, `[hidden]` for one, `[N, hidden]` for many; not normalised.

        Raises:
            Qwen35mmError: a single input's error, or one that concerns all.
            BatchError: some of many failed.
        """
        return _stacked(self._embeddings(inputs, options).waited(progress))

    async def aembed(
        self,
        inputs: Plain | Conversation | Iterable[Plain | Conversation],
        *,
        progress: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> np.ndarray:
        """`embed` for programs with an event loop."""
        return _stacked(await self._embeddings(inputs, options).awaited(progress))

    def _completions(
        self,
        prompts: Any,
        params: Params | None,
        options: Mapping[str, Any],
        control_tokens: bool,
        n: int | None,
        on_error: OnError,
    ) -> Batch:
        given = named_options(params, options)
        for name in ("tools", "tool_choice", "parallel_tool_calls", "thinking"):
            if name in given:
                raise ConfigError(f"{name} is for conversations: complete puts no template around a text.")
        checked_bool("control_tokens", control_tokens)

        async def answer(prompt: Plain, template: GenerationRequest) -> Result:
            return replace(await self._completed(prompt, template, control_tokens), schema=template.schema)

        return Batch(self, _one_or_many(prompts), answer, self.template(params, options), n, on_error)

    def _embeddings(self, inputs: Any, options: Mapping[str, Any]) -> Batch:
        how = _read_options(options, EmbedOptions)

        async def answer(given: Any, _: GenerationRequest) -> np.ndarray:
            return await self._embedded(given, how)

        return Batch(self, _one_or_many(inputs), answer, GenerationRequest(), None, "raise")

    @abstractmethod
    async def _completed(self, prompt: Plain, template: GenerationRequest, control_tokens: bool) -> Result:
        """`complete` for one prompt."""

    @abstractmethod
    async def _score(self, text: Plain, given: Plain | Conversation | None, options: Mapping[str, Any]) -> Score:
        """`score`, with the options of `PlainPrompts.stream_score`."""

    @abstractmethod
    async def _embedded(self, given: Plain | Conversation, options: Mapping[str, Any]) -> np.ndarray:
        """`embed` for one input: [hidden]; with the options of `PlainPrompts.stream_embedding`."""


def _read_options(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Options as the streams take them. Raises ConfigError for an unknown one, or a wrong type."""
    checked_names(options, list(known.__annotations__))
    how = {name: value for name, value in options.items() if value is not None}
    for name in ("control_tokens", "thinking"):
        if name in how:
            checked_bool(name, how[name])
    if "thinking" in how:
        how["enable_thinking"] = how.pop("thinking")
    if "template_options" in how:
        how["template_options"] = GenerationRequest(template_options=how["template_options"]).template_options
    if "tools" in how:
        how["tools"] = tools_of(how["tools"])
    return how


def _one_or_many(inputs: Any) -> tuple[Iterable[Any], bool]:
    """The inputs, and whether it is a single one: a string, token ids, a message, or a list of messages."""
    if isinstance(inputs, list | tuple):
        parts = (str, list, tuple, np.ndarray)
        is_one = not (inputs and isinstance(inputs[0], parts))
    else:
        is_one = isinstance(inputs, str | bytes | np.ndarray | Mapping) or not isinstance(inputs, Iterable)
    return ([inputs], True) if is_one else (inputs, False)


def _stacked(found: Any) -> np.ndarray:
    if isinstance(found, np.ndarray):
        return found
    if not found:
        raise PromptError("There is nothing to embed.")
    return np.stack(found)
