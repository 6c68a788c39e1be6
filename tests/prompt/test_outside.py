from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.errors import PromptError
from qwen35mm.prompt.outside import StandIns

texts = st.text(st.one_of(st.sampled_from("<[\\u\ue000\ue001e0"), st.characters(exclude_categories=["Cs"])))


@given(st.lists(texts, max_size=4))
def test_stand_ins_hide_and_give_back(all_texts):
    stand_ins = StandIns({"<", "["}, all_texts)
    for text in all_texts:
        hidden = stand_ins.hide(text)
        assert len(hidden) == len(text)
        assert not {"<", "["} & set(hidden)
        assert stand_ins.restore(hidden) == text
        assert json.loads(stand_ins.restore(json.dumps(hidden))) == text


def test_stand_ins_are_characters_that_no_text_holds():
    stand_ins = StandIns({"<"}, ["\ue000", "\\ue001", "\\UE002", "\\uE003"])
    assert stand_ins.hide("<") == "\ue002"
    assert stand_ins.restore("\ue000\\ue001\ue002\\uE003") == "\ue000\\ue001<\\uE003"


def test_no_free_character_is_an_error():
    every = "".join(map(chr, range(0xE000, 0xF8FF)))
    assert StandIns({"<"}, [every]).hide("<") == "\uf8ff"
    with pytest.raises(PromptError, match="private-use"):
        StandIns({"<", "["}, [every])
