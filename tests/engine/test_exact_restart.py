"""A restart of the process: what the first one left on the disk gives the second one the same bits."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Event, Finished, GenerationRequest, Image, Message, Text, Video
from qwen35mm.engine import Engine
from qwen35mm.model import LoadedModel, load
from tests import forked
from tests.engine.exact import (
    DENSE,
    GREEDY,
    MIN_SEGMENT,
    MODELS,
    SETTINGS,
    Answer,
    Chat,
    assert_same,
    assistant,
    cache_settings,
    chat_checkpoint,
    chat_model,
    clip,
    cold,
    picture,
    recording,
    serve,
    user,
    words,
)

SYSTEM = words("system", count=40)


def process_questions(media: Path) -> list[Message]:
    return [
        user(Image(media / "picture.png"), words("what is this")),
        user(words("and then")),
        user(Video(media / "clip.mp4"), words("what happens")),
        user(words("at last")),
    ]


async def ask_all(backend: LocalBackend, questions: list[Message], messages: list[Message]) -> list[Message]:
    """Appends the questions and the replies to them."""
    for question in questions:
        messages = [*messages, question]
        (result,) = [
            e.result
            for e in await collect(backend.stream(GenerationRequest(messages, GREEDY)))
            if isinstance(e, Finished)
        ]
        messages.append(assistant(result.text or "nothing"))
        assert backend.wait_idle(60)
    return messages


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def backend_of(loaded: LoadedModel, cache: CacheSettings) -> LocalBackend:
    return LocalBackend(loaded, settings=SETTINGS, cache=cache, min_segment=MIN_SEGMENT)


def first_process(folder: Path, checkpoints: list[tuple[str, str]]) -> None:
    """What the other process does: three turns with each model, a clean end, and the replies on its last line."""
    replies = []
    for checkpoint, dtype in checkpoints:
        loaded = load(Path(checkpoint), dtype=dtype, device="cpu")
        backend = backend_of(loaded, cache_settings(loaded, directory=folder / "cache"))
        messages = asyncio.run(ask_all(backend, process_questions(folder)[:3], [Message("system", (Text(SYSTEM),))]))
        backend.close()
        replies.append([message.text for message in messages if message.role == "assistant"])
    print(json.dumps(replies))


async def test_another_process_takes_the_conversation_up_from_the_disk(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "picture.png")
    (tmp_path / "clip.mp4").write_bytes(clip().read_bytes())
    checkpoints = [(str(chat_checkpoint(spec)), dtype) for spec, dtype in MODELS]
    process = forked.run("tests.engine.test_exact_restart", tmp_path, json.dumps(checkpoints))
    assert process.returncode == 0, process.stderr
    for (spec, dtype), replies in zip(MODELS, json.loads(process.stdout.splitlines()[-1]), strict=True):
        loaded = chat_model(spec, dtype)
        questions = process_questions(tmp_path)
        messages = [Message("system", (Text(SYSTEM),))]
        for question, reply in zip(questions, replies, strict=False):
            messages += [question, assistant(reply)]
        messages.append(questions[-1])
        backend = backend_of(loaded, cache_settings(loaded, directory=tmp_path / "cache"))
        try:
            with recording() as logits_of:
                events = await collect(backend.stream(GenerationRequest(messages, GREEDY)))
        finally:
            backend.close()
        (result,) = [event.result for event in events if isinstance(event, Finished)]
        (logits,) = logits_of.values()
        assert_same(Answer(result, torch.stack(logits)), cold(loaded, Chat(loaded).request(messages)))
        history = Chat(loaded).history(messages[:-1]).prompt
        assert result.cache.cached_from == {"disk": history.tail_start}
        assert result.cache.num_encoded_units == 0


def test_what_was_kept_with_other_settings_is_not_taken_and_told(tmp_path: Path) -> None:
    loaded = chat_model(DENSE)
    request = Chat(loaded).request([user(words("question", count=80))])
    reports = []
    for chunk_tokens in (64, 32, 64):
        settings = replace(SETTINGS, chunk_tokens=chunk_tokens)
        engine = Engine(loaded, settings, cache_settings(loaded, directory=tmp_path))
        (answer,) = serve(engine, request)
        engine.flush()
        reports.append(answer.result.cache)
    assert [report.miss for report in reports] == ["new content", "other model", None]
    assert set(reports[2].cached_from) == {"disk"}


if __name__ == "__main__":
    first_process(Path(sys.argv[1]), json.loads(sys.argv[2]))
