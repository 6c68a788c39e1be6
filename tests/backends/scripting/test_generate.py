"""Many prompts: all of them answered, in order, no more at once than keep the model busy."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from typing_extensions import assert_type

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.scripting.forms import AskOptions, conversation_of, prompts_of
from qwen35mm.contract import Event, GenerationRequest, Image, Message, Result, SamplingParams
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import BatchError, ConfigError, PromptError, QueueFullError, Qwen35mmError, RequestError
from qwen35mm.model import LoadedModel
from tests.backends.events import PATIENCE_S, collect, result_of
from tests.backends.scripting.fake import FakeModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
HELLO = Message("user", "Hello.")


@pytest.fixture(scope="module")
def model(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, settings=EngineSettings(slots=2, max_waiting=1), min_segment=16) as backend:
        yield backend


def say_again(messages: Any) -> list[Any]:
    return [RequestError("No.")] if messages[-1].text == "no" else [messages[-1].text]


async def test_no_prompt_is_refused_and_each_gets_the_answer_of_a_stream(model: LocalBackend) -> None:
    prompts = [f"How much is {n} and {n}?" for n in range(10)]
    results = model.generate(prompts, GREEDY)
    awaited = await model.agenerate(iter(prompts[:3]), GREEDY)
    assert [result.text for result in results[:3]] == [result.text for result in awaited]
    for at in (0, 9):
        told = result_of(await collect(model.stream(GenerationRequest([Message("user", prompts[at])], GREEDY))))
        assert (told.prompt_token_ids, told.token_ids) == (results[at].prompt_token_ids, results[at].token_ids)


async def test_a_line_that_others_have_filled_is_waited_for(model: LocalBackend) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    others = [asyncio.create_task(collect(model.stream(GenerationRequest([HELLO], long)))) for _ in range(6)]
    results = await asyncio.wait_for(model.agenerate(["Hello."] * 8, GREEDY), PATIENCE_S)
    assert len({result.text for result in results}) == 1
    refused = await asyncio.gather(*others, return_exceptions=True)
    assert any(isinstance(each, QueueFullError) for each in refused), "nothing was full, so nothing was tested"


def test_no_more_is_read_or_asked_than_keeps_the_model_busy() -> None:
    model = FakeModel(say_again, at_once=3)
    model.is_held = True  # its answers would be over before the next one is asked, now and then

    def release() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while model.num_open < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        model.is_held = False

    threading.Thread(target=release).start()
    numbers = itertools.count()
    results = iter(model.generate_each(str(number) for number in numbers))
    assert [next(results).text for _ in range(50)] == [str(number) for number in range(50)]
    assert next(numbers) < 50 + 8 * 3 + 2
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert (model.num_open, model.most_open) == (0, 3)


async def test_who_asks_amid_many_prompts_is_answered_before_their_end() -> None:
    model = FakeModel(say_again, at_once=2)
    model.is_held = True
    many = asyncio.create_task(model.agenerate(["a"] * 60))
    await until(lambda: model.num_open == 2)
    asking = asyncio.create_task(model.chat().aask("b"))
    await until(lambda: model._script_turns._waiters)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    model.is_held = False
    assert ((await asking).text, len(await many)) == ("b", 60)
    at = [asked["messages"][-1].text for asked in model.asked].index("b")
    assert at <= 4


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def test_results_come_one_by_one_to_tasks_too() -> None:
    model = FakeModel(say_again)
    found = [result async for result in model.generate_each(["a", "no", "b"])]
    assert (found[0].text, str(found[1]), found[2].text) == ("a", "No.", "b")
    asking = asyncio.create_task(FakeModel(lambda _: [None]).agenerate(["a"] * 9))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_what_fails_costs_nothing_of_the_rest() -> None:
    model = FakeModel(say_again)
    prompts: Any = ["a", "no", [3], "b"]
    results: Any
    with pytest.raises(BatchError, match=r"2 of 4 prompts .* the first is number 2: No\.$") as caught:
        model.generate(prompts)
    for results in (caught.value.results, model.generate(prompts, on_error="return")):
        assert [type(result).__name__ for result in results] == ["Result", "RequestError", "PromptError", "Result"]
        assert [results[0].text, results[3].text] == ["a", "b"]
    with pytest.raises(RequestError, match=r"^No\.$"):
        model.generate("no")
    assert isinstance(model.generate("no", on_error="return"), Qwen35mmError)
    with pytest.raises(ZeroDivisionError):
        model.generate(str(1 // (2 - number)) for number in range(5))
    assert model.num_open == 0


def test_so_many_answers_to_each_prompt_with_draws_of_their_own(model: LocalBackend) -> None:
    drawn = SamplingParams(temperature=5.0, max_tokens=6, seed=2**63 - 1)
    (first, second), (third, _) = model.generate(["Hello.", "Hello."], drawn, n=2)
    assert [first.seed, second.seed] == [2**63 - 1, 0]
    assert first.text == third.text != second.text
    one: list[Result] = model.generate("Hello.", n=1)
    assert isinstance(one, list)
    failed = FakeModel(say_again).generate(["a", "no"], n=3, on_error="return")
    assert ([result.text for result in failed[0]], str(failed[1])) == (["a"] * 3, "No.")


def test_nothing_but_shared_beginnings_is_kept_unless_asked_for() -> None:
    model = FakeModel(say_again)
    model.generate("a")
    model.generate("a", retain="conversation", tenant="anna", params={"top_k": 3})
    assert [(asked["retain"], asked.get("tenant")) for asked in model.asked] == [
        ("shared", None),
        ("conversation", "anna"),
    ]
    assert (model.asked[1]["params"].top_k, model.asked[1]["params"].max_tokens) == (3, 100)


def test_a_bar_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(say_again)
    model.generate(["a"] * 3)
    assert capsys.readouterr().err == ""
    model.generate(["a"] * 3, progress=True)
    said = capsys.readouterr()
    assert "3/3" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("prompts", "texts", "is_one"),
    [
        ("a", [["a"]], True),
        (HELLO, [["Hello."]], True),
        ({"role": "user", "content": "a"}, [["a"]], True),
        ([HELLO], [["Hello."]], True),
        ([{"role": "system", "content": "a"}, HELLO], [["a", "Hello."]], True),
        ((HELLO,), [["Hello."]], True),
        (["a", "b"], [["a"], ["b"]], False),
        (["a", [HELLO, {"role": "assistant", "content": "b"}]], [["a"], ["Hello.", "b"]], False),
        ((text for text in "ab"), [["a"], ["b"]], False),
        (iter([HELLO, "a", [HELLO]]), [["Hello."], ["a"], ["Hello."]], False),
        ([[{"role": "user", "content": [{"type": "text", "text": "a"}]}]], [["a"]], False),
        ([], [], False),
    ],
)
def test_one_prompt_is_told_from_many(prompts: Any, texts: list[list[str]], is_one: bool) -> None:
    many, told = prompts_of(prompts)
    assert told is is_one
    assert [[message.text for message in conversation_of(prompt)] for prompt in many] == texts


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda m: m.generate(3), PromptError, "Prompts must be a string, a conversation.*got int"),
        (lambda m: m.generate(Image("a.jpg")), PromptError, "got Image"),
        (lambda m: m.generate([HELLO, "a"]), PromptError, "one conversation's messages, or prompts.*Got both"),
        (lambda m: m.generate([["a"]]), BatchError, "got one with str in it"),
        (lambda m: m.generate([[]]), BatchError, "There are no messages"),
        (lambda m: m.generate([1, 2]), BatchError, "2 of 2 .*got one with int in it"),
        (lambda m: m.generate({"prompt": "a"}), PromptError, "Unknown message field 'prompt'"),
        (lambda m: m.generate("a", n=0), ConfigError, "n must be a whole number, 1 or more.*got 0"),
        (lambda m: m.generate("a", on_error="ignore"), ConfigError, "on_error must be.*got 'ignore'"),
        (lambda m: m.generate("a", "greedy"), ConfigError, "params must be.*got 'greedy'"),
        (lambda m: m.generate("a", retain="all"), RequestError, "retain must be one of"),
        (lambda m: m.generate("a", timeout_s=float("nan")), RequestError, "timeout_s must be .*got nan"),
        (lambda m: m.generate_each("a", temprature=1), ConfigError, "did you mean temperature"),
    ],
)
def test_what_was_meant_otherwise_is_refused_in_words(ask: Any, error: type[Exception], words: str) -> None:
    model = FakeModel(say_again)
    with pytest.raises(error, match=words):
        ask(model)
    assert model.asked == []


def test_types_tell_one_from_many() -> None:
    """Checked by pyright; at run time these are the values themselves."""
    model = FakeModel(say_again)
    assert_type(model.generate("a"), Result)
    assert_type(model.generate([HELLO]), Result)
    assert_type(model.generate({"role": "user", "content": "a"}), Result)
    assert_type(model.generate([{"role": "user", "content": "a"}]), Result)
    assert isinstance(assert_type(model.generate(["a"]), list[Result]), list)
    assert isinstance(assert_type(model.generate([[HELLO]]), list[Result]), list)


def test_options_are_the_parameters() -> None:
    assert set(AskOptions.__annotations__) == {each.name for each in fields(SamplingParams)} | {
        "schema",
        "thinking",
        "template_options",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "timeout_s",
        "adapter",
    }


async def test_it_ends_with_its_block(demo: LoadedModel) -> None:
    with LocalBackend(demo) as first:
        pass
    async with LocalBackend(demo) as second:
        assert (await second.agenerate("Hello.", GREEDY)).text
    for ended in (first, second):
        events: list[Event] = []
        with pytest.raises(Qwen35mmError, match="shut down"):
            events += await collect(ended.stream(GenerationRequest([HELLO], GREEDY)))
        with pytest.raises(Qwen35mmError, match="shut down"):
            ended.chat().ask("Hello.")
