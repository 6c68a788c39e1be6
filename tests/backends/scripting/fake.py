"""A model that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from qwen35mm.backends.scripting.model import ScriptedModel
from qwen35mm.contract import Event, Finished, GenerationRequest, Message, Result, SamplingParams, TextDelta
from qwen35mm.prompt.calls import read_calls


class FakeModel(ScriptedModel):
    """Answers with `say`: a list of pieces, an error among them or at their end, or None, which is never any end.

    Attributes:
        asked: what each answer was asked with.
        num_open: answers that are being written.
        most_open: the most that there were at one time.
        is_held: while it is, nothing is written.
    """

    def __init__(self, say: Callable[[Sequence[Message]], list[str | Exception | None]], at_once: int = 4) -> None:
        self._say = say
        self._at_once = at_once
        self.asked: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0
        self.is_closed = self.is_held = False

    @property
    def default_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=100)

    @property
    def most_at_once(self) -> int:
        return self._at_once

    def close(self) -> None:
        self.is_closed = True

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.asked.append({**vars(request), "messages": list(request.messages)})
        messages, params = request.messages, request.params
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        written = ""
        try:
            while self.is_held:
                await asyncio.sleep(0.005)
            for piece in self._say(messages):
                await asyncio.sleep(0)
                if piece is None:
                    await asyncio.Event().wait()
                elif isinstance(piece, Exception):
                    raise piece
                else:
                    written += piece
                    yield TextDelta(piece)
            tools = request.tools
            text, calls = read_calls(written, tools) if tools else (written, ())
            yield Finished(result(text, tool_calls=calls, seed=params and params.seed))
        finally:
            self.num_open -= 1


def result(text: str, **values: Any) -> Result:
    empty: dict[str, Any] = {"reasoning": None, "finish_reason": "stop", "token_ids": (), "prompt_token_ids": ()}
    empty |= {"num_prompt_tokens": 0, "num_generated_tokens": 0, "ttft_s": None, "decode_tokens_per_s": None}
    return Result(text, **{**empty, **values})
