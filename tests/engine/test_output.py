"""Text from tokens: whole characters, thinking apart, stop strings, budgets."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Channel, SamplingParams, TextDelta
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model_path())


def make(tokenizer: Tokenizer, *, num_thought: int | None = None, **params: object) -> OutputProcessor:
    return OutputProcessor(
        tokenizer,
        SamplingParams(**params),  # pyright: ignore[reportArgumentType]
        eos_ids={tokenizer.control_ids["<|im_end|>"]},
        thinking=ThinkingTokens.from_tokenizer(tokenizer),
        num_thought=num_thought,
    )


def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Token ids of text and, for pieces that are control tokens, of those."""
    controls = tokenizer.control_ids
    encoded = ([controls[text]] if text in controls else tokenizer.encode_plain(text) for text in pieces)
    return [token_id for piece in encoded for token_id in piece]


def feed(output: OutputProcessor, token_ids: Iterable[int]) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    for token_id in token_ids:
        deltas += output.push(token_id)
        if output.finish_reason is not None:
            break
    return deltas


def joined(deltas: list[TextDelta], channel: Channel) -> str:
    return "".join(delta.text for delta in deltas if delta.channel == channel)


def test_text_comes_in_whole_characters(tokenizer: Tokenizer) -> None:
    text = "naïve 日本語 👩‍👩‍👧‍👦 é end"
    output = make(tokenizer)
    deltas = feed(output, ids(tokenizer, text, "<|im_end|>"))
    assert output.finish_reason == "stop"
    assert joined(deltas, "answer") == output.text == text
    assert all("�" not in delta.text for delta in deltas)
    assert len(deltas) > 10


def test_every_piece_counts_the_tokens_up_to_it(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, num_thought=0)
    token_ids = ids(tokenizer, "A 日 dog.", "</think>", "\n\nYes.")
    told = [(delta, number) for number, token in enumerate(token_ids, 1) for delta in output.push(token, number / 2)]
    assert all((delta.num_generated_tokens, delta.at_s) == (number, number / 2) for delta, number in told)
    # Some give no text: halves of characters, and what stands between thinking and answer.
    assert len(told) < len(token_ids)


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    half = ids(tokenizer, "日")[:-1]
    assert half, "this vocabulary spells the character in several tokens"
    output = make(tokenizer)
    deltas = feed(output, [*half, *ids(tokenizer, "<|im_end|>")])
    assert joined(deltas, "answer") == output.text == "�"


def test_thinking_is_split_from_the_answer(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, num_thought=0)
    deltas = feed(output, ids(tokenizer, "Two\n\nshapes.\n", "</think>", "\n\nA red circle.\n", "<|im_end|>"))
    assert output.reasoning == joined(deltas, "reasoning") == "Two\n\nshapes."
    assert output.text == joined(deltas, "answer") == "A red circle.\n"


def test_a_model_may_open_its_thinking_itself(tokenizer: Tokenizer) -> None:
    output = make(tokenizer)
    feed(output, ids(tokenizer, "<think>", "\nHm.\n", "</think>", "\n\nYes.", "<|im_end|>"))
    assert (output.reasoning, output.text) == ("Hm.", "Yes.")


def test_without_thinking_there_is_no_reasoning(tokenizer: Tokenizer) -> None:
    output = make(tokenizer)
    feed(output, ids(tokenizer, "\nYes.", "<|im_end|>"))
    assert (output.reasoning, output.text) == (None, "\nYes.")


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("circle",), "A red circle at the top.", "A red "),
        (("cle at",), "A red circle at the top.", "A red cir"),
        (("at the top.",), "A red circle at the top.", "A red circle "),
        (("aab",), "aaaab", "aa"),
        (("top", "red"), "A red circle at the top.", "A "),
    ],
)
def test_stop_strings_cut_across_tokens(tokenizer: Tokenizer, stop: tuple[str, ...], text: str, expected: str) -> None:
    output = make(tokenizer, stop=stop)
    deltas = feed(output, ids(tokenizer, text, "<|im_end|>"))
    assert output.finish_reason == "stop"
    assert joined(deltas, "answer") == output.text == expected


