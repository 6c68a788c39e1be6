from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.texts.cleanup import (
    REPETITION_REMOVED,
    TRUNCATED,
    Cleaned,
    add_to,
    clean,
    cut_back,
    replaced_in,
    sentence_ends,
    without_loop,
    wrap,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat.", "A cat."),
        ("  A cat.\r\nA dog. \n", "A cat.\nA dog."),
        ("<think>\nLet me see.\n</think>\n\nA cat.", "A cat."),
        ("Let me see.</think>A cat.", "A cat."),
        ("A cat.\n<think>Is it", "A cat."),
        ("<think>only this", ""),
        ("<THINKING>a</THINKING> A cat.", "A cat."),
        ("```\nA cat.\n```", "A cat."),
        ("```text\nA cat.\nA dog.\n```", "A cat.\nA dog."),
        ("```\nA cat.", "A cat."),
        ("A cat and `code`.", "A cat and `code`."),
        ("```\na\n```\nand\n```\nb\n```", "```\na\n```\nand\n```\nb\n```"),
        ('"A cat."', "A cat."),
        ("“A cat.”", "A cat."),
        ("'It's a cat.'", "It's a cat."),
        ("「猫です。」", "猫です。"),
        ('"A cat" and "a dog"', '"A cat" and "a dog"'),
        ('"STOP" is on the sign', '"STOP" is on the sign'),
        ('"', '"'),
        ("Here is a caption: A cat.", "A cat."),
        ("Sure! Here's a detailed description of the image:\n\nA cat.", "A cat."),
        ("Here are 12 tags for this picture:\ncat, dog", "cat, dog"),
        ('Certainly, here is the alternative text you asked for:\n\n**Caption:** "A cat."', "A cat."),
        ("Caption: A cat.", "A cat."),
        ("**Alt text**: A cat.", "A cat."),
        ("Image description: A cat.", "A cat."),
        ("Caption: Caption: A cat.", "A cat."),
        ("\"Here is a caption: “Caption: 'A cat.'”\"", "A cat."),
        ("以下是这张图片的描述：\n一只猫。", "一只猫。"),
        ("好的，以下是标题：猫", "猫"),
        ("Here is a caption:", ""),
        # What looks like a lead-in and isn't.
        ("Here is a cat: it sleeps.", "Here is a cat: it sleeps."),
        ("Here lies a description.", "Here lies a description."),
        ("A sign says: Caption: none.", "A sign says: Caption: none."),
        ("Description: a form with two fields.", "Description: a form with two fields."),
        ("Sure enough, a cat sits there.", "Sure enough, a cat sits there."),
        ("Tagsüber offen", "Tagsüber offen"),
        ("red, red and blue circles", "red, red and blue circles"),
    ],
)
def test_only_what_is_around_a_caption_goes(text: str, expected: str) -> None:
    assert clean(text, finished=True) == Cleaned(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"A cat sits on a mat. And', "A cat sits on a mat."),
        ('Here is a caption: "A cat', "A cat"),
        ("```text\nA cat sits. A d", "A cat sits."),
        ("'90s cars. A", "'90s cars."),
        ("cat, black fur, mat, indoo", "cat, black fur, mat"),
        ("<think>No end to", ""),
    ],
)
def test_a_reply_that_met_its_limit_is_cut_back(text: str, expected: str) -> None:
    assert clean(text, finished=False) == Cleaned(expected, (TRUNCATED,))


def test_an_unfinished_sentence_can_be_kept() -> None:
    assert clean("A cat. A dog on", finished=False, keep_unfinished=True) == Cleaned("A cat. A dog on", (TRUNCATED,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat, dog, hen, cow" + ", red" * 30 + ", r", "cat, dog, hen, cow, red"),
        # The loop was in the sentence that goes.
        ("A dog runs. It is" + " very" * 30, "A dog runs."),
        ("It is" + " very" * 30, "It is very"),
    ],
)
def test_a_loop_that_ran_into_the_limit(text: str, expected: str) -> None:
    assert clean(text, finished=False) == Cleaned(expected, (TRUNCATED, REPETITION_REMOVED))


def test_a_loop_in_quotation_marks() -> None:
    assert clean('"' + "A cat sits. " * 20 + '"', finished=True) == Cleaned("A cat sits.", (REPETITION_REMOVED,))


def test_one_line() -> None:
    text = "A cat.\n\n  - one\n\t- two\u3000three\n"
    assert clean(text, finished=True, one_line=True).text == "A cat. - one - two three"
    assert clean("- a cat\n- a dog\n- a bi", finished=False, one_line=True).text == "- a cat - a dog"


