from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.engine.events import Progress
from qwen35mm.prompt import Image, Message, Text, Video
from qwen35mm.ui.render import as_typed, chat_messages, escape_markdown, status_line
from qwen35mm.ui.state import Conversation, Turn
from tests.ui.fake_backend import make_result


def conversation_with(**reply: Any) -> tuple[Conversation, Turn]:
    conversation = Conversation()
    turn = conversation.begin("What is it?", [Path("/tmp/cache/a.png")])
    for name, value in reply.items():
        setattr(turn.reply, name, value)
    return conversation, turn


def test_a_question_shows_its_files_before_its_text() -> None:
    conversation, _ = conversation_with()
    assert chat_messages(conversation) == [
        {
            "role": "user",
            "content": [{"path": "/tmp/cache/a.png", "alt_text": "a.png"}, {"type": "text", "text": "What is it?"}],
        }
    ]


@pytest.mark.parametrize("name", ["scan.TIFF", "clip.avi", "noname"])
def test_what_browsers_cannot_show_is_a_file_with_a_name(name: str) -> None:
    conversation = Conversation()
    conversation.begin("", [Path("/tmp/cache") / name])
    (file,) = chat_messages(conversation)[0]["content"]
    assert (file["file"]["orig_name"], file["file"]["mime_type"]) == (name, "application/octet-stream")


def test_an_answer_comes_after_its_notes_and_its_thinking() -> None:
    conversation, _ = conversation_with(answer="A star.", reasoning="Hm.", notes=("made *smaller*",), thinking_s=2.25)
    notes, thinking, answer = chat_messages(conversation)[1:]
    assert notes["metadata"] == {"title": "What the model was shown", "status": "done"}
    assert notes["content"][0]["text"] == "- made \\*smaller\\*"
    assert thinking["metadata"] == {"title": "Thought for 2.2 s", "status": "done"}
    assert answer == {"role": "assistant", "content": [{"type": "text", "text": "A star."}]}


def test_thinking_is_open_while_it_goes_on() -> None:
    conversation, _ = conversation_with(reasoning="Hm.")
    assert chat_messages(conversation)[1]["metadata"] == {"title": "Thinking", "status": "pending"}


def test_an_error_stands_below_what_was_written() -> None:
    conversation, _ = conversation_with(status="failed", answer="A st", error="Memory ran out.")
    texts = [message["content"][0].get("text") for message in chat_messages(conversation)[1:]]
    assert texts == ["A st", "⚠️ Memory ran out."]


@pytest.mark.parametrize(("status", "text"), [("stopped", "Stopped before"), ("finished", "answered nothing")])
def test_an_empty_answer_is_said_to_be_one(status: str, text: str) -> None:
    conversation, _ = conversation_with(status=status)
    assert text in chat_messages(conversation)[1]["content"][0]["text"]


PICTURE, CLIP = Image(Path("a.png")), Video(Path("b.mp4"))


@pytest.mark.parametrize(
    ("progress", "media", "label", "value"),
    [
        (None, (PICTURE,), "Getting ready", None),
        (Progress("wait", 0, 0), (), "Waiting in line", None),
        (Progress("wait", 2, 3), (), "Waiting in line, 2 ahead", None),
        (Progress("read", 0, 1), (PICTURE,), "Reading image", "0.000"),
        (Progress("read", 12, 24), (CLIP,), "Reading video, 12/24 frames", "0.500"),
        (Progress("read", 12, 24), (PICTURE, CLIP), "Reading images and videos, 12/24 frames", "0.500"),
        (Progress("read", 1, 1), (PICTURE, PICTURE), "Reading images", "1.000"),
        (Progress("encode", 3, 12), (PICTURE,), "Encoding image, 25%", "0.250"),
        (Progress("prefill", 512, 1024), (PICTURE,), "Reading the prompt, 512/1,024 tokens", "0.500"),
        (Progress("prefill", 0, 0), (), "Reading the prompt, 0/0 tokens", None),
    ],
)
def test_work_in_progress(progress: Progress | None, media: tuple, label: str, value: str | None) -> None:
    conversation, turn = conversation_with(progress=progress)
    turn.message = Message("user", (*media, Text("What is it?")))
    line = status_line(conversation)
    assert f"<span>{label}</span>" in line
    assert (f'<progress value="{value}">' if value else "<progress>") in line


