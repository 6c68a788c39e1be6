from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.texts.words import Words, contains
from qwen35mm.errors import CaptioningError


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("A cat.", "cat", True),
        ("A category.", "cat", False),
        ("concat", "cat", False),
        ("cat_1", "cat", False),
        ("cat2", "cat", False),
        ("A black-cat sticker", "cat", True),
        ("concat, then a cat", "cat", True),
        ("CAT", "cat", True),
        ("A RED\n  hat", "red hat", True),
        ("a red hatch", "red hat", False),
        ("GROSSE Straße", "grosse strasse", True),
        ("Ελλάς", "ΕΛΛΆΣ", True),
        ("Cafe\u0301 au lait", "café", True),
        ("Cafés", "café", False),
        ("ﬁne ＣＡＴ", "fine cat", True),
        ("It don’t rain", "don't", True),
        ("C++ code", "c++", True),
        ("C++11", "c++", True),
        ("#cat", "#cat", True),
        # A vowel sign belongs to the letter before it.
        ("हिन्दी", "हिन्द", False),
        ("यह हिन्दी है", "हिन्दी", True),
        ("一只小猫坐着", "猫", True),
        ("一只狗", "猫", False),
        ("赤い自転車", "自転車", True),
        ("고양이가 있다", "고양이", True),
        ("แมวดำ", "แมว", True),
        ("一只cat在", "cat", True),
        ("一件T恤", "T恤", True),
        ("catcat", "cat", False),
        ("", "cat", False),
        ("3 dogs", r"re:\d+ dogs?", True),
        ("THE IMAGE shows", r"re:^the (image|picture)", True),
        ("In the image", r"re:^the (image|picture)", False),
        ("cafe\u0301", "re:caf\u00e9$", True),
    ],
)
def test_a_word_is_found_whole_in_any_script(text: str, word: str, expected: bool) -> None:
    assert contains(text, word) is expected


def test_problems_name_the_words_as_they_were_given() -> None:
    words = Words(required=("Cat", "red hat", "re:\\d"), forbidden=("The Image", "re:^a "))
    assert words.problems("A cat in the image.") == (
        "missing: red hat",
        "missing: re:\\d",
        "forbidden: The Image",
        "forbidden: re:^a ",
    )
    assert words.problems("1 cat with a red hat") == ()
    assert Words().problems("") == ()


@pytest.mark.parametrize(
    ("required", "forbidden", "message"),
    [
        (("",), (), "empty"),
        ((), (" \n",), "empty"),
        (("re:",), (), "empty"),
        (("re:(",), (), r"'\(' isn't a valid regular expression"),
        (("a", "Cat"), ("cAT",), "'Cat' is both"),
    ],
)
def test_words_that_can_not_be_checked(required: tuple[str, ...], forbidden: tuple[str, ...], message: str) -> None:
    with pytest.raises(CaptioningError, match=message):
        Words(required, forbidden)


letters = st.text(st.characters(categories=("Lu", "Ll")), min_size=1).filter(
    # Folding must leave letters, or there is no word.
    lambda word: all(unicodedata.category(c)[0] == "L" for c in unicodedata.normalize("NFKC", word.casefold()))
)


@given(letters, st.sampled_from(["", "(", "“", "x "]), st.sampled_from(["", ".", ", y", "’s", "!"]))
def test_a_word_is_found_between_anything_that_is_no_letter(word: str, before: str, after: str) -> None:
    assert contains(f"{before}{word}{after}", word)