# Pieces that the steps take away or cut at, so that one step's result is often another's matter.
MARKS = [
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "```\n",
    "\n```",
    '"',
    "'",
    "“",
    "”",
    "**",
    "Here is a caption: ",
    "Caption: ",
]
TEXTS = ["\r", "\n", " ", ", ", ". ", "。", ":\n", "1.", "Mr. ", "A cat", "very " * 12, "A cat. " * 8, "x" * 50]
pieces = st.lists(st.sampled_from([*MARKS, *TEXTS]) | st.text(max_size=4), max_size=14).map("".join)


@given(pieces, st.booleans(), st.booleans(), st.booleans())
def test_a_clean_caption_stays_as_it_is(text: str, finished: bool, keep_unfinished: bool, one_line: bool) -> None:
    once = clean(text, finished=finished, keep_unfinished=keep_unfinished, one_line=one_line)
    assert clean(once.text, finished=True, one_line=one_line) == Cleaned(once.text)
    assert once.text == once.text.strip()
    assert (TRUNCATED in once.flags) is not finished
    if one_line:
        assert "\n" not in once.text


@pytest.mark.parametrize(
    "unit",
    [
        *("<think>", "<think></think>", "Caption: ", "\"'`", "```\n", "\n", "a. ", "a\n:\n", "Mr. "),
        # Loops, of which a naive search would be at for hours.
        *("a", "ab", "a" * 999 + "b", "A cat. "),
    ],
)
def test_hostile_replies_take_no_longer(unit: str) -> None:
    text = (unit * 50_000)[:50_000]
    start = time.process_time()
    clean(text, finished=False)
    assert time.process_time() - start < 10


def test_wrap() -> None:
    assert wrap("a cat", prefix="photo of ", suffix=", outdoors", trigger="zwx") == "zwx, photo of a cat, outdoors"
    assert wrap("a cat") == "a cat"
    assert wrap("A ZWX cat", trigger="zwx") == "A ZWX cat"
    assert wrap("a zwxy cat", trigger="zwx") == "zwx, a zwxy cat"
    assert wrap("a cat", prefix="zwx style, ", trigger="zwx") == "zwx style, a cat"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog runs. " + "A cat sits on a mat. " * 9, "A dog runs. A cat sits on a mat."),
        ("A cat sits on a mat. " * 9 + "A cat si", "A cat sits on a mat."),
        # What stands before the loop ends like its round does.
        ("The cat sat. " + "A cat. " * 12 + "A c", "The cat sat. A cat."),
        ("Dog. " + "Cat. " * 20, "Dog. Cat."),
        ("- bat\n" + "- cat\n" * 12 + "- c", "- bat\n- cat"),
        ("Intro\n" + "One. Two.\n" * 8, "Intro\nOne. Two."),
        ("Zero. Two.\n" + "One. Two.\n" * 8, "Zero. Two.\nOne. Two."),
        ("It is" + " very" * 20, "It is very"),
        ("blue" + ", red" * 20, "blue, red"),
        ("cat, dog, " + "red hat, blue hat, " * 8 + "red h", "cat, dog, red hat, blue hat"),
        ("一只狗。" + "一只猫坐着。" * 12 + "一只", "一只狗。一只猫坐着。"),
        ("猫" + "很大的猫" * 20, "猫很大的"),
        ("ha" * 40, "ha"),
        ("!" * 300, "!"),
        ("A wall." + " |" * 150, "A wall. |"),
        ("A cat sits on a mat. " * 4, "A cat sits on a mat."),
    ],
)
def test_one_round_of_a_loop_stays(text: str, expected: str) -> None:
    assert without_loop(text.strip()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red, red and blue circles",
        "A red circle, a red circle, a red circle and a blue square on a white table.",
        "A red circle, a red square, a red star, a red heart, a red moon, a red sun",
        # A refrain that was read off a poster.
        "We will rock you. We will rock you. We will rock you.",
        "very, very, very, very old",
        "no no no no no no no no",
        "A form: " + "_" * 100,
        "Total " + "." * 80,
        "0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
        "A cat. " * 30 + "The end.",
        "00:00-00:01 He walks\n00:01-00:02 He walks\n00:02-00:03 He walks\n00:03-00:04 He walks\n00:04-00:05 He walks",
    ],
)
def test_what_is_no_loop_at_the_end_stays(text: str) -> None:
    assert without_loop(text.strip()) is None


