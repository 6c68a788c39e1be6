from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from qwen35mm.contract import Image, Message, Text, ToolCall, Video, iter_media
from qwen35mm.contract.messages import check_conversation
from qwen35mm.errors import PromptError

DATA_URI = "data:image/png;base64,AAAA"
PICTURE = PILImage.new("RGB", (4, 4))


def user(*parts):
    return {"role": "user", "content": list(parts)}


def call(**function):
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"role": "user", "content": "hi"}, Message("user", (Text("hi"),))),
        ({"role": "assistant", "content": None}, Message("assistant")),
        (user({"type": "text", "text": "a"}, {"type": "text", "text": "b"}), Message("user", (Text("a"), Text("b")))),
        (
            user({"type": "image_url", "image_url": {"url": DATA_URI, "detail": "low"}}),
            Message("user", (Image(DATA_URI),)),
        ),
        (user({"type": "image", "image": PICTURE}), Message("user", (Image(PICTURE),))),
        (user({"type": "video", "video": Path("a.mp4")}), Message("user", (Video(Path("a.mp4")),))),
        (user({"type": "video_url", "video_url": "clips/a.mp4"}), Message("user", (Video("clips/a.mp4"),))),
        ({"role": "assistant", "content": "a", "thinking": "t"}, Message("assistant", (Text("a"),), reasoning="t")),
        (
            {"role": "assistant", "content": "a", "refusal": None, "annotations": []},
            Message("assistant", (Text("a"),)),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}],
            },
            Message("assistant", tool_calls=(ToolCall("f", {"a": [1]}, "c1"),)),
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}, {"name": "g"}]},
            Message("assistant", tool_calls=(ToolCall("f"), ToolCall("g"))),
        ),
        (
            {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
            Message("tool", (Text("4"),), tool_call_id="c1", name="f"),
        ),
    ],
)
def test_messages_in_openai_form(data, message):
    assert Message.from_dict(data) == message


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("hi", "must be an object with role and content; got str"),
        ({"content": "hi"}, "Unknown message role None; expected system, user, assistant, tool"),
        ({"role": "robot", "content": "hi"}, "Unknown message role 'robot'"),
        ({"role": "user", "content": "hi", "audio": {"id": 1}}, "Unknown message field 'audio'"),
        ({"role": "user", "content": 3}, "string or a list of parts; got int"),
        (user("hi"), "part must be an object with a type; got str"),
        (user({"type": "input_audio"}), "Unknown content part type 'input_audio'; expected text, image"),
        (user({"type": "text"}), "needs the field 'text'"),
        (user({"type": "text", "text": 5}), "must hold a string; got int"),
        (user({"type": "image"}), "needs the field 'image'"),
        (user({"type": "image", "image": ""}), "path is empty"),
        (user({"type": "image", "image": 7}), "is a int; expected a path"),
        (
            user({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
            "remote media are not fetched",
        ),
        (user({"type": "image", "image": "file:///etc/passwd"}), r"an address \(file://"),
        (user({"type": "video", "video": PICTURE}), "can't be a PIL image"),
        ({"role": "assistant", "content": "a", "reasoning": 1}, "reasoning must be a string; got int"),
        ({"role": "user", "content": "a", "reasoning": "t"}, "Only an assistant message has reasoning"),
        ({"role": "tool", "content": "a", "tool_call_id": 1}, "tool_call_id must be a string; got int"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls must be a list; got dict"),
        ({"role": "assistant", "tool_calls": ["f"]}, "an object with a function's name"),
        ({"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f"}}]}, "id must be a string; got int"),
        (call(arguments="{}"), "an object with a function's name"),
        (call(name="f", arguments="[" * 100_000), "arguments of the tool call 'f' are not valid JSON"),
        (call(name="f", arguments="[1]"), "must be an object of names and values"),
        (call(name="f", arguments={1: "a"}), "names must be strings; got int"),
        (call(name="f", arguments={"a": {1, 2}}), "a set is not a JSON value"),
        (call(name="f", arguments='{"a": ' + "[" * 100 + "]" * 100 + "}"), "nested more than 64 deep"),
    ],
)
def test_mistakes_are_named(data, error):
    with pytest.raises(PromptError, match=error):
        Message.from_dict(data)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("image", Path("a.png")), ("image_url", "a.png"), ("video", "/etc/passwd"), ("video_url", "a.mp4")],
)
def test_paths_can_be_refused(kind, source):
    with pytest.raises(PromptError, match="path to a file is not accepted"):
        Message.from_dict(user({"type": kind, kind: source}), allow_paths=False)


