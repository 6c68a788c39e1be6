"""Messages of chat completions as clients of many servers write them: what is carried, translated and refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tracemalloc
from typing import Any

import pytest
from PIL import Image as PILImage

from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.server import history
from qwen35mm.server.body import mended
from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.chat_messages import continues, read_messages
from qwen35mm.server.parts import Parts, Sources
from qwen35mm_preprocess import MediaProcessor

ASK = {"role": "user", "content": "Go on."}


def png() -> bytes:
    stream = io.BytesIO()
    PILImage.new("RGB", (64, 64), "red").save(stream, "png")
    return stream.getvalue()


PNG = base64.b64encode(png()).decode()
URI = f"data:image/png;base64,{PNG}"


@pytest.fixture(scope="module")
def media(demo: Any) -> MediaProcessor:
    return MediaProcessor(demo.image_processing, demo.video_processing)


def read(given: list[dict[str, Any]], media: MediaProcessor, *, strict: bool = False) -> tuple[list[Message], str]:
    notes = Notes(strict=strict)
    parts = Parts(Sources(), media, None, notes)
    return asyncio.run(read_messages(given, parts, notes)), notes.header


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return said(
        tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}]
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "a"}, Message("system", "a")),
        ({"role": "human", "content": "a"}, Message("user", "a")),
        ({"role": "function", "name": "f", "content": "1"}, Message("tool", "1", name="f")),
        ({"role": "user", "content": None}, Message("user")),
        ({"role": "user", "content": []}, Message("user")),
        ({"role": "user", "content": [None, {"type": "text", "text": ""}, "a"]}, Message("user", "a")),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, Message("user", "a")),
        ({"role": "user", "content": [{"text": "a"}]}, Message("user", "a")),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}, Message("user", "a")),
        (said(refusal="No."), Message("assistant", "No.")),
        (said(content="a", refusal=None, annotations=[], audio=None, function_call=None), Message("assistant", "a")),
        (said(content="a", provider_specific_fields={"reasoning_content": "t"}), Message("assistant", "a", "t")),
        (
            said(content="a", reasoning_details=[{"type": "reasoning.text", "text": "t"}]),
            Message("assistant", "a", "t"),
        ),
        (said(content="a", thinking_blocks=[{"thinking": "t", "signature": "x"}]), Message("assistant", "a", "t")),
        (said(content=[{"type": "thinking", "thinking": "t"}, "a"]), Message("assistant", "a", "t")),
        (called('{"a": 1}'), Message("assistant", tool_calls=[{"name": "f", "arguments": {"a": 1}, "id": "c1"}])),
        (called('"{\\"a\\": 1}"'), Message("assistant", tool_calls=[{"name": "f", "arguments": {"a": 1}, "id": "c1"}])),
        (called(None), Message("assistant", tool_calls=[{"name": "f", "arguments": {}, "id": "c1"}])),
        (called(" "), Message("assistant", tool_calls=[{"name": "f", "arguments": {}, "id": "c1"}])),
        (
            said(function_call={"name": "f", "arguments": "{}"}),
            Message("assistant", tool_calls=[{"name": "f", "arguments": {}}]),
        ),
        (
            said(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "f", "input": "print(1)"}}]),
            Message("assistant", tool_calls=[{"name": "f", "arguments": {"input": "print(1)"}, "id": "c"}]),
        ),
    ],
)
def test_the_same_in_other_words(message: dict[str, Any], expected: Message, media: MediaProcessor) -> None:
    found, notes = read([message, ASK], media)
    assert (found[0], notes) == (expected, "")


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [('{"a": ', '{"a": '), ("[1]", [1]), ("7", 7), ('{"a": 1}{"b": 2}', '{"a": 1}{"b": 2}'), ('"\\ud800"', "\ufffd")],
)
def test_broken_arguments_are_kept_as_they_are(arguments: str, kept: Any, media: MediaProcessor) -> None:
    found, notes = read([called(arguments), ASK], media)
    assert dict(found[0].tool_calls[0].arguments) == {"arguments": kept}
    assert "messages.0.tool_calls.0.arguments isn't a JSON object" in notes


def test_arguments_hold_as_many_values_as_a_body(media: MediaProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ARGUMENT_VALUES", 10)
    few, many = '{"a": [1, 2, 3, 4]}', '{"a": [[], [], [], [], []]}'
    found, notes = read([called(few), called(many), called('{"a": "[,,,,,,,,,]"}'), ASK], media)
    (first,), (second,), (third,) = (message.tool_calls for message in found[:3])
    assert dict(first.arguments) == {"a": [1, 2, 3, 4]}
    assert dict(second.arguments) == {"arguments": many}
    assert dict(third.arguments) == {"a": "[,,,,,,,,,]"}
    assert notes.count("|") == 0
    assert "messages.1.tool_calls.0.arguments" in notes


SPOKEN = {"type": "text", "text": "ok"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"a": 1}, '{"a": 1}'),
        ([{"id": 1, "status": "declined"}, {"id": 2}], '[{"id": 1, "status": "declined"}, {"id": 2}]'),
        (7, "7"),
        ([1, 2], "[1, 2]"),
        ([SPOKEN, {"type": "json", "json": {"answer": 42}}], 'ok{"type": "json", "json": {"answer": 42}}'),
        ([SPOKEN, None, "b"], "okb"),
        (
            [{"type": "resource", "blob": "A" * 2000, "uri": "a:b"}],
            '[{"type": "resource", "blob": "...", "uri": "a:b"}]',
        ),
        ([{"text": "x", "score": 0.5}], '[{"text": "x", "score": 0.5}]'),
    ],
)
def test_results_are_any_json_value(given: Any, text: str, media: MediaProcessor) -> None:
    found, notes = read([ASK, called("{}"), {"role": "tool", "tool_call_id": "c1", "content": given}], media)
    assert found[-1].text == text
    assert ("messages.2.content isn't text or parts; it is read as JSON text" in notes) == (
        "[" in text or "{" in text or text == "7"
    )


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"type": "tool_result", "tool_use_id": "t", "content": "Rain"}, '[tool_result: {"content": "Rain"}]'),
        ({"type": "server_tool_use", "input": {"q": "x"}}, '[server_tool_use: {"input": {"q": "x"}}]'),
        (
            {"type": "document", "source": {"type": "text", "data": "Tale"}},
            '[document: {"source": {"type": "text", "data": "Tale"}}]',
        ),
    ],
)
def test_foreign_blocks_are_carried_as_text(part: dict[str, Any], line: str, media: MediaProcessor) -> None:
    asked = {"role": "user", "content": [SPOKEN, part]}
    for messages in ([asked], [asked, said(content="a"), ASK]):
        found, notes = read(messages, media)
        assert found[0].text == f"ok\n{line}\n"
        assert notes == f"messages.0.content.1 of type {part['type']!r} is carried as text"


@pytest.mark.parametrize(("part", "text"), [(5, "5"), ({"a": 1}, '{"a": 1}'), ({**SPOKEN, "text": [1]}, "[1]")])
def test_odd_parts_end_no_conversation(part: Any, text: str, media: MediaProcessor) -> None:
    found, notes = read([said(content=[part]), ASK], media)
    assert found[0].text.strip() == text
    assert "is read as JSON text" in notes
    with pytest.raises(ApiError):
        read([{"role": "user", "content": [part]}], media)


def test_thinking_in_chunks_is_read(media: MediaProcessor) -> None:
    chunks = {"type": "thinking", "thinking": [{"type": "text", "text": "H"}, {"type": "text", "text": "m."}]}
    found, _ = read([said(content=[chunks, SPOKEN]), ASK], media)
    assert (found[0].reasoning, found[0].text) == ("Hm.", "ok")


def test_one_call_need_not_be_listed(media: MediaProcessor) -> None:
    found, notes = read([said(tool_calls={"id": "c", "function": {"name": "f", "arguments": "{}"}}), ASK], media)
    assert (found[0].tool_calls[0].name, notes) == ("f", "")


def test_characters_that_are_none_are_replaced_in_arguments(media: MediaProcessor) -> None:
    found, _ = read([called('{"a": "x\\ud800"}'), ASK], media)
    assert dict(found[0].tool_calls[0].arguments) == {"a": "x\ufffd"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": None},
        {"type": "smell", "data": "x" * 2000},
    ],
)
def test_only_what_is_said_now_must_be_readable(part: dict[str, Any], media: MediaProcessor) -> None:
    asked = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0"):
        read([asked], media)
    found, notes = read([asked, said(content="I can't tell."), ASK], media)
    assert isinstance(found[0].content[0], Text)
    assert "left out: it can't be read here]" in found[0].content[0].text
    assert "messages.0.content.0 can't be read" in notes
    # A tool's result comes again with each turn of an agent.
    found, notes = read([ASK, called("{}"), {"role": "tool", "tool_call_id": "c1", "content": [part]}], media)
    assert "left out" in found[-1].text or found[-1].text == '[{"type": "smell", "data": "..."}]'
    with pytest.raises(ApiError):
        read([asked, said(content="I can't tell."), ASK], media, strict=True)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": URI, "detail": "auto"},
        {"type": "image", "image": URI},
        {"type": "image", "url": URI},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": {"url": URI.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")}},
        {"type": "image_url", "image_url": {"url": URI.replace("image%2F", "image/").rstrip("=")}},
        {"type": "image_url", "image_url": {"url": URI[:30] + "\n" + URI[30:]}},
        {"type": "file", "file": {"filename": "a.png", "file_data": URI}},
    ],
)
def test_images_in_every_form(part: dict[str, Any], media: MediaProcessor) -> None:
    (message,), notes = read([{"role": "user", "content": [part]}], media)
    (image,) = message.content
    assert isinstance(image, Image)
    assert isinstance(image.source, str | bytes)
    assert media.prepare(image.source).plan.kind == "image"
    assert notes == ""


def test_parts_bring_their_own_budget(media: MediaProcessor) -> None:
    part = {"type": "video", "video": "data:video/mp4;base64,AAAA", "fps": 1, "nframes": 8, "max_pixels": 65536}
    part |= {"video_start": 1, "video_end": 2.5, "mood": "good"}
    (message,), notes = read([{"role": "user", "content": [part]}], media)
    (video,) = message.content
    assert isinstance(video, Video)
    assert video.clip is not None
    assert (video.clip.start_s, video.clip.end_s, video.clip.num_frames) == (1.0, 2.5, 8)
    assert video.budget is not None
    assert (video.budget.fps, video.budget.max_image_tokens) == (1.0, 65536 // media.image_processing.factor**2)
    assert notes == "messages.0.content.0.mood isn't a known field; ignored"


def jpeg(color: str) -> str:
    stream = io.BytesIO()
    PILImage.new("RGB", (64, 64), color).save(stream, "jpeg")
    return base64.b64encode(stream.getvalue()).decode()


FRAMES = [jpeg(color) for color in ("red", "green", "blue", "white")]
URIS = [f"data:image/jpeg;base64,{frame}" for frame in FRAMES]


@pytest.mark.parametrize(
    ("part", "times"),
    [
        ({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(FRAMES)}"}}, [0, 0.5, 1, 1.5]),
        ({"type": "video", "video": URIS}, [0, 0.5, 1, 1.5]),
        ({"type": "video", "video": URIS, "fps": 1}, [0, 1, 2, 3]),
        ({"type": "video", "video": [{"url": uri} for uri in URIS], "sample_fps": 4}, [0, 0.25, 0.5, 0.75]),
    ],
)
def test_videos_as_frames(part: dict[str, Any], times: list[float], media: MediaProcessor) -> None:
    (message,), notes = read([{"role": "user", "content": [part]}], media)
    (video,) = message.content
    assert isinstance(video, Video)
    assert isinstance(video.source, bytes)
    plan = video.planner(media).plan(video.source, kind="video", clip=video.clip)
    assert list(plan.frame_times_s or ()) == pytest.approx(times, abs=0.01)
    assert notes == ""


@pytest.mark.parametrize(
    "frames", [[], ["data:image/png;base64,AAAA"], [""] * 5000, [*URIS, 5], ["https://a.example/b.jpg"]]
)
def test_frames_that_are_none_are_refused(frames: list[Any], media: MediaProcessor) -> None:
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0\.video"):
        read([{"role": "user", "content": [{"type": "video", "video": frames}]}], media)


def test_texts_in_files_are_read(media: MediaProcessor) -> None:
    data = base64.b64encode("Grüße".encode()).decode()
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{data}"}}
    (message,), _ = read([{"role": "user", "content": [part]}], media)
    assert message.text == "a.txt:\nGrüße"


def test_images_beside_the_text(media: MediaProcessor) -> None:
    (message,), notes = read([{"role": "user", "content": "What is it?", "images": [PNG]}], media)
    assert [type(part) for part in message.content] == [Image, Text]
    assert notes == ""


def test_media_of_a_system_message_are_the_users(media: MediaProcessor) -> None:
    parts = [{"type": "text", "text": "Rules."}, {"type": "image_url", "image_url": {"url": URI}}]
    found, notes = read([{"role": "system", "content": parts}, ASK], media)
    assert [(each.role, len(each.content)) for each in found] == [("system", 1), ("user", 1), ("user", 1)]
    assert "messages.0 is a system message with media" in notes


def test_an_unknown_role_is_the_users(media: MediaProcessor) -> None:
    found, notes = read([{"role": "critic", "content": "a"}, ASK], media)
    assert (found[0], notes) == (Message("user", "a"), "messages.0.role 'critic' is read as user")


@pytest.mark.parametrize("role", [None, 7, ["user"]])
def test_a_role_that_is_no_text_is_refused(role: Any, media: MediaProcessor) -> None:
    with pytest.raises(ApiError, match=r"messages\.0\.role must be system, developer, user, assistant or tool"):
        read([{"role": role, "content": "a"}], media)


def test_the_beginning_of_a_reply() -> None:
    assert continues(said(content="a", prefix=True))
    assert continues(said(content="a", partial=True))
    assert not continues(said(content="a"))
    assert not continues({"role": "user", "content": "a", "prefix": True})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'\xef\xbb\xbf{"a": "b"}', {"a": "b"}),
        (b'{"a": "\\ud83d"}', {"a": "\ufffd"}),
        (b'{"a": "\\udc00\\ud83d"}', {"a": "\ufffd\ufffd"}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
        (b'{"a": "\\ud83d\\n"}', {"a": "\ufffd\n"}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
        (b'{"a": "\xed\xa0\x80"}', {"a": "\ufffd\ufffd\ufffd"}),
    ],
)
def test_damaged_characters_are_replaced(body: bytes, expected: Any) -> None:
    whole = mended(body)
    assert json.loads(body if whole is None else whole) == expected


@pytest.mark.parametrize("unit", [b"\\ud83d\\ude00", b"\\\\ud83d", b"\xf0\x9f\x98\x80", b"\\n"])
def test_a_body_without_damaged_characters_is_not_copied(unit: bytes) -> None:
    body = b'{"a": "' + unit * (2**19 // len(unit)) + b'", '
    tracemalloc.start()
    try:
        assert mended(body) is None
        peak = tracemalloc.get_traced_memory()[1]
        lone = mended(body + b'"\\ud83d')
        assert lone is not None
        assert lone.endswith(b'"\\ufffd')
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A chunk and its text.
    assert peak < len(body)
    assert most < 4 * len(body)