@given(st.text("ab ,.\n", max_size=30), st.text("abc ,.\n", min_size=1, max_size=20), st.integers(0, 19))
def test_every_loop_goes_wherever_its_last_round_was_cut(before: str, unit: str, cut: int) -> None:
    text = before + unit * (220 // len(unit) + 4) + unit[:cut]
    left = without_loop(text)
    assert left is not None
    assert text.startswith(left)
    assert len(left) <= len(before) + 2 * len(unit)
    # Nothing before the loop is lost, save white space and commas at its end.
    assert len(left) >= len(before.rstrip().rstrip(",").rstrip(" ,")) or before.startswith(left)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("A cat. A dog! A hen? Yes… no", ["A cat.", " A dog!", " A hen?", " Yes…"]),
        ("It costs 3.50 a kilo. Then", ["It costs 3.50 a kilo."]),
        ("Mr. Smith and Dr. J. Watson, e.g. here. Go", ["Mr. Smith and Dr. J. Watson, e.g. here."]),
        ("(As in St. Ives.) She said “no.” Then", ["(As in St. Ives.)", " She said “no.”"]),
        ("**Done.** Next", ["**Done.**"]),
        ("1. A cat.\n2. A dog", ["1. A cat."]),
        ("Wait... What?! Yes", ["Wait...", " What?!"]),
        ("一只猫。一只狗！「走。」他", ["一只猫。", "一只狗！", "「走。」"]),
        ("example.com is open", []),
        ("", []),
    ],
)
def test_where_sentences_end(text: str, sentences: list[str]) -> None:
    ends = sentence_ends(text)
    assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat sits. A dog lies on the", "A cat sits."),
        ("A cat sits. A dog lies.", "A cat sits. A dog lies."),
        ("A cat that sits on a", "A cat that sits on a"),
        ("A photograph of Mr. Smith, who", "A photograph of Mr. Smith, who"),
        ("一只猫坐在垫子上。旁边有", "一只猫坐在垫子上。"),
        ("cat, black fur, on a red mat, indoors, soft li", "cat, black fur, on a red mat, indoors"),
        ("猫，黑色，垫子，室", "猫，黑色，垫子"),
        ("cat, dog, a very long clause that is not a tag, and", "cat, dog, a very long clause that is not a tag, and"),
        ("cat, do", "cat, do"),
        ("00:00-00:03 A man walks\n00:03-00:05 He si", "00:00-00:03 A man walks"),
        ("- a cat\n- a dog\n- a bi", "- a cat\n- a dog"),
        ("1. A cat.\n2.", "1. A cat."),
        ("There are two:\n- a c", "There are two:\n- a c"),
        ("A table. It has:\n\n- a c", "A table."),
        ("First paragraph.\n\nSecond par", "First paragraph."),
        ("", ""),
    ],
)
def test_what_was_cut_off_goes(text: str, expected: str) -> None:
    assert cut_back(text) == expected


@given(st.text(st.sampled_from("aB1 .,:!?\n。，“”)")))
def test_cutting_back_keeps_a_beginning_and_never_empties(text: str) -> None:
    cut = cut_back(text)
    assert text.startswith(cut)
    assert cut or not text.strip() or not any(char.isalnum() for char in text)


@pytest.mark.parametrize(
    ("text", "trigger", "expected"),
    [
        ("1girl, hat, ohwx, blue sky", "ohwx", "ohwx, 1girl, hat, blue sky"),
        ("1girl, hat, OHWX style, blue sky", "ohwx style", "ohwx style, 1girl, hat, blue sky"),
        ("ohwx, 1girl, hat, blue sky", "ohwx", "ohwx, 1girl, hat, blue sky"),
        ("1girl, ohwx hat, blue sky, tree", "ohwx", "1girl, ohwx hat, blue sky, tree"),
        ("A man called ohwx stands.", "ohwx", "A man called ohwx stands."),
    ],
)
def test_a_trigger_among_tags_comes_first(text: str, trigger: str, expected: str) -> None:
    assert wrap(text, trigger=trigger) == expected


