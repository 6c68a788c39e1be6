"""Prompts share the engine: short ones first, tenants equally, nobody starves, and no bit changes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from qwen35mm.cache import OutOfBlocksError, Start
from qwen35mm.contract import Finished, Image, Message, PromptRead, Text, TextDelta
from qwen35mm.engine import Engine, EngineSettings, Request, StepOutput
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.reading import Reading
from qwen35mm.engine.schedule import BURST, DEEP_TOKENS, LATER_PER_OLDEST, PREFILL_PER_DECODE, Pace, Shares, work
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.errors import EngineError, RequestTimeoutError
from qwen35mm.model import Batch, LoadedModel
from qwen35mm.model.decoder import Qwen35Model
from tests.engine.exact import (
    GREEDY,
    Chat,
    assert_same,
    assistant,
    cache_settings,
    cold,
    counting_prefill,
    endless_replies,
    picture,
    recording,
    results_of,
    serve,
    small_blocks,
    user,
    words,
)

SETTINGS = EngineSettings(context_length=1024, chunk_tokens=64, slots=4, batch_invariant=True)


@dataclass(eq=False)
class Asked:
    """A prompt of the policy's tests."""

    left: float
    tenant: bytes = b""
    ahead: float = 0.0


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 0, 0), (0, 1024, 1040), (DEEP_TOKENS - 512, DEEP_TOKENS + 512, 2048)]
)
def test_work_grows_with_the_tokens_before(start: int, stop: int, expected: float) -> None:
    assert work(start, stop) == expected
    middle = (start + stop) // 2
    assert work(start, middle) + work(middle, stop) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lefts", "expected"),
    [([3, 2, 1], [2, 1, 0]), ([5, 5, 5], [0, 1, 2]), ([7, 9, 7], [0, 2, 1]), ([], [])],
)
def test_the_shortest_comes_first_and_of_equals_the_oldest(lefts: list[float], expected: list[int]) -> None:
    prompts = [Asked(left) for left in lefts]
    assert [prompts.index(each) for each in Shares().order(prompts, prompts)] == expected


def run_policy(shares: Shares, prompts: list[Asked], num_units: int, unit: float = 64) -> list[Asked]:
    """Who ran, unit by unit; the finished leave."""
    ran = []
    for _ in range(num_units):
        if not prompts:
            break
        first = shares.order(prompts, prompts)[0]
        first.left -= unit
        shares.count(first, unit, prompts)
        ran.append(first)
        if first.left <= 0:
            prompts.remove(first)
    return ran


def test_a_stream_of_short_prompts_leaves_the_oldest_a_quarter() -> None:
    shares, long = Shares(), Asked(40_000)
    prompts, shorts = [long], 0.0
    for _ in range(3000):
        if len(prompts) == 1:
            prompts.append(Asked(64))
        (ran,) = run_policy(shares, prompts, 1)
        shorts += 64 * (ran is not long)
        done = 40_000 - long.left
        # At any time, not only in the end.
        assert done >= (shorts - BURST - 128) / LATER_PER_OLDEST
        assert shorts >= min(LATER_PER_OLDEST * done, BURST), "short ones don't wait before they had their burst"
        if long not in prompts:
            return
    raise AssertionError("the long prompt starved")


def test_a_tenants_many_prompts_do_not_push_anothers() -> None:
    prompts = [Asked(2000, b"a") for _ in range(8)] + [Asked(8000, b"b")]
    own = prompts[-1]
    ran = run_policy(Shares(), prompts, 1000)
    before = ran[: max(index for index, each in enumerate(ran) if each is own)]
    assert Counter(each.tenant for each in before)[b"a"] <= len(before) / 2 + 1


def test_a_newcomer_is_ahead_by_its_burst_at_most() -> None:
    shares, long = Shares(), Asked(400_000, b"a")
    prompts = [long]
    run_policy(shares, prompts, 1000)
    for _ in range(3):
        other = Asked(100_000, b"b")
        prompts.append(other)
        ran = run_policy(shares, prompts, 300)
        own = sum(64 for each in ran if each is other)
        assert own <= 300 * 64 / 2 + BURST + 64
        prompts.remove(other)
        # It gains no more by going and coming back at once.
        run_policy(shares, prompts, 1)
    again = Asked(100_000, b"b")
    prompts.append(again)
    ran = run_policy(shares, prompts, 100)
    assert sum(64 for each in ran if each is again) <= 50 * 64 + 4 * 64


