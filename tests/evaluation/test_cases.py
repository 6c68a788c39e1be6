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
from qwen35mm.evaluation.skills import SKILLS


def asked(messages: list[dict[str, Any]]) -> list[Any]:
    """x264 writes other bytes for the same frames now and then: what is asked, not the files."""
    return [
        [part.get("text", part["type"]) for part in m["content"]] if isinstance(m["content"], list) else m["content"]
        for m in messages
    ]


@pytest.mark.parametrize("skill", NAMES)
def test_cases_are_reproducible_and_can_be_asked(skill: str) -> None:
    first, second = (make_cases(skill, 2, "combos") for _ in range(2))
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert (one.skill, one.expected, asked(one.messages)) == (other.skill, other.expected, asked(other.messages))
        assert one.is_right(one.expected) != (skill == "point")
        assert not one.is_right("Bananas.")
        messages = [Message.from_dict(message) for message in one.messages]
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


def test_only_what_tokens_spell_is_a_plain_answer() -> None:
    plain = {name: make_cases(name, 1, "seen")[0].plain_answer for name in SKILLS}
    odd = {"reading up to 5", "reading up to 8", "point", "count, thinking", "two counts, thinking", "tool call"}
    assert {name for name, is_plain in plain.items() if not is_plain} == odd
    assert not make_cases(TYPED_SKILL, 1, "combos")[0].plain_answer
    tools = make_cases("tool result", 1, "seen")[0]
    assert tools.tools
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
