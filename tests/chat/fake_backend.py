"""A backend without a model: what it answers is in the question, so that tests decide what happens and when.

"echo TEXT"      TEXT, word by word
"think TEXT"     a thought, then TEXT
"slow"           words without an end, by a clock of its own; "slow WORD" has them be WORD
"call NAME JSON" a call of a tool, and of "call NAME JSON; NAME JSON" two
"phases"         a pause in each phase of progress, until `next_phase()`, then an answer; "phases TEXT" has it be TEXT
"refuse TEXT"    a RequestError that says TEXT
"break"          an error that is a bug; "break late" after some words
"length"         an answer that was cut; continued, its end
"markdown"       code, a table and a formula
"Write ..."      a title, see `idles`
"too long"       the engine's refusal of a prompt that is too long
anything else    what the question held: "2 images, 1 video"
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    MediaPlanned,
    Message,
    ModelInfo,
    Prefilled,
    Progress,
    Result,
    SamplingParams,
    Text,
    TextDelta,
    ToolCall,
    Video,
)
from qwen35mm.errors import ContextTooLongError, RequestError
from qwen35mm_preprocess import GridTHW, MediaBudget, MediaPlan, MediaProcessor

PHASES = (
    Progress("wait", 1, 2),
    Progress("read", 12, 24),
    Progress("encode", 3, 6),
    Progress("prefill", 512, 1024),
)
MARKDOWN = """Look:

```python
print("shapes")
```

| shape | number |
|---|---|
| circle | 2 |

