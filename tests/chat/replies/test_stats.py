"""A reply's numbers while it is written, and what is kept of those that have no end of their own."""

from __future__ import annotations

import pytest

from qwen35mm.chat.replies.stats import MIN_MEASURED_S, WINDOW_S, Tally, stats_of
from qwen35mm.contract import CacheReport, Finished, Prefilled, TextDelta
from qwen35mm.web.rendering.wording import describe_stats
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import ME, ChatKit
from tests.chat.fake_backend import TOKENS_PER_S, make_result

BEGUN = Prefilled(100, 0.5, 7, CacheReport(num_cached_tokens=60, cached_from={"host": 60}, prefill_s=0.4))


def tally_of(*events: Prefilled | TextDelta | Finished) -> Tally:
    tally = Tally()
    for event in events:
        tally.take(event)
    return tally


def test_the_speed_is_that_of_the_last_seconds_by_the_engines_clock() -> None:
    # Whatever it waited before, and however slow its first tokens were.
    tally, at_s = tally_of(BEGUN, TextDelta("a", "answer", 1, 1000.0)), 1000.0
    assert tally.tokens_per_s is None
    for number in range(2, 12):
        tally.take(TextDelta("a", "answer", number, at_s := at_s + 1.0))
    assert tally.tokens_per_s == pytest.approx(1.0)
    for number in range(12, 500):
        tally.take(TextDelta("a", "answer", number, at_s := at_s + 0.02))
    assert tally.tokens_per_s == pytest.approx(50.0)
    assert tally.num_tokens == 499


def test_a_speed_needs_time_and_a_backend_that_tells() -> None:
    quick = tally_of(TextDelta("a", "answer", 1, 0.0), TextDelta("b", "answer", 90, MIN_MEASURED_S / 2))
    assert (quick.num_tokens, quick.tokens_per_s) == (90, None)
    untimed = tally_of(BEGUN, TextDelta("a", "answer", 3), TextDelta("b", "answer", 5))
    assert (untimed.num_tokens, untimed.tokens_per_s) == (5, None)
    assert describe_stats(untimed.stats()) is not None
    silent = tally_of(BEGUN, TextDelta("a"), TextDelta("b"))
    assert (silent.num_tokens, silent.tokens_per_s, silent.stats()) == (None, None, None)


def test_tokens_without_text_count_and_thinking_is_told_apart() -> None:
    tally = tally_of(TextDelta("hm", "reasoning", 4, 0.0), TextDelta("so", "answer", 9, 1.0))
    assert (tally.num_tokens, tally.num_thinking_tokens) == (9, 4)


def test_what_is_known_of_a_reply_without_an_end() -> None:
    last_s = 2 * WINDOW_S
    stats = tally_of(BEGUN, TextDelta("hm", "reasoning", 1, 0.0), TextDelta("so", "answer", 61, last_s)).stats()
    told = describe_stats(stats)
    assert told is not None
    rows = {english(name): english(value) for name, value in told}
    assert rows["Speed"].startswith("10.0 tokens per second")
    assert (rows["First token after"], rows["Prompt"]) == ("0.50 s", "100 tokens, 40 of them computed")
    assert rows["Answer"] == "61 tokens, 1 of them thinking"
    assert (rows["Seed"], "Memory" in rows) == ("7", False)


def test_the_engines_own_result_is_what_counts() -> None:
    result = make_result("so")
    tally = tally_of(BEGUN, TextDelta("so", "answer", 1, 0.0), Finished(result))
    assert tally.stats() == stats_of(result)


async def test_stopped_failed_and_cut_replies_keep_their_numbers(kit: ChatKit) -> None:
    _, reply_id = await kit.send("slow")
    shown = await kit.watch(reply_id, until=lambda view: view["work"] and len(view["work"]["pace"]) == 2)
    assert english(shown["work"]["label"]) == "Writing"
    assert english(shown["work"]["pace"][1]) == f"{TOKENS_PER_S} tokens/s"
    await kit.api.stop(ME, reply_id)
    stopped = await kit.watch(reply_id)
    broken = (await kit.ask("break late")).view
    cut = (await kit.ask("length")).view
    for view, status in ((stopped, "stopped"), (broken, "failed"), (cut, "length")):
        assert view["status"] == status
        rows = {english(name): english(value) for name, value in view["stats"]}
        assert rows["Speed"].startswith(f"{TOKENS_PER_S} tokens per second")


async def test_a_reply_that_got_nowhere_has_no_numbers(kit: ChatKit) -> None:
    assert (await kit.ask("refuse Too small.")).view["stats"] is None
