"""Statistics of captions: counts, lengths and their picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from qwen35mm.review.statistics import Bar, Statistics, drawing, measure, num_words


def test_tags_are_counted_once_a_caption_in_their_usual_spelling() -> None:
    captions = [("0", "ohwx, long_hair, Hat, hat"), ("1", "ohwx, long hair"), ("2", "ohwx, long_hair"), ("3", " \n")]
    found = measure(captions, num_words, ["hat", "re:ohw."])
    assert (found.num_media, found.num_captions, found.num_tags, found.is_about_tags) == (4, 3, 3, True)
    assert found.counts == {"ohwx": 3, "long_hair": 3, "hat": 1}
    assert found.lacking == {"hat": ["1", "2"], "re:ohw.": []}
    assert (found.over(0.95), found.under(0.34)) == (["ohwx", "long_hair"], ["hat"])


def test_of_sentences_the_words_are_counted() -> None:
    found = measure([("0", "A dog isn't in the house."), ("1", "The Dog sleeps; a dog."), ("2", "a, b")], num_words)
    assert (found.is_about_tags, found.num_counted) == (False, 3)
    assert found.counts == {"dog": 2, "isn't": 1, "house": 1, "sleeps": 1, "b": 1}
    assert (found.lengths, found.median) == ([6, 5, 2], 5)
    assert measure([], num_words).bars() == []


@pytest.mark.parametrize(
    ("lengths", "limit", "bars"),
    [
        ([3], None, [Bar(3, 3, 1)]),
        ([0, 23], None, [Bar(low, low + 1, int(low in (0, 22))) for low in range(0, 24, 2)]),
        ([70, 75], 75, [Bar(70, 79, 2)]),
        ([60, 75, 76, 119], 75, [Bar(60, 69, 1), Bar(70, 75, 1), Bar(76, 119, 2, over=True)]),
        ([75, 76], 75, [Bar(70, 75, 1), Bar(76, 79, 1, over=True)]),
        ([1200], 512, [Bar(1200, 1399, 1, over=True)]),
    ],
)
def test_every_length_is_in_one_bar(lengths: list[int], limit: int | None, bars: list[Bar]) -> None:
    assert Statistics(lengths=lengths).bars(limit) == bars


def test_the_picture_has_a_bar_for_each_length() -> None:
    bars = Statistics(lengths=[1, 1, 90]).bars(75)
    picture = ElementTree.fromstring(drawing(bars, "3 captions <b>"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f"{space}rect")) == len(bars)
    assert picture.findall(f"{space}rect")[-1].get("fill") != picture.findall(f"{space}rect")[0].get("fill")
    assert picture[0].text == "3 captions <b>"