def test_a_prompt_that_waits_for_a_file_is_passed_over() -> None:
    shares, waits, runs = Shares(), Asked(1), Asked(5)
    assert shares.order([waits, runs], [runs]) == [runs]
    shares.count(runs, 64, [runs])
    assert (waits.ahead, runs.ahead) == (0.0, 0.0)


@pytest.mark.parametrize(("prefill_s", "decode_s", "expected"), [(0.1, 1.0, 30), (1.0, 1.0, 3), (5.0, 1.0, 1)])
def test_replies_keep_a_quarter_of_the_time(prefill_s: float, decode_s: float, expected: int) -> None:
    pace, between = Pace(), 0
    pace.decoded(decode_s)
    while not pace.decodes:
        pace.prefilled(prefill_s, ends_chunk=False)
        between += 1
    assert between == pytest.approx(max(PREFILL_PER_DECODE * decode_s / prefill_s, 1), abs=1) == expected


def test_a_chunks_end_makes_a_token_due() -> None:
    pace = Pace()
    pace.decoded(100.0)
    pace.prefilled(0.1, ends_chunk=True)
    assert pace.decodes
    pace.decoded(100.0)
    assert not pace.decodes


@pytest.fixture(autouse=True)
def _endless(loaded: LoadedModel) -> Iterator[None]:
    with endless_replies(loaded):
        yield


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the chunk, for each layer of a prompt that was run."""
    ran: list[int] = []
    by_layers = Qwen35Model.by_layers

    def watched(self: Qwen35Model, batch: Batch) -> Any:
        for hidden in by_layers(self, batch):
            if batch.is_prefill:
                ran.append(len(batch.embeds))
            yield hidden

    monkeypatch.setattr(Qwen35Model, "by_layers", watched)
    return ran


def ask(chat: Chat, name: str, count: int, *, max_tokens: int = 4, **options: Any) -> Request:
    params = replace(GREEDY, max_tokens=max_tokens)
    return chat.request([user(words(name, count=count))], params=params, **options)


def first_tokens(outputs: list[StepOutput], request: Request) -> bool:
    return any(o.request_id == request.id and isinstance(o.event, TextDelta | Finished) for o in outputs)


def steps_until(engine: Engine, request: Request) -> int:
    """Steps until a request's first token."""
    for number in range(1, 2000):
        outputs = engine.step()
        engine.check_integrity()
        if first_tokens(outputs, request):
            return number
    raise AssertionError("no token")


def test_a_short_prompt_waits_for_a_layer_of_a_long_one(loaded: LoadedModel, chat: Chat, layers: list[int]) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    long, short = ask(chat, "long", 500), ask(chat, "short", 3)
    engine.add(long)
    while sum(layers) < 3 * 64:
        engine.step()
    assert len(layers) % len(loaded.model.layers) == 1, "in the middle of a chunk"
    layers.clear()
    engine.add(short)
    steps_until(engine, short)
    sizes = [min(64, stop - start) for start, stop in bounds(short) for start in range(start, stop, 64)]
    assert layers == [size for size in sizes for _ in loaded.model.layers], "nothing but its own layers"


def bounds(request: Request) -> list[tuple[int, int]]:
    prompt = request.prompt
    found = [(each.start, each.stop) for each in prompt.segments]
    return [*found, (prompt.tail_start, len(prompt.token_ids))]


def test_prompts_that_interrupt_each_other_equal_cold(loaded: LoadedModel, chat: Chat) -> None:
    """Each comes in the middle of the last one's chunk; all have the bits of a run alone."""
    requests = [
        ask(chat, "one", 300),
        ask(chat, "two", 120, salt=b"b"),
        chat.request([user(Image(picture(3)), words("three", count=40))]),
        ask(chat, "four", 3, max_tokens=9),
    ]
    engine, interrupted = Engine(loaded, SETTINGS, cache_settings(loaded)), 0
    outputs: list[StepOutput] = []
    with recording() as logits_of:
        for request in requests:
            engine.add(request)
            for _ in range(3):
                outputs += engine.step()
                engine.check_integrity()
            interrupted += len([each for each in engine._prefilling if each.prefill.spent])
        while engine.has_work:
            outputs += engine.step()
            engine.check_integrity()
    found = results_of(outputs)
    assert interrupted > len(requests)
    for request in requests:
        expected = cold(loaded, request, SETTINGS)
        assert found[request.id].token_ids == expected.result.token_ids
        assert torch.equal(torch.stack(logits_of[request.id]), expected.logits)


