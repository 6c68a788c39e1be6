"""Run in a process of its own with the fake `spaces`: what a ZeroGPU Space does, told as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(1, str(Path(__file__).parent / "fake"))
# The process that this one was forked from may have looked for a folder already.
tempfile.tempdir = None

from qwen35mm.cli.chat import open_page, zero_gpu  # noqa: E402
from qwen35mm.settings import ModelOptions, PageOptions  # noqa: E402

assert zero_gpu() is not None

import spaces  # noqa: E402  # pyright: ignore[reportMissingImports]

from qwen35mm.backends.local import LocalBackend  # noqa: E402
from qwen35mm.contract import (  # noqa: E402
    Finished,
    GenerationRequest,
    Image,
    MediaPlanned,
    Message,
    Result,
    SamplingParams,
    Text,
    TextDelta,
    pin_plans,
)
from qwen35mm.engine import Engine, EngineSettings  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
PICTURE = ROOT / "assets" / "samples" / "three-shapes.png"
# Long enough for a segment that ends behind the reply.
LONG = " ".join(f"Remember the number {number}." for number in range(60))


async def ask(backend: Any, messages: Sequence[Message], **options: Any) -> tuple[list[Any], list[Message]]:
    """All events, and the messages with the plans that came."""
    events: list[Any] = []
    async for event in backend.stream(GenerationRequest(messages, GREEDY, **options)):
        events.append(event)
        if isinstance(event, MediaPlanned):
            messages = pin_plans(messages, event.plans)
    return events, list(messages)


async def two_turns(backend: Any) -> list[Result]:
    """Two turns of one conversation, the second after all work behind the first."""
    results: list[Result] = []
    messages = [Message("user", (Image(PICTURE), Text(f"{LONG} What shapes are there?")))]
    for question in ("And their colours?", None):
        events, messages = await ask(backend, messages, conversation="talk", tenant="someone")
        assert isinstance(events[-1], Finished)
        results.append(events[-1].result)
        assert await asyncio.to_thread(backend.wait_idle, 60)
        messages.append(Message("assistant", (Text(results[-1].text),)))
        if question:
            messages.append(Message("user", (Text(question),)))
    return results


async def error_of(backend: Any, messages: Sequence[Message], **options: Any) -> dict[str, str]:
    try:
        await ask(backend, messages, **options)
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": "none", "message": ""}


@contextmanager
def stepping(instead: Callable[[Engine, Callable[[Engine], Any]], Any]) -> Any:
    """Has the children that are forked meanwhile do something else in place of a step."""
    step = Engine.step
    Engine.step = lambda engine: instead(engine, step)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Engine.step = step


def die_after_first_text(engine: Engine, step: Callable[[Engine], Any]) -> Any:
    if engine._decoder.running:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine)


def never_end_after_first_text(engine: Engine, step: Callable[[Engine], Any]) -> Any:
    return [] if engine._decoder.running else step(engine)


def fail(engine: Engine, step: Callable[[Engine], Any]) -> Any:
    raise ValueError("/a/path/of/the/server")


async def stop_after_first_text(backend: Any) -> None:
    events = backend.stream(
        GenerationRequest([Message("user", (Text(f"{LONG} Go on."),))], GREEDY, conversation="stopped")
    )
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()


async def drive(backend: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": type(backend).__name__, "context_length": backend.context_length}
    told["demo"] = backend.is_demo
    turns = await two_turns(backend)
    told["turns"] = [describe(turn) for turn in turns]
    hello = [Message("user", (Text("hello"),))]

    with stepping(die_after_first_text):
        told["killed"] = await error_of(backend, hello)
    with stepping(fail):
        told["failed"] = await error_of(backend, hello)

    gone = PICTURE.with_name("gone.png")
    events, planned = await ask(backend, [Message("user", (Image(PICTURE), Text("hello")))], tenant="one")
    told["after"] = isinstance(events[-1], Finished)
    image = planned[0].content[0]
    assert isinstance(image, Image)
    lost = [Message("user", (Image(gone, image.plan), Text("hello")))]
    told["gone"] = await error_of(backend, lost, tenant="another")
    told["found"] = await error_of(backend, lost, tenant="one")

    with stepping(never_end_after_first_text):
        await stop_after_first_text(backend)
        told["stopped"] = await asyncio.to_thread(backend.wait_idle, 60)
    told["closed"] = spaces.calls[-1].closed
    events, _ = await ask(backend, [Message("user", (Text(f"{LONG} Go on."),))], conversation="stopped")
    told["after_stop"] = describe(events[-1].result)
    too_long = [Message("user", (Text("word " * backend.context_length),))]
    num_calls = len(spaces.calls)
    told["too_long"] = await error_of(backend, too_long)
    told["calls_for_too_long"] = len(spaces.calls) - num_calls
    assert await asyncio.to_thread(backend.wait_idle, 60)
    told["calls"] = [vars(call) for call in spaces.calls]

    local = LocalBackend(backend.loaded, settings=EngineSettings(slots=1, context_length=backend.context_length))
    try:
        told["local_turns"] = [describe(turn) for turn in await two_turns(local)]
    finally:
        local.close()
    return told


def describe(result: Result) -> dict[str, Any]:
    cache = result.cache
    return {
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_token_ids,
        "cached_from": dict(cache.cached_from),
        "num_prefilled": cache.num_prefilled_tokens,
    }


def main() -> None:
    with open_page(ModelOptions(), PageOptions()) as (backend, _):
        told = asyncio.run(drive(backend))
    told["parent"] = os.getpid()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