def test_the_start_of_a_stop_string_is_given_out_when_it_goes_no_further(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, stop=("circus",))
    deltas = feed(output, ids(tokenizer, "A red circle and a circ", "<|im_end|>"))
    assert joined(deltas, "answer") == output.text == "A red circle and a circ"


def test_stop_strings_do_not_search_the_thinking(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, num_thought=0, stop=("red",))
    feed(output, ids(tokenizer, "It is red.", "</think>", "\n\nA red circle.", "<|im_end|>"))
    assert (output.reasoning, output.text) == ("It is red.", "A ")


def test_max_tokens_counts_thinking_and_ends_with_length(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "One two three four five six seven")
    output = make(tokenizer, max_tokens=3)
    feed(output, tokens)
    assert output.finish_reason == "length"
    assert output.token_ids == tokens[:3]


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_spent_thinking_budget_closes_the_thinking(tokenizer: Tokenizer, budget: int) -> None:
    output = make(tokenizer, num_thought=0, thinking_budget=budget)
    thoughts = iter(ids(tokenizer, "one two three four five six seven eight nine ten"))
    forced = 0
    while output.channel == "reasoning":
        token_id = output.next_forced()
        forced += token_id is not None
        output.push(next(thoughts) if token_id is None else token_id)
    assert len(output.token_ids) - forced == budget
    closing = ThinkingTokens.from_tokenizer(tokenizer)
    assert closing is not None
    while (token_id := output.next_forced()) is not None:
        output.push(token_id)
    assert tuple(output.token_ids[budget:]) == closing.closing_ids
    feed(output, ids(tokenizer, "Yes.", "<|im_end|>"))
    assert output.text == "Yes."


def test_a_thought_that_goes_on_keeps_its_line_ends_and_its_budget(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, num_thought=3, thinking_budget=4)
    line_end, *word = ids(tokenizer, "\nred")
    assert joined(feed(output, [line_end]), "reasoning") == ""
    assert output.next_forced() is not None, "three tokens were thought before, and this was the fourth"
    output = make(tokenizer, num_thought=3)
    assert joined(feed(output, [line_end, *word]), "reasoning") == "\nred"


def test_no_budget_never_forces(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, num_thought=0)
    feed(output, ids(tokenizer, "one two three"))
    assert output.next_forced() is None


def test_closing_twice_changes_nothing(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, stop=("circus",))
    feed(output, ids(tokenizer, "a circ"))
    assert joined(output.close("length"), "answer") == "circ"
    assert output.close("stop") == []
    assert output.finish_reason == "length"


def test_the_stop_string_that_ended_it_is_told(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, stop=("top", "red"))
    feed(output, ids(tokenizer, "A red circle at the top.", "<|im_end|>"))
    assert output.stopped_by == "red"
    output = make(tokenizer, stop=("top", "red"))
    feed(output, ids(tokenizer, "A circle.", "<|im_end|>"))
    assert (output.finish_reason, output.stopped_by) == ("stop", None)


def test_the_fewest_tokens_are_not_searched_for_stop_strings(tokenizer: Tokenizer) -> None:
    first = ids(tokenizer, "A red circle")
    output = make(tokenizer, stop=("red",), min_tokens=len(first))
    feed(output, [*first, *ids(tokenizer, " and a red square.", "<|im_end|>")])
    assert (output.text, output.stopped_by) == ("A red circle and a ", "red")


def test_stop_ids_end_the_thinking_too(tokenizer: Tokenizer) -> None:
    (stop,) = ids(tokenizer, "</think>")
    output = make(tokenizer, num_thought=0, stop_token_ids=(stop,))
    feed(output, [*ids(tokenizer, "Hm."), stop])
    assert (output.reasoning, output.text, output.finish_reason, output.stopped_by) == ("Hm.", "", "stop", stop)


def test_an_end_that_is_ignored_gives_no_text(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, ignore_eos=True, max_tokens=40)
    feed(output, ids(tokenizer, "One.", "<|im_end|>", " Two."))
    assert (output.text, output.finish_reason) == ("One. Two.", None)
