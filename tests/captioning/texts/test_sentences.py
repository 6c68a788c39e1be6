from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.texts.sentences import cut_back, sentence_ends


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
