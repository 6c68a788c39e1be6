"""Cases are conversations with real files, the same for the same arguments, and their right answers are right."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import av
import pytest
from PIL import Image

from qwen35mm.contract import Message, iter_media
from qwen35mm.evaluation import drawing
from qwen35mm.evaluation.cases import NAMES, TYPED_SKILL, make_cases


def asked(messages: list[dict[str, Any]]) -> list[Any]:
    """x264 writes other bytes for the same frames now and then: what is asked, not the files."""
    return [
        [part.get("text", part["type"]) for part in m["content"]] if isinstance(m["content"], list) else m["content"]
        for m in messages
    ]


# Tokens spell these answers in more than one way, or a rule judges them.
NOT_PLAIN = {
    *("reading up to 5", "reading up to 8", "point", "count, thinking", "two counts, thinking", "tool call"),
    TYPED_SKILL,
}


@pytest.mark.parametrize("skill", NAMES)
def test_cases_can_be_asked_and_judged(skill: str) -> None:
    (case,) = make_cases(skill, 1, "combos")
    assert case.skill == skill
    assert case.plain_answer == (skill not in NOT_PLAIN)
    assert case.is_right(case.expected) != (skill == "point")
    assert not case.is_right("Bananas.")
    messages = [Message.from_dict(message) for message in case.messages]
    assert messages[-1].role in ("user", "tool")
    for medium in iter_media(messages):
        source: Any = medium.source
        if type(medium).__name__ == "Image":
            assert Image.open(io.BytesIO(source)).format in ("PNG", "JPEG")
        else:
            with av.open(io.BytesIO(source)) as container:
                assert container.streams.video[0].frames > 1


def test_what_is_seen_and_what_is_held_out_differ() -> None:
    for skill in ("color", "recall 1", "tool call"):
        assert asked(make_cases(skill, 1, "seen")[0].messages) != asked(make_cases(skill, 1, "combos")[0].messages)


def test_thinking_and_tools_are_the_skills() -> None:
    assert make_cases("tool result", 1, "seen")[0].tools
    assert make_cases("count, thinking", 1, "seen")[0].enable_thinking


def test_the_questions_are_those_of_the_models_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's figures hold for these questions: a change that draws other ones makes the table wrong."""
    monkeypatch.setattr(drawing, "picture_file", lambda picture, kind, quality: f"{picture} {kind} {quality}".encode())
    monkeypatch.setattr(drawing, "clip_file", lambda clip, fps: f"{clip} {fps}".encode())
    digest = hashlib.sha256()
    for skill in NAMES:
        for split in ("seen", "combos"):
            for case in make_cases(skill, 200 if skill == TYPED_SKILL else 8, split):
                digest.update(repr((case.messages, case.expected, case.enable_thinking, case.tools)).encode())
    assert digest.hexdigest() == "1180f44ec678efe3b02fb14f3fb0bf453a7fec7f81f38c0b6eb7df4dfd17e877"
