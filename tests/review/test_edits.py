"""Edits of texts: what becomes of a caption, and which captions they leave alone."""

from __future__ import annotations

import pytest

from qwen35mm.errors import CaptioningError
from qwen35mm.review.edits import (
    Edit,
    adding_tags,
    count_tags,
    deduplicating,
    differences,
    removing_tags,
    replacing_text,
    sorting,
)


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (replacing_text("hat", "cap"), "hat, hats, Hat", "cap, caps, Hat"),
        (replacing_text("hat", "cap", words=True, ignore_case=True), "hat, hats, Hat", "cap, hats, cap"),
        (replacing_text("a.c", r"\1"), "a.c abc", r"\1 abc"),
        (replacing_text(r"(\w+), (\w+)", r"\2, \g<1>", regex=True), "red, blue", "blue, red"),
        (replacing_text("^a ", "the ", regex=True), "a dog\na cat", "the dog\nthe cat"),
        (replacing_text(", text", ""), "a, text, b", "a, b"),
        (adding_tags(["ohwx, 1girl"]), "1Girl, hat", "ohwx, 1Girl, hat"),
        (adding_tags(["ohwx"]), "A dog sleeps.", "ohwx, A dog sleeps."),
        (adding_tags(["ohwx, hat"]), "A photo of ohwx person.", "hat, A photo of ohwx person."),
        (adding_tags(["hat"]), "hat rack", "hat, hat rack"),
        (adding_tags(["night"], last=True), "A dog sleeps.", "A dog sleeps. night"),
        (adding_tags(["night"], last=True), "dog, sleeping", "dog, sleeping, night"),
        (adding_tags(["ohwx"]), "a, b\nc", "ohwx, a, b\nc"),
        (adding_tags(["ohwx"], each_line=True), "a, ohwx\n\nc", "a, ohwx\nohwx\nohwx, c"),
        (adding_tags(["ohwx"]), "", "ohwx"),
        (removing_tags(["long hair, saber (fate)"]), r"1girl,long_hair,saber \(fate\),hat", "1girl,hat"),
        (removing_tags(["hat"]), "hat\na, hat\nhats", "a\nhats"),
        (removing_tags(["x"]), "a ,  b", "a ,  b"),
        (removing_tags(["b"]), "a，b，c", "a，c"),
        (removing_tags(["b"]), "ohwx ||| a, b", "ohwx ||| a"),
        (removing_tags(["b"]), "ohwx ||| b", "ohwx"),
        (deduplicating(), "a, b, A, long_hair, long hair", "a, b, long_hair"),
        (deduplicating(), "ohwx, a ||| a, b", "ohwx, a ||| b"),
        (deduplicating(), "A man, a woman, a man.", None),
        (sorting(), "b, C, a", "a, b, C"),
        (sorting(keep=1), "z, c, a", "z, a, c"),
        (sorting(), "z ||| c, a ||| y, x", "z ||| a, c ||| y, x"),
        (sorting(), "c, {b, a|d}, a", "a, c, {b, a|d}"),
        (sorting(), "b, a\nd, c", "a, b\nc, d"),
        (sorting(), "It rains, and the dog sleeps.", None),
        (sorting(counts=count_tags(["a, b", "b, c", "B, c", "a"])), "a, b, c, d", "b, a, c, d"),
    ],
)
def test_edits(edit: Edit, before: str, after: str | None) -> None:
    assert edit.change(before) == after
    if after is not None and "replace" not in edit.label:
        assert edit.change(after) == after, "twice is once"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replacing_text("(", "", regex=True), "valid regular expression: missing \\)"),
        (lambda: replacing_text("(a)", r"\2", regex=True), "valid regular expression: invalid group"),
        (lambda: replacing_text("(a)", r"\g<x>", regex=True), "valid regular expression: unknown group"),
        (lambda: replacing_text("", "a"), "no text to find"),
        (lambda: adding_tags([" , "]), "no tag"),
        (lambda: removing_tags([]), "no tag"),
    ],
)
def test_what_cant_be_an_edit_is_refused(make: object, words: str) -> None:
    with pytest.raises(CaptioningError, match=words):
        make()  # pyright: ignore[reportCallIssue]


def test_an_expression_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = replacing_text(r"(\w+\s?)+$", "", regex=True)
    assert edit.change("a red hat") == ""
    with monkeypatch.context() as short:
        short.setattr("qwen35mm.review.replacing.MOST_S", 0.1)
        with pytest.raises(CaptioningError, match="takes too long"):
            edit.change("a" * 60 + "!")
    assert edit.change("a red hat!") == "a red hat!"


@pytest.mark.parametrize(
    ("before", "after"), [("a red hat", "a blue hat"), ("", "a"), ("x", "x"), ("a, b", "b"), ("é\n", "")]
)
def test_a_diff_has_both_texts(before: str, after: str) -> None:
    parts = differences(before, after)
    assert "".join(kept + old for kept, old, _ in parts) == before
    assert "".join(kept + new for kept, _, new in parts) == after


def test_a_diff_marks_only_the_words_that_differ() -> None:
    assert differences("a red hat", "a blue hat") == [("a ", "", ""), ("", "red", "blue"), (" hat", "", "")]
    long = "a b " * 5000
    assert differences(long, "c") == [("", long, "c")]
