from __future__ import annotations

import copy
from pathlib import Path

from qwen35mm.prompt import Image, Message, Text, Video
from qwen35mm.ui.state import Conversation, ReplyStatus, Turn, pin_turns, prompt_messages
from tests.ui.fake_backend import make_plan


def answered(conversation: Conversation, question: str, answer: str, *media: Image | Video) -> Turn:
    turn = conversation.begin(question, [])
    turn.message = Message("user", (*media, Text(question)))
    turn.reply.add(answer, "answer")
    turn.reply.status = "finished"
    return turn


def asked(conversation: Conversation, question: str) -> Turn:
    turn = conversation.begin(question, [])
    turn.message = Message("user", (Text(question),))
    return turn


def test_messages_alternate_and_end_with_the_question() -> None:
    conversation = Conversation()
    answered(conversation, "one?", "one.")
    last = asked(conversation, "two?")
    messages = prompt_messages(conversation.prompt_turns(last))
    assert [(message.role, message.text) for message in messages] == [
        ("user", "one?"),
        ("assistant", "one."),
        ("user", "two?"),
    ]


def test_past_thinking_goes_with_its_answer() -> None:
    conversation = Conversation()
    turn = answered(conversation, "one?", "one.")
    turn.reply.reasoning = "hm"
    messages = prompt_messages(conversation.prompt_turns(asked(conversation, "two?")))
    assert messages[1].reasoning == "hm"


def test_a_turn_without_an_answer_is_left_out() -> None:
    conversation = Conversation()
    cases: list[tuple[ReplyStatus, str, bool]] = [
        ("failed", "", False),
        ("stopped", "", False),
        ("stopped", "half", True),
        ("failed", "half", True),
        ("finished", "whole", True),
        ("running", "half", False),
    ]
    for status, answer, kept in cases:
        turn = answered(conversation, "q", answer)
        turn.reply.status = status
        assert turn.is_kept is kept, (status, answer)
    last = asked(conversation, "last")
    assert len(conversation.prompt_turns(last)) == 4


def test_a_repeated_question_does_not_see_its_old_answer() -> None:
    conversation = Conversation()
    turn = answered(conversation, "one?", "one.")
    assert [message.text for message in prompt_messages(conversation.prompt_turns(turn))] == ["one?"]


def test_plans_are_pinned_in_order_of_appearance() -> None:
    conversation = Conversation()
    first, second = Image(Path("a.png")), Video(Path("b.mp4"))
    answered(conversation, "one?", "one.", first)
    last = asked(conversation, "two?")
    last.message = Message("user", (Text("see"), second))
    turns = conversation.prompt_turns(last)
    plans = (make_plan(first), make_plan(second))
    pin_turns(turns, plans)
    assert [part.plan for turn in turns if turn.message for part in turn.message.media] == list(plans)
    assert last.message.text == "see"


def test_each_session_gets_a_conversation_of_its_own() -> None:
    template = Conversation()
    copied = copy.deepcopy(template)
    asked(copied, "one?")
    assert template.turns == []


def test_sessions_and_chats_have_names_of_their_own() -> None:
    template = Conversation()
    one, other = copy.deepcopy(template), copy.deepcopy(template)
    assert len({one.id, other.id, one.tenant, other.tenant}) == 4
    before = (one.id, one.tenant)
    asked(one, "one?")
    assert (one.id, one.tenant) == before
    one.clear()
    assert one.id not in (before[0], other.id)
    assert one.tenant == before[1]


def test_thinking_is_timed_up_to_the_answer() -> None:
    reply = Conversation().begin("q", []).reply
    reply.add("hm", "reasoning")
    assert reply.thinking_s is None
    reply.add("yes", "answer")
    thinking_s = reply.thinking_s
    assert thinking_s is not None
    reply.add(" indeed", "answer")
    reply.end_thinking()
    assert reply.thinking_s == thinking_s
    assert (reply.reasoning, reply.answer) == ("hm", "yes indeed")
