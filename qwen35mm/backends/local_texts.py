"""Texts and token ids for scripts, by a model in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from qwen35mm.backends.plain import PlainPrompts
from qwen35mm.backends.scripting.texts import Score, TextModel
from qwen35mm.contract import Event, Finished, GenerationRequest, PromptRead, Result
from qwen35mm.contract.plain import Conversation, Plain

Last = TypeVar("Last", Finished, PromptRead)


class LocalTexts(TextModel, PlainPrompts):
    """`TextModel` with a model in this process."""

    async def _completed(self, prompt: Plain, template: GenerationRequest, control_tokens: bool) -> Result:
        def begin(timeout_s: float | None) -> AsyncGenerator[Event, None]:
            return self.stream_prompt(
                prompt,
                template.params,
                control_tokens=control_tokens,
                retain=template.retain,
                tenant=template.tenant,
                timeout_s=timeout_s,
                adapter=template.adapter,
            )

        return (await self._last(Finished, begin, template.timeout_s)).result

    async def _score(self, text: Plain, given: Plain | Conversation | None, options: Mapping[str, Any]) -> Score:
        how, timeout_s = _without_timeout(options)
        found = await self._last(
            PromptRead, lambda left_s: self.stream_score(text, given, timeout_s=left_s, **how), timeout_s
        )
        return Score(found.logprobs, len(found.token_ids), found.cache)

    async def _embedded(self, given: Plain | Conversation, options: Mapping[str, Any]) -> np.ndarray:
        how, timeout_s = _without_timeout(options)
        found = await self._last(
            PromptRead, lambda left_s: self.stream_embedding(given, timeout_s=left_s, **how), timeout_s
        )
        assert found.states is not None
        return found.states[0].numpy()

    async def _last(
        self,
        kind: type[Last],
        begin: Callable[[float | None], AsyncGenerator[Event, None]],
        timeout_s: float | None,
    ) -> Last:
        """The last event of a stream, after waiting for its turn."""
        async with contextlib.aclosing(self.in_turn(begin, timeout_s)) as events:
            async for event in events:
                if isinstance(event, kind):
                    return event
        raise AssertionError("a stream ends with its result or an error")


def _without_timeout(options: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    how = dict(options)
    return how, how.pop("timeout_s", None)
