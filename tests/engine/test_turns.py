"""What a turn costs once its history is committed: the new message, the generation prompt, and less than a segment."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import (
    Event,
    Finished,
    GenerationRequest,
    Image,
    Message,
    Progress,
    SamplingParams,
    Text,
    TextDelta,
    ToolCall,
)
from qwen35mm.engine import Engine, EngineSettings, commits
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import Prompt
from tests.engine.exact import (
    MIN_SEGMENT,
    Chat,
    PrefillCount,
    assert_same,
    assistant,
    cache_settings,
    cold,
    counting_prefill,
    dialog,
    endless_replies,
    picture,
    serve,
    user,
    words,
)

PIECE = 48
SETTINGS = EngineSettings(context_length=2048, chunk_tokens=PIECE, slots=2)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)
SYSTEM = Message("system", (Text(words("system", count=30)),))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def count(loaded: LoadedModel) -> Iterator[PrefillCount]:
    with counting_prefill() as count, endless_replies(loaded):
        yield count


@pytest.fixture
def backend(loaded: LoadedModel) -> Iterator[LocalBackend]:
    with backend_of(loaded) as backend:
        yield backend


@contextlib.contextmanager
def backend_of(loaded: LoadedModel, directory: Path | None = None, **options: Any) -> Iterator[LocalBackend]:
    cache = cache_settings(loaded, directory=directory)
    backend = LocalBackend(loaded, settings=SETTINGS, cache=cache, min_segment=MIN_SEGMENT, **options)
    try:
        yield backend
    finally:
        backend.close()


def pieces(prompt: Prompt, start: int) -> list[int]:
    """The passes that the prompt's cuts and the engine's pieces imply for what lies behind token `start`."""
    bounds = [(segment.start, segment.stop) for segment in prompt.segments if segment.start >= start]
    assert start == prompt.tail_start or bounds[0][0] == start, "no cut there"
    if prompt.tail_start < len(prompt.token_ids):
        bounds.append((prompt.tail_start, len(prompt.token_ids)))
    return [min(PIECE, stop - at) for begin, stop in bounds for at in range(begin, stop, PIECE)]


def assert_only_the_new(count: PrefillCount, prompt: Prompt, history: Prompt) -> None:
    """That exactly what lies behind the history's last cut was prefilled, in as few passes as can be."""
    size = len(history.token_ids)
    assert prompt.token_ids[:size].tolist() == history.token_ids.tolist(), "the history isn't the prompt's beginning"
    assert size - history.tail_start < MIN_SEGMENT
    num_new = len(prompt.token_ids) - size
    computed = count.until_first_token
    assert computed is not None
    assert sum(computed) == num_new + size - history.tail_start
    assert computed == pieces(prompt, history.tail_start)


async def answer(events: AsyncIterator[Event], *, leave_after: int | None = None) -> Message:
    """The reply of a stream, left after so many pieces of text."""
    text, reasoning, num_deltas = "", "", 0
    async for event in events:
        if isinstance(event, TextDelta):
            num_deltas += 1
            if event.channel == "answer":
                text += event.text
            else:
                reasoning += event.text
            if leave_after is not None and text and num_deltas >= leave_after:
                break
        elif isinstance(event, Finished):
            assert (event.result.text, event.result.reasoning or "") == (text, reasoning)
    await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert text, "a turn without an answer is no turn"
    return assistant(text, reasoning or None)


def question(number: int) -> Message:
    """Now short, now long, every seventh with a picture."""
    text = words("question", number, count=(3, 25, 9, 60, 1, 14)[number % 6])
    return user(Image(picture(number)), text) if number % 7 == 1 else user(text)


@pytest.mark.parametrize("thinking", [False, True], ids=["no thinking", "thinking"])
async def test_a_turn_prefills_only_what_is_new(
    backend: LocalBackend, chat: Chat, count: PrefillCount, thinking: bool
) -> None:
    """Turns 2 to 9: each kind of question; the thinking of earlier turns is stripped by the template."""
    params = PARAMS.with_overrides(thinking_budget=4 if thinking else None)
    messages, cached = [SYSTEM], []
    for number in range(9):
        messages.append(question(number))
        count.reset()
        reply = await answer(backend.stream(GenerationRequest(messages, params, enable_thinking=thinking)))
        assert bool(reply.reasoning) == thinking
        prompt = chat.request(messages, enable_thinking=thinking).prompt
        if number:
            assert_only_the_new(count, prompt, chat.history(messages[:-1], enable_thinking=thinking).prompt)
            cached.append(len(prompt.token_ids) - sum(count.until_first_token or ()))
        else:
            assert count.until_first_token == pieces(prompt, 0)
        messages.append(reply)
        assert backend.wait_idle(60)
    assert cached == sorted(cached)
    assert cached[-1] > 400, "a conversation long enough to tell"


