from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.texts.cleanup import REPETITION_REMOVED, TRUNCATED, Cleaned, clean, wrap


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
        ("A cat sits. A dog lies on", "A cat sits."),
        ("A cat sits. A dog lies.", "A cat sits. A dog lies."),
        ("A cat that sits on", "A cat that sits on"),
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
        ("The cat sat. " + "A cat. " * 30 + "A c", "The cat sat. A cat."),
        ("- bat\n" + "- cat\n" * 30 + "- c", "- bat\n- cat"),
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
    "unit", ["<think>", "<think></think>", "Caption: ", "\"'`", "```\n", "\n", "a. ", "a\n:\n", "Mr. "]
)
@pytest.mark.parametrize("finished", [True, False])
def test_hostile_replies_take_no_longer(unit: str, finished: bool) -> None:
    text = (unit * 100_000)[:100_000]
    start = time.process_time()
    clean(text, finished=finished)
    assert time.process_time() - start < 20


def test_wrap() -> None:
    assert wrap("a cat", prefix="photo of ", suffix=", outdoors", trigger="zwx") == "zwx, photo of a cat, outdoors"
    assert wrap("a cat") == "a cat"
    assert wrap("A ZWX cat", trigger="zwx") == "A ZWX cat"
    assert wrap("a zwxy cat", trigger="zwx") == "zwx, a zwxy cat"
    assert wrap("a cat", prefix="zwx style, ", trigger="zwx") == "zwx style, a cat"