def test_words_that_come_are_work_too() -> None:
    assert "Writing" in status_line(conversation_with(answer="A")[0])
    assert "Thinking" in status_line(conversation_with(reasoning="H")[0])


def test_what_a_reply_cost() -> None:
    line = status_line(conversation_with(status="finished", answer="A", result=make_result("A"))[0])
    assert "2 tokens · 40.0 tokens/s · first token after 0.2 s · prompt of 3 tokens<" in line
    line = status_line(conversation_with(status="finished", answer="A", result=make_result("A", "length"))[0])
    assert ">Cut at its limit, see “Longest answer” in the settings · 2 tokens" in line


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        ({}, "prompt of 1,310 tokens"),
        ({"miss": "new content"}, "prompt of 1,310 tokens"),
        ({"miss": "different media"}, "prompt of 1,310 tokens"),
        ({"miss": "evicted"}, "prompt of 1,310 tokens (evicted from the cache)"),
        ({"miss": "other model"}, "prompt of 1,310 tokens (cached for another model)"),
        (
            {"num_cached_tokens": 1024, "cached_from": {"device": 1024}},
            "1,024 of 1,310 prompt tokens from the cache",
        ),
        (
            {"num_cached_tokens": 1024, "cached_from": {"host": 1024}, "miss": "new content"},
            "1,024 of 1,310 prompt tokens from the cache",
        ),
        (
            {"num_cached_tokens": 1024, "cached_from": {"disk": 1024}},
            "1,024 of 1,310 prompt tokens from the disk cache",
        ),
        (
            {"num_cached_tokens": 1024, "cached_from": {"disk": 1024}, "miss": "other model"},
            "1,024 of 1,310 prompt tokens from the disk cache (more is another model's)",
        ),
        (
            {"num_cached_tokens": 1024, "cached_from": {"device": 512, "disk": 512}},
            "1,024 of 1,310 prompt tokens from the cache (512 on disk)",
        ),
        (
            {"num_cached_tokens": 1024, "cached_from": {"device": 512, "disk": 512}, "miss": "evicted"},
            "1,024 of 1,310 prompt tokens from the cache (512 on disk, more was evicted)",
        ),
    ],
)
def test_what_came_from_the_cache(cache: dict[str, Any], text: str) -> None:
    result = make_result("A", num_prompt_tokens=1310, **cache)
    line = html.unescape(status_line(conversation_with(status="finished", answer="A", result=result)[0]))
    assert f"first token after 0.2 s · {text}</span>" in line


def test_a_stopped_question_without_an_answer_is_said_to_be_forgotten() -> None:
    assert "see this question again" in status_line(conversation_with(status="stopped")[0])
    conversation, turn = conversation_with(status="stopped", answer="A")
    turn.message = Message("user", (Text("q"),))
    assert ">Stopped.<" in status_line(conversation)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a < b", "a &lt; b"),
        ("<b>x</b>", "&lt;b>x&lt;/b>"),
        ("use `<video>` here", "use `<video>` here"),
        ("```html\n<b>\n```\n<i>", "```html\n<b>\n```\n&lt;i>"),
        ("```\n<b>", "```\n<b>"),
        ("~~~\n<b>\n~~~", "~~~\n<b>\n~~~"),
        ("`<b>\n<i>`", "`&lt;b>\n&lt;i>`"),
        ("# not touched *here*", "# not touched *here*"),
    ],
)
def test_a_question_is_shown_as_typed(typed: str, shown: str) -> None:
    assert as_typed(typed) == shown


def test_escaped_text_is_no_markup() -> None:
    assert escape_markdown("a*b_c <d> #1 [x] `y` ~z~ $q$ a&b") == (
        "a\\*b\\_c &lt;d&gt; \\#1 \\[x\\] \\`y\\` \\~z\\~ \\$q\\$ a&amp;b"
    )