@pytest.mark.parametrize("thinking", [False, True], ids=["no thinking", "thinking"])
async def test_after_stop_and_after_a_cut_off_reply(
    backend: LocalBackend, chat: Chat, count: PrefillCount, thinking: bool
) -> None:
    messages = [SYSTEM]
    for number, (leave_after, max_tokens) in enumerate([(6, 400), (None, 50), (9, 400), (None, 20), (None, 16)]):
        messages.append(question(number))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, thinking_budget=4 if thinking else None)
        count.reset()
        events = backend.stream(GenerationRequest(messages, params, enable_thinking=thinking))
        reply = await answer(events, leave_after=leave_after)
        if number:
            assert_only_the_new(
                count,
                chat.request(messages, enable_thinking=thinking).prompt,
                chat.history(messages[:-1], enable_thinking=thinking).prompt,
            )
        messages.append(reply)
        assert await asyncio.to_thread(backend.wait_idle, 60)


@pytest.mark.parametrize("thinking", [False, True], ids=["no thinking", "thinking"])
async def test_turns_with_tool_calls(backend: LocalBackend, chat: Chat, count: PrefillCount, thinking: bool) -> None:
    """Between a call and its result the template keeps the thinking, and strips it once a person speaks again."""
    options: dict[str, Any] = {"tools": TOOLS, "enable_thinking": thinking}
    params = PARAMS.with_overrides(thinking_budget=4 if thinking else None)
    call = Message(
        "assistant",
        (Text(words("let me see")),),
        reasoning=words("I should look") if thinking else None,
        tool_calls=(ToolCall("look", {"at": words("there")}),),
    )
    result = Message("tool", (Text(words("the result", count=30)),))
    messages = [SYSTEM, user(words("look", count=20))]
    await answer(backend.stream(GenerationRequest(messages, params, **options)))
    assert backend.wait_idle(60)
    for following in (result, user(words("and now", count=20)), user("thanks")):
        # The model's own words are made up here: a tiny random model calls no tools.
        messages.append(call if messages[-1].role == "user" and following.role == "tool" else assistant(words("done")))
        backend.commit_history(GenerationRequest(messages, **options))
        assert backend.wait_idle(60)
        history = chat.history(messages, **options).prompt
        messages.append(following)
        count.reset()
        await answer(backend.stream(GenerationRequest(messages, params, **options)))
        prompt = chat.request(messages, **options).prompt
        thoughts = chat.loaded.tokenizer.encode_plain("I should look")
        assert (following.role == "tool" and thinking) == holds(prompt, words("I should look"), chat), thoughts
        assert_only_the_new(count, prompt, history)
        assert backend.wait_idle(60)


def holds(prompt: Prompt, text: str, chat: Chat) -> bool:
    return text in chat.loaded.tokenizer.decode(prompt.token_ids.tolist())


def history_of(chat: Chat, num_turns: int, words_each: int) -> list[Message]:
    questions = [user(words("turn", number, count=words_each)) for number in range(num_turns)]
    return dialog([*questions, user(words("next"))])