@pytest.mark.parametrize(
    "source", [DATA_URI, DATA_URI.replace("data", "DATA"), "data:image/png;name=http://x;base64,AAAA", b"bytes"]
)
def test_contents_are_accepted_where_paths_are_not(source):
    message = Message.from_dict(user({"type": "image", "image": source}), allow_paths=False)
    assert message.content == (Image(source),)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "There are no messages"),
        ([{"role": "user", "content": "hi"}], "Message 1 is a dict"),
    ],
)
def test_conversations_are_checked(messages, error):
    with pytest.raises(PromptError, match=error):
        check_conversation(messages)


PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("hi", (Text("hi"),)),
        (["hi", Image("a.png")], (Text("hi"), Image("a.png"))),
        (Video("a.mp4"), (Video("a.mp4"),)),
        (PICTURE, (Image(PICTURE),)),
        ([{"type": "image_url", "image_url": {"url": DATA_URI}}, "hi"], (Image(DATA_URI), Text("hi"))),
        (None, ()),
    ],
)
def test_a_content_is_taken_as_it_is_meant(content: Any, parts: tuple[Any, ...]) -> None:
    assert Message("user", content) == Message("user", parts)
    assert Message("user", content).content == parts
    assert replace(Message("user", content), role="assistant").content == parts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "can't hold a int; expected a string"),
        (["hi", Path("a.png")], "can't hold a PosixPath|can't hold a WindowsPath"),
        ({"type": "audio"}, "Unknown content part type 'audio'"),
        (PIXELS.astype(np.float32), r"array of float32 of shape \[4, 6, 3\]; expected uint8 of shape \[height, width"),
        (PIXELS[..., :2], r"uint8 of shape \[4, 6, 2\]"),
        (PIXELS[:0], r"uint8 of shape \[0, 6, 3\]"),
    ],
)
def test_a_content_that_can_be_anything_is_refused(content: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        Message("user", content)


def test_a_picture_of_numbers_is_a_picture_and_stays_as_it_was() -> None:
    pixels = PIXELS.copy()
    (part,) = Message("user", pixels).media
    pixels[:] = 0
    assert isinstance(part.source, PILImage.Image)
    assert (np.asarray(part.source) == PIXELS).all()


def test_a_plan_and_a_clip_must_be_such() -> None:
    with pytest.raises(PromptError, match="The image's plan must be a MediaPlan, or None; got dict"):
        Image("a.png", {"kind": "image"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PromptError, match="The video's clip must be a VideoClip, or None; got tuple"):
        Video("a.mp4", clip=(0.0, 1.0))  # pyright: ignore[reportArgumentType]


def test_calls_are_taken_in_both_forms() -> None:
    given = [ToolCall("f", {"a": 1}), {"function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert Message("assistant", tool_calls=given).tool_calls == (ToolCall("f", {"a": 1}),) * 2
    with pytest.raises(PromptError, match="tool_calls must be a list; got str"):
        Message("assistant", tool_calls="f")  # pyright: ignore[reportArgumentType]


def test_text_and_media_of_messages():
    message = Message("user", (Text("a"), Image("a.png"), Text(" b"), Video("b.mp4")))
    assert message.text == "a b"
    assert message.media == (Image("a.png"), Video("b.mp4"))
    assert list(iter_media([message, Message("user"), message])) == [*message.media, *message.media]