The area is $\\pi r^2$, <b>not</b> markup. ![a](http://example.com/a.png)
"""
# Of the answers that count their tokens.
TOKENS_PER_S = 40.0
_SIZES = {"bytes": 1 << 20, "budget_bytes": 2 << 20}


@dataclass
class FakeBackend:
    """See the module.

    calls               the arguments of each `stream`
    active              open streams
    completes_plans     media get digests, as if they were read
    idles               titles are asked for; the answer is `title`, or none comes before that is set
    """

    is_demo: bool = False
    context_length: int = 4096
    calls: list[Any] = field(default_factory=list)
    active: int = 0
    completes_plans: bool = False
    idles: bool = False
    title: str | None = None

    def __post_init__(self) -> None:
        self.info = ModelInfo("Fake-1B", SamplingParams(temperature=0.7, top_k=20), False, weights="bf16")
        self.media = MediaProcessor.from_pretrained(
            demo_model_path(),
            budget=MediaBudget(max_image_tokens=1280, max_video_tokens=4096),
            cache_bytes_per_token=512,
        )
        self._phases = threading.Semaphore(0)

    def next_phase(self) -> None:
        """Lets a "phases" answer go on."""
        self._phases.release()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The answer that the last message asks for."""
        self.calls.append(replace(request, params=request.params or self.info.generation))
        messages = request.messages
        self.active += 1
        try:
            if plans := tuple(make_plan(part) for message in messages for part in message.media):
                yield MediaPlanned(tuple(map(complete, plans)) if self.completes_plans else plans)
            if request.continue_reply:
                yield TextDelta("and its end.")
                yield Finished(make_result("and its end."))
                return
            async for event in self._script(messages[-1]):
                yield event
        finally:
            self.active -= 1

    def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Any = None,
        tools: Any = None,
    ) -> int:
        """A token for every four characters, and what media are planned to take."""
        plans = [part.plan for message in messages for part in message.media]
        num_text = sum(len(message.text) // 4 + 4 for message in messages)
        return num_text + sum(plan.num_prompt_tokens for plan in plans if plan is not None)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Whether no stream is open."""
        return self.active == 0

    def memory(self) -> dict[str, int]:
        """Half of everything is taken."""
        return {f"{kind}_{what}": size for kind in ("kv", "states", "vision") for what, size in _SIZES.items()}

    async def _script(self, message: Message) -> AsyncIterator[Event]:
        command, _, rest = message.text.partition(" ")
        if command == "Write":
            while self.title is None:
                await asyncio.sleep(0.005)
            yield TextDelta(self.title)
            yield Finished(make_result(self.title))
            return
        if command == "slow":
            yield Prefilled(3, 0.25, None, CacheReport())
            for number in itertools.count(1):
                yield TextDelta(f"{rest or 'word'} ", "answer", number, number / TOKENS_PER_S)
                await asyncio.sleep(0.002)
        if command == "phases":
            for progress in PHASES:
                yield progress
                while not self._phases.acquire(blocking=False):
                    await asyncio.sleep(0.005)
        if command == "call" and message.role == "user":
            made = [each.strip().partition(" ") for each in rest.split(";")]
            # As of a server that numbers them anew, or not at all.
            calls = tuple(ToolCall(name, json.loads(given or "{}"), "call_0") for name, _, given in made)
            yield TextDelta("I look.", "reasoning")
            yield Finished(replace(make_result(""), tool_calls=calls))
            return
        if command == "refuse":
            raise RequestError(rest)
        if message.text == "too long":
            raise ContextTooLongError("The prompt has 5,000 tokens; the context holds 4,096.")
        if command == "markdown":
            yield TextDelta(MARKDOWN)
            yield Finished(make_result(MARKDOWN))
            return
        if command == "break":
            if rest:
                yield Prefilled(3, 0.25, None, CacheReport())
                for number in (1, 41):
                    yield TextDelta("word ", "answer", number, number / TOKENS_PER_S)
            raise RuntimeError("secret detail in /srv/private")
        if command == "think":
            yield Prefilled(3, 0.25, None, CacheReport())
            yield TextDelta("Let me see. ", "reasoning", 3, 0.1)
            yield TextDelta("That is it.", "reasoning", 6, 0.2)
        is_given = command in ("echo", "think") or (command == "phases" and rest)
        text = rest if is_given else _describe(message)
        for word in text.split(" "):
            yield TextDelta(word + " ")
            await asyncio.sleep(0)
        result = make_result(text, "length" if command == "length" else "stop")
        yield Finished(replace(result, num_generated_tokens=9) if command == "think" else result)


def make_plan(part: Any, notes: tuple[str, ...] = ()) -> MediaPlan:
    """The plan of a medium: its own where it has one."""
    if part.plan is not None:
        return part.plan
    video = isinstance(part, Video)
    return MediaPlan(
        kind="video" if video else "image",
        source_size=(64, 64),
        size=(64, 64),
        grid_thw=GridTHW(1, 4, 4),
        num_tokens=4,
        num_prompt_tokens=20,
        cache_bytes=100,
        processing="fake",
        frame_indices=(0, 1) if video else None,
        frame_times_s=(0.0, 0.5) if video else None,
        timestamps_s=(0.25,) if video else None,
        notes=notes,
        digest="00" * 32,
        unit_digests=("00" * 32,),
    )


def complete(plan: MediaPlan) -> MediaPlan:
    """What a plan becomes when its medium is read."""
    digests = tuple(f"{unit:064x}" for unit in range(plan.grid_thw.t))
    return plan if plan.digest else replace(plan, similar_difference=None, digest="ab" * 32, unit_digests=digests)


def make_result(text: str, finish_reason: FinishReason = "stop", *, num_prompt_tokens: int = 3, **cache: Any) -> Result:
    """What an answer cost; `cache` are fields of its CacheReport."""
    return Result(
        text=text,
        reasoning=None,
        finish_reason=finish_reason,
        token_ids=(1, 2),
        prompt_token_ids=(3, 4, 5),
        num_prompt_tokens=num_prompt_tokens,
        num_generated_tokens=2,
        ttft_s=0.25,
        decode_tokens_per_s=TOKENS_PER_S,
        cache=CacheReport(**cache),
    )


def _describe(message: Message) -> str:
    kinds = [type(part).__name__.lower() for part in message.content if not isinstance(part, Text)]
    counts = [(kind, kinds.count(kind)) for kind in ("image", "video")]
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts if count) or "no media"