def test_pending_commits_keep_few_files_in_memory(
    backend: LocalBackend, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server commits nothing, and the files of answered requests may be large."""
    file = io.BytesIO()
    PILImage.new("RGB", (64, 64)).save(file, "PNG")
    plan = backend.media.prepare(file.getvalue()).plan
    asked = [Message("user", (Image(file.getvalue(), plan), Text("What?"))), Message("assistant", "Nothing.")]
    engine, history = Engine(chat.loaded, SETTINGS), backend.history(GenerationRequest(asked))
    assert history.num_media_bytes == len(file.getvalue())
    monkeypatch.setattr(commits, "_MAX_MEDIA_BYTES", int(2.5 * len(file.getvalue())))
    for num in (1, 2, 2, 2):
        engine.commit(history)
        assert len(engine._commits) == num
    monkeypatch.setattr(commits, "_MAX_MEDIA_BYTES", 0)
    engine.commit(history)
    assert len(engine._commits) == 1


@pytest.mark.parametrize("num_turns", [2, 12])
def test_a_commit_cut_short_is_used_as_far_as_it_came(
    loaded: LoadedModel, chat: Chat, count: PrefillCount, num_turns: int
) -> None:
    """A new message comes after some number of pieces: the next turn goes on from the last cut before them."""
    messages = history_of(chat, num_turns, words_each=40)
    history = chat.history(messages[:-1], conversation="chat")
    request = chat.request(messages, conversation="chat")
    total = len(pieces(history.prompt, 0)) - (history.prompt.tail_start < len(history.prompt.token_ids))
    assert total > num_turns
    for num_pieces in range(0, total + 1, -(-num_turns // 4)):
        engine = Engine(loaded, SETTINGS, cache_settings(loaded))
        engine.commit(history)
        count.reset()
        while len(count.pieces) < num_pieces:
            engine.step()
            engine.check_integrity()
        reached = sum(count.pieces)
        last_cut = max((s.stop for s in history.prompt.segments if s.stop <= reached), default=0)
        count.reset()
        (reply,) = serve(engine, replace(request, id=f"after {num_pieces}"))
        assert reply.result.cache.num_cached_tokens == last_cut
        assert count.until_first_token == pieces(request.prompt, last_cut)
        assert_same(reply, cold(loaded, request, SETTINGS))


def test_a_request_broken_off_in_its_prefill_is_used_as_far_as_it_came(
    loaded: LoadedModel, chat: Chat, count: PrefillCount
) -> None:
    request = chat.request(history_of(chat, 8, words_each=30))
    for num_pieces in range(1, len(pieces(request.prompt, 0)), 3):
        engine = Engine(loaded, SETTINGS, cache_settings(loaded))
        broken_off = replace(request, id="broken off")
        engine.add(broken_off)
        count.reset()
        while len(count.pieces) < num_pieces:
            engine.step()
        engine.cancel(broken_off.id)
        engine.check_integrity()
        last_cut = max((s.stop for s in request.prompt.segments if s.stop <= sum(count.pieces)), default=0)
        (reply,) = serve(engine, replace(request, id=f"after {num_pieces}"))
        assert reply.result.cache.num_cached_tokens == last_cut


async def test_a_message_sent_at_once_supersedes_the_commit(
    backend: LocalBackend, chat: Chat, count: PrefillCount
) -> None:
    """Nobody waits for the commit here: whatever it had done by then, no more is computed than without it."""
    messages = [SYSTEM]
    for number in range(6):
        messages.append(question(number))
        count.reset()
        reply = await answer(backend.stream(GenerationRequest(messages, PARAMS, conversation="chat")))
        prompt = chat.request(messages).prompt
        assert count.until_first_token is not None
        assert sum(count.until_first_token) <= len(prompt.token_ids)
        messages.append(reply)
    assert backend.wait_idle(60)
    assert len(backend.engine._engine._commits) == 0


def test_commits_wait_for_everybody_and_give_way_at_the_next_piece(
    loaded: LoadedModel, chat: Chat, count: PrefillCount
) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    messages = history_of(chat, 6, words_each=40)
    engine.commit(chat.history(messages[:-1], conversation="one"))
    while len(count.pieces) < 2:
        engine.step()
    other = chat.request([user(words("somebody else", count=60))], conversation="two")
    engine.add(other)
    count.reset()
    progress: list[Sequence[Any]] = []
    while engine.has_requests:
        outputs = engine.step()
        progress.append([output.event for output in outputs if isinstance(output.event, Progress)])
        engine.check_integrity()
    assert count.until_first_token == pieces(other.prompt, 0)
    assert count.pieces == count.until_first_token, "no piece of the commit while somebody waited"
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    (reply,) = serve(engine, chat.request(messages, conversation="one"))
    assert reply.result.cache.num_cached_tokens == chat.history(messages[:-1]).prompt.tail_start