def test_a_stream_of_short_prompts_does_not_starve_a_long_one(
    loaded: LoadedModel, chat: Chat, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.engine.schedule.BURST", 100.0)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    long, number = ask(chat, "long", 400), 0
    engine.add(long)
    engine.step()
    layers.clear()
    done = False
    while not done:
        if sum(each.request.id != long.id for each in engine._prefilling) == 0 and not engine._waiting:
            number += 1
            engine.add(ask(chat, f"short {number}", 30, max_tokens=1))
        done = first_tokens(engine.step(), long)
    total = len(long.prompt.token_ids) * len(loaded.model.layers)
    others = sum(layers) - total
    assert number > 3
    assert others < LATER_PER_OLDEST * total * 1.2 + 4 * 100 * len(loaded.model.layers)


def test_twins_compute_what_they_share_once(loaded: LoadedModel, chat: Chat) -> None:
    """The second waits for the first one's segments, also where both come at once."""
    system = Message("system", (Text(words("system", count=120)),))
    twins = [chat.request([system, user(words(name, count=30))]) for name in ("a", "b", "c")]
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    with counting_prefill() as count:
        answers = serve(engine, *twins)
    shared = next(each.stop for each in twins[0].prompt.segments if each.stop >= 120)
    assert sum(count.pieces) <= sum(len(each.prompt.token_ids) for each in twins) - 2 * shared
    for twin, answer in zip(twins, answers, strict=True):
        assert_same(answer, cold(loaded, twin, SETTINGS))


def test_a_warm_prompt_is_as_short_as_what_it_lacks(loaded: LoadedModel, chat: Chat, layers: list[int]) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    history = [Message("system", (Text(words("a long history", count=400)),))]
    serve(engine, chat.request([*history, user("hello")]))
    engine.add(ask(chat, "half as long", 200))
    engine.step()
    layers.clear()
    warm = chat.request([*history, user("again")])
    engine.add(warm)
    steps_until(engine, warm)
    assert sum(layers) < 100 * len(loaded.model.layers)


@pytest.mark.parametrize("how", ["cancel", "deadline", "error"])
def test_a_prompt_can_end_between_two_layers(
    loaded: LoadedModel, chat: Chat, layers: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    now = [0.0]
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: now[0])
    ends = ask(chat, "ends", 90, deadline_s=5.0 if how == "deadline" else None)
    stays = ask(chat, "stays", 300)
    engine.add(stays)
    engine.step()
    engine.add(ends)
    engine.step()
    assert [each.prefill.start is not None for each in engine._prefilling] == [True, True]
    outputs = []
    if how == "cancel":
        engine.cancel(ends.id)
    elif how == "deadline":
        now[0] = 6.0
    else:
        monkeypatch.setattr(loaded.model.layers[1], "forward", failing_once(loaded.model.layers[1], monkeypatch))
    outputs += engine.step()
    engine.check_integrity()
    assert [each.request.id for each in engine._prefilling] == [stays.id]
    errors = [o.event for o in outputs if o.request_id == ends.id]
    expected = {"cancel": [], "deadline": [RequestTimeoutError], "error": [EngineError]}[how]
    assert [type(error) for error in errors] == expected
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    (finished,) = [o.event for o in outputs if isinstance(o.event, Finished)]
    assert finished.result.token_ids == cold(loaded, stays, SETTINGS).result.token_ids


def failing_once(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    forward = layer.forward

    def fail(*args: Any) -> Any:
        monkeypatch.setattr(layer, "forward", forward)
        raise ValueError("a bug")

    return fail


def test_replies_get_tokens_between_the_layers_of_a_chunk(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a layer takes one second and a token two: six layers for each token."""
    now, calls = [0.0], []
    by_layers, run_graph = Qwen35Model.by_layers, StepGraph.run

    def watched(self: Qwen35Model, batch: Batch) -> Any:
        for hidden in by_layers(self, batch):
            if batch.is_prefill:
                now[0] += 1.0
                calls.append("layer")
            yield hidden

    def decode(self: StepGraph, answer: int) -> None:
        now[0] += 2.0
        calls.append("token")
        run_graph(self, answer)

    monkeypatch.setattr(Qwen35Model, "by_layers", watched)
    monkeypatch.setattr(StepGraph, "run", decode)
    # One chunk has more layers than six.
    monkeypatch.setattr(
        Pace, "prefilled", lambda self, s, *, ends_chunk, _of=Pace.prefilled: _of(self, s, ends_chunk=False)
    )
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: now[0])
    engine.add(ask(chat, "runs", 3, max_tokens=60))
    for _ in range(8):
        engine.step()
    long = ask(chat, "long", 400)
    engine.add(long)
    calls.clear()
    steps_until(engine, long)
    gaps = "".join(call[0] for call in calls).strip("t").split("t")
    assert {len(gap) for gap in gaps[1:-1]} == {6}
    assert len(gaps) > 3


def test_prompts_in_a_small_pool_end_and_equal_cold(loaded: LoadedModel, chat: Chat) -> None:
    """Room for little more than one context: prompts, replies and preempted replies take it from each other."""
    settings = replace(SETTINGS, context_length=256, chunk_tokens=16)
    with small_blocks(8):
        engine = Engine(loaded, settings, cache_settings(loaded, num_tokens=280))
        requests = [
            ask(chat, f"{number}", count, max_tokens=60 if number % 2 else 8, salt=bytes([65 + number % 3]))
            for number, count in enumerate([60, 20, 3, 70, 40, 5])
        ]
        answers = serve(engine, *requests)
        for request, answer in zip(requests, answers, strict=True):
            assert_same(answer, cold(loaded, request, settings))


def test_a_prompt_without_room_lets_another_run(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    long, short = ask(chat, "long", 300), ask(chat, "short", 3)
    step = Prefill.step

    def refuse(self: Prefill) -> Any:
        is_long = isinstance(self.source, Request) and self.source.id == long.id
        if not is_long and not long_ended(engine, long):
            raise OutOfBlocksError("full")
        return step(self)

    monkeypatch.setattr(Prefill, "step", refuse)
    serve(engine, long, short)


def long_ended(engine: Engine, long: Request) -> bool:
    return all(each.request.id != long.id for each in engine._prefilling)


def test_a_requeued_prompt_holds_blocks(loaded: LoadedModel, chat: Chat) -> None:
    """One that hasn't begun has nothing to give."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    begun, other, third = ask(chat, "begun", 200), ask(chat, "other", 100), ask(chat, "third", 300)
    engine.add(begun)
    engine.step()
    engine.add(other)
    engine.step()
    engine.add(third)
    engine.step()
    states = {each.request.id: each.prefill.start is not None for each in engine._prefilling}
    assert states == {begun.id: True, other.id: True, third.id: False}
    assert engine._wait_for_room(engine._prefilling[0], OutOfBlocksError("full")) == []
    assert list(engine._waiting) == [other.id]
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def test_a_commit_gives_way_between_two_layers(loaded: LoadedModel, chat: Chat, layers: list[int]) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    history = [user(words("question", count=200)), assistant("done")]
    engine.commit(chat.history(history))
    engine.step()
    assert len(layers) == 1
    short = ask(chat, "short", 3)
    engine.add(short)
    steps_until(engine, short)
    assert sum(size == 64 for size in layers) == 1
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def test_one_picture_is_in_the_tower_at_a_time(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory plan counts one unit's activations. Prompts without pictures go on meanwhile."""
    monkeypatch.setattr("qwen35mm.engine.vision.CPU_PATCH_LAYERS", 1)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    large = chat.request([user(Image(picture(5, (256, 256))), words("large", count=60))])
    small = chat.request([user(Image(picture(6)), "small")])
    text = ask(chat, "text", 3)
    engine.add(large)
    while not any(each.prefill.in_tower for each in engine._prefilling):
        engine.step()
    engine.add(small)
    engine.add(text)
    order: list[str] = []
    while engine.has_work:
        for output in engine.step():
            if isinstance(output.event, Finished):
                order.append(output.request_id)
        assert sum(each.prefill.in_tower for each in engine._prefilling) <= 1
        engine.check_integrity()
    assert order[0] == text.id
    assert sorted(order) == sorted([large.id, small.id, text.id])


def test_a_prompt_that_is_only_read_shares_too(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    long, short = ask(chat, "long", 300), ask(chat, "short", 30)
    short = replace(short, reading=Reading("last"), replies=False)
    engine.add(long)
    engine.step()
    engine.add(short)
    while not any(isinstance(output.event, PromptRead) for output in engine.step()):
        assert long.id in engine._running
    assert engine._prefilling[0].request.id == long.id


def begin(engine: Engine, request: Request) -> Prefill:
    """Adds a request and does its first unit of work: on this model half a chunk."""
    engine.add(request)
    for _ in range(50):
        engine.step()
        for each in engine._prefilling:
            if each.request.id == request.id and each.prefill.spent:
                return each.prefill
    raise AssertionError("it never began")


def test_tenants_who_left_are_forgotten_once_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can name a new one with each request."""
    monkeypatch.setattr("qwen35mm.engine.schedule.MOST_ABSENT", 5)
    shares = Shares()
    for number in range(100):
        run_policy(shares, [Asked(64 if number != 3 else 640, b"%d" % number)], 20)
    assert len(shares._done) <= 6
    assert b"3" in shares._done, "who did most is remembered longest"


def test_segments_of_all_prompts_are_unpinned_before_one_begins_again(loaded: LoadedModel, chat: Chat) -> None:
    """Else one that lacks another's pinned blocks could begin again for ever."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    starts: list[Start] = []
    for name, count in (("one", 200), ("two", 100)):
        system = Message("system", (Text(words(name, count=60)),))
        prefill = begin(engine, chat.request([system, user(words(name, "question", count=count))]))
        assert prefill.start is not None
        starts.append(prefill.start)
        for _ in range(50):
            if not prefill.start.pinned:
                engine.step()
    assert [bool(each.pinned) for each in starts] == [True, True]
    last = engine._prefilling[-1]
    for _ in starts:
        assert engine._wait_for_room(last, OutOfBlocksError("full")) == []
        assert not engine._waiting
    assert not any(each.pinned for each in starts)
    engine._wait_for_room(last, OutOfBlocksError("full"))
    assert list(engine._waiting) == [last.request.id]


def test_a_prompt_without_room_is_freed_when_it_ends(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: its pixels are large."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    requests = [ask(chat, "no room", 200), ask(chat, "nor here", 80)]
    for request in requests:
        begin(engine, request)

    def refuse(self: Prefill) -> Any:
        raise OutOfBlocksError("full")

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Prefill, "step", refuse)
            alive = [weakref.ref(each.prefill) for each in engine._prefilling]
            engine.step()
        for request in requests:
            engine.cancel(request.id)
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_a_commit_leaves_the_tower_to_a_prompt(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory plan counts one unit. A prompt without pictures lets the commit keep its own."""
    monkeypatch.setattr("qwen35mm.engine.vision.CPU_PATCH_LAYERS", 1)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    question = user(Image(picture(7, (256, 256))), words("question", count=60))
    engine.commit(chat.history([question, assistant("done")]))
    while not any(each.in_tower for each in engine._commits.begun):
        engine.step()
    text, seen = ask(chat, "text", 3, max_tokens=1), chat.request([user(Image(picture(8)), "look")])
    engine.add(text)
    steps_until(engine, text)
    assert [each.in_tower for each in engine._commits.begun] == [True]
    engine.add(seen)
    while not any(each.prefill.in_tower for each in engine._prefilling):
        engine.step()
    assert not engine._commits.begun
    (answer,) = serve(engine, replace(seen, id="again"))
    assert_same(answer, cold(loaded, seen, SETTINGS))


def twins(chat: Chat) -> tuple[Request, Request]:
    """A long prompt, and a short one that begins as it does."""
    system = Message("system", (Text(words("system", count=150)),))
    long, short = (
        chat.request([system, user(words(name, count=count))]) for name, count in (("long", 300), ("short", 3))
    )
    return long, short


def test_who_waits_for_a_long_prompt_gives_it_its_turn(loaded: LoadedModel, chat: Chat) -> None:
    """Else prompts shorter than the long one would go before the short one that waits for it."""
    long, short = twins(chat)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: 0.0)
    leader = begin(engine, long)
    other = ask(chat, "of middle length", 200)
    engine.add(other)
    engine.add(short)
    engine.step()
    waits = next(each.prefill for each in engine._prefilling if each.request.id == short.id)
    assert waits.waits_for(leader)
    while waits.waits_for(leader):
        before = leader.spent
        engine.step()
        engine.check_integrity()
        assert leader.spent > before
    steps_until(engine, short)
    assert {each.request.id for each in engine._prefilling} == {long.id, other.id}
    assert waits.report(None, 0.0, 0).num_cached_tokens > 100


@pytest.mark.parametrize("how", ["cancel", "deadline", "error", "requeue", "evict"])
def test_a_prompt_goes_on_when_the_one_it_waits_for_is_gone(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    now = [0.0]
    long, short = twins(chat)
    long = replace(long, deadline_s=5.0 if how == "deadline" else None)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded), clock=lambda: now[0])
    leader = begin(engine, long)
    engine.add(short)
    engine.step()
    waits = next(each.prefill for each in engine._prefilling if each.request.id == short.id)
    assert waits.waits_for(leader)
    outputs: list[StepOutput] = []
    if how == "cancel":
        engine.cancel(long.id)
    elif how == "deadline":
        now[0] = 6.0
    elif how == "error":
        for layer in loaded.model.layers:
            monkeypatch.setattr(layer, "forward", failing_once(layer, monkeypatch))
        # The chunk's other layer would fail, too.
        outputs += engine.step()
        monkeypatch.undo()
    elif how == "requeue":
        engine._requeue(engine._prefilling[0])
    else:
        while leader.start is None or not leader.start.pinned:
            engine.step()
        leader.unpin()
        engine.runtime.prefixes.reclaim(1000)
    with recording() as logits_of, endless_replies(loaded):
        while engine.has_work:
            outputs += engine.step()
            engine.check_integrity()
    ended = {"cancel": 0, "deadline": 1, "error": 1}.get(how, 0)
    assert sum(isinstance(each.event, Exception) for each in outputs) == ended
    found = results_of(outputs)
    assert found.keys() == ({long.id, short.id} if how in ("requeue", "evict") else {short.id})
    for request in (long, short):
        if request.id in found:
            expected = cold(loaded, request, SETTINGS)
            assert found[request.id].token_ids == expected.result.token_ids
            assert torch.equal(torch.stack(logits_of[request.id]), expected.logits)


def test_what_a_paused_chunk_reads_can_be_evicted(loaded: LoadedModel, chat: Chat) -> None:
    """Its sequence holds the blocks; the cache loses only its own hold."""
    history = [Message("system", (Text(words("history", count=150)),))]
    paused = chat.request([*history, user(words("paused", count=200))])
    other = ask(chat, "other", 250)
    with small_blocks(8), recording() as logits_of:
        engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=1024))
        serve(engine, chat.request([*history, user("first")]))
        prefill = begin(engine, paused)
        assert prefill.start is not None
        assert prefill.start.num_segments > 0
        prefill.unpin()
        engine.runtime.prefixes.reclaim(1000)
        assert engine.runtime.prefixes.num_segments == 0
        engine.check_integrity()
        engine.add(other)
        outputs: list[StepOutput] = []
        while engine.has_work:
            outputs += engine.step()
            engine.check_integrity()
    for request in (paused, other):
        expected = cold(loaded, request, SETTINGS)
        assert results_of(outputs)[request.id].token_ids == expected.result.token_ids
        assert torch.equal(torch.stack(logits_of[request.id]), expected.logits)


def test_a_superseded_commit_ends_between_two_layers(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    messages = [user(words("question", count=200)), assistant("done")]
    engine.commit(chat.history(messages, conversation="one"))
    while not any(each.spent for each in engine._commits.begun):
        engine.step()
    following = chat.request([*messages, user("and now")], conversation="one")
    engine.add(following)
    assert len(engine._commits) == 0
    engine.check_integrity()
    (answer,) = serve(engine, replace(following, id="again", conversation=None))
    assert_same(answer, cold(loaded, following, SETTINGS))