@pytest.mark.parametrize(
    ("theirs", "own", "options", "expected"),
    [
        # The trigger word first, then their tags in their order.
        ("1girl, hat", "ohwx, a tree", {}, "ohwx, 1girl, hat, a tree"),
        ("1girl, hat", "ohwx, a tree", {"first": True}, "ohwx, a tree, 1girl, hat"),
        ("ohwx, 1girl", "ohwx, a tree", {}, "ohwx, 1girl, a tree"),
        ("ohwx, 1girl", "ohwx, a tree", {"first": True}, "ohwx, a tree, 1girl"),
        ("1girl, ohwx, hat", "ohwx, a tree", {}, "1girl, ohwx, hat, a tree"),
        ("1girl", "A man called ohwx.", {}, "ohwx, 1girl, A man called ohwx."),
        # As many of their tags stay first as the trainer keeps.
        ("1girl, solo, hat", "a tree", {"first": True, "keep": 2, "trigger": ""}, "1girl, solo, a tree, hat"),
        ("1girl", "a tree", {"first": True, "keep": 2, "trigger": ""}, "1girl, a tree"),
        ("ohwx, 1girl, hat", "ohwx, a tree", {"first": True, "keep": 2}, "ohwx, 1girl, a tree, hat"),
        # Ours may be shuffled; what is fixed stays fixed.
        ("1girl ||| hat", "ohwx, a tree", {}, "ohwx, 1girl ||| hat, a tree"),
        ("1girl|||hat|||best", "a tree", {"trigger": ""}, "1girl|||hat, a tree|||best"),
        ("1girl|||hat|||best", "a tree", {"trigger": "", "first": True}, "1girl|||a tree, hat|||best"),
        # No comma after the end of a sentence.
        ("A hat.", "A tree.", {"trigger": ""}, "A hat. A tree."),
        ("A hat!", "A tree.", {"trigger": "", "separator": ","}, "A hat! A tree."),
        ("A hat.", "A tree.", {"trigger": "", "separator": "\n"}, "A hat.\nA tree."),
        ("1girl, by Dr.", "a tree", {"trigger": ""}, "1girl, by Dr., a tree"),
    ],
)
def test_a_caption_is_added_to_a_persons_text(theirs: str, own: str, options: dict[str, Any], expected: str) -> None:
    assert add_to(theirs, own, **{"separator": ", ", "trigger": "ohwx", **options}) == expected


@pytest.mark.parametrize(
    ("text", "old", "own", "options", "expected"),
    [
        ("1girl, hat, a tree", "a tree", "ohwx, a tree", {}, "ohwx, 1girl, hat, a tree"),
        ("1girl. A tree.", "A tree.", "ohwx, An oak.", {"trigger": ""}, "1girl. ohwx, An oak."),
        # The earlier trigger word goes, unless a person wrote it.
        ("old, 1girl, a tree", "old, a tree", "ohwx, a tree", {"original": "1girl"}, "ohwx, 1girl, a tree"),
        ("old, 1girl, a tree", "old, a tree", "ohwx, a tree", {"original": "old, 1girl"}, "ohwx, old, 1girl, a tree"),
        ("1girl, old, a tree", "old, a tree", "ohwx, a tree", {"original": "1girl, old"}, "ohwx, 1girl, old, a tree"),
        # What a person wrote too isn't taken for ours.
        ("tree, hat, tree", "tree", "an oak", {"original": "tree, hat", "trigger": ""}, "tree, hat, an oak"),
        ("tree, tree, hat", "tree", "oak", {"original": "tree, hat", "trigger": "", "first": True}, "oak, tree, hat"),
        ("tree, hat, an oak", "tree", "a tree", {"original": "tree, hat"}, None),
        ("1girl, a treehouse", "a tree", "an oak", {}, None),
        ("1girl, a red tree", "a tree", "an oak", {}, None),
    ],
)
def test_a_caption_takes_the_place_of_an_earlier_one(
    text: str, old: str, own: str, options: dict[str, Any], expected: str | None
) -> None:
    assert replaced_in(text, old, own, **{"trigger": "ohwx", **options}) == expected


TAGS = st.lists(st.sampled_from(["1girl", "hat", "blue sky", "solo", "tree"]), min_size=1, max_size=5, unique=True)


@given(TAGS, st.booleans(), st.integers(0, 6), st.sampled_from(["", "ohwx", "ohwx, man"]), st.booleans())
def test_a_persons_tags_keep_their_order_and_the_trigger_is_first(
    theirs: list[str], first: bool, keep: int, trigger: str, has_trigger: bool
) -> None:
    lead = [*trigger.split(", ")] if trigger else []
    there = ", ".join([*(lead if has_trigger else ()), *theirs])
    own = ", ".join([*lead, "OURS"])
    added = add_to(there, own, separator=", ", trigger=trigger, first=first, keep=keep).split(", ")
    kept = max(keep, len(lead)) if has_trigger else keep
    assert [tag for tag in added if tag != "OURS"] == [*lead, *theirs]
    assert added.count("OURS") == 1
    if first:
        at = min(kept, len(there.split(", "))) + (0 if has_trigger else len(lead))
        assert added.index("OURS") == at
    else:
        assert added[-1] == "OURS"
