"""Images and videos in prompts, against transformers' Qwen3VLProcessor and get_rope_index."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from qwen35mm.cache.chain import segment_addresses
from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.errors import PromptError
from qwen35mm.prompt import ChatTemplate
from qwen35mm_preprocess import GridTHW, MediaPlan

FPS = 3.0


def image_plan(rows=4, columns=6, name="image"):
    grid_thw = GridTHW(1, rows, columns)
    return plan("image", grid_thw, name)


def video_plan(frames=4, rows=4, columns=4, name="video"):
    """A plan for frames 0, 1, 2, ... of a clip of FPS frames a second; an odd last frame is repeated."""
    times = [frame / FPS for frame in range(frames)]
    padded = [*times, times[-1]][: frames + frames % 2]
    timestamps = tuple((a + b) / 2 for a, b in zip(padded[::2], padded[1::2], strict=True))
    details = {"frame_indices": tuple(range(frames)), "frame_times_s": tuple(times), "timestamps_s": timestamps}
    return plan("video", GridTHW(len(timestamps), rows, columns), name, **details)


def plan(kind, grid_thw, name, **details):
    size = (grid_thw.h * 16, grid_thw.w * 16)
    units = tuple(f"{name}-{index}" for index in range(grid_thw.t))
    return MediaPlan(
        kind=kind,
        source_size=size,
        size=size,
        grid_thw=grid_thw,
        num_tokens=grid_thw.num_tokens(),
        num_prompt_tokens=10_000,
        cache_bytes=0,
        processing="",
        digest=name,
        unit_digests=units,
        **details,
    )


def part(plan):
    return Image(b"image") if plan.kind == "image" else Video(b"video")


@pytest.fixture(scope="session")
def processor(oracle):
    """As much of transformers' processor as expands placeholders; the rest of it needs torchvision."""
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.tokenizer = oracle
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.image_processor = SimpleNamespace(merge_size=2)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return processor


def expand(processor, text, plans):
    """The prompt's text as transformers writes it."""
    images, videos = [], []
    for medium in plans:
        grid = np.array([list(medium.grid_thw)])
        if medium.kind == "image":
            images.append(processor.replace_image_token({"image_grid_thw": grid}, 0))
        else:
            metadata = [SimpleNamespace(fps=FPS, frames_indices=list(medium.frame_indices))]
            videos.append(processor.replace_video_token({"video_grid_thw": grid, "video_metadata": metadata}, 0))
    # transformers before 5.10 replaced a video's marks as well.
    text = re.sub(r"<\|vision_start\|><\|video_pad\|><\|vision_end\|>", "<|video_pad|>", text)
    return processor.get_text_with_replacements([text], images, videos)[0][0]


def rope_index(config, prompt, plans):
    """transformers' positions for the same ids."""
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    fake.get_vision_position_ids = Qwen3_5Model.get_vision_position_ids.__get__(fake)
    ids = torch.from_numpy(prompt.token_ids.copy())[None]
    types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    grids = {
        kind: torch.tensor([list(medium.grid_thw) for medium in plans if medium.kind == kind])
        for kind in ("image", "video")
    }
    grids = {f"{kind}_grid_thw": grid if len(grid) else None for kind, grid in grids.items()}
    positions, delta = Qwen3_5Model.get_rope_index(fake, ids, types, **grids)  # pyright: ignore[reportArgumentType]
    return positions[:, 0].numpy(), int(delta)


image_plans = st.builds(image_plan, rows=st.sampled_from([2, 4, 10]), columns=st.sampled_from([2, 4, 8]))
video_plans = st.builds(
    video_plan, frames=st.integers(1, 7), rows=st.sampled_from([2, 6]), columns=st.sampled_from([2, 4])
)
items = st.one_of(st.sampled_from(["", "a", " b\n", "\n\n", "1", "e\u0301"]), image_plans, video_plans)
turns = st.lists(st.lists(items, min_size=1, max_size=4), min_size=1, max_size=3)
ROLES = ("user", "assistant")


def messages_of(turns):
    return [
        Message(ROLES[n % 2], tuple(Text(item) if isinstance(item, str) else part(item) for item in turn))
        for n, turn in enumerate(turns)
    ]


def plans_of(turns):
    return [item for turn in turns for item in turn if not isinstance(item, str)]


@given(turns=turns, add_vision_id=st.booleans())
def test_ids_and_positions_equal_transformers(build, oracle, template, config, processor, turns, add_vision_id):
    source = template.source.replace("if add_vision_id", f"if {add_vision_id}")
    plans = plans_of(turns)
    prompt = build(messages_of(turns), plans, template=ChatTemplate(source))
    contents = [
        [{"type": "text", "text": item} if isinstance(item, str) else {"type": item.kind} for item in turn]
        for turn in turns
    ]
    conversation = [{"role": ROLES[n % 2], "content": content} for n, content in enumerate(contents)]
    text = oracle.apply_chat_template(
        conversation, chat_template=source, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    text = expand(processor, text, plans)
    assert prompt.token_ids.tolist() == oracle(text)["input_ids"]
    positions, delta = rope_index(config, prompt, plans)
    assert np.array_equal(prompt.positions, positions)
    assert prompt.rope_delta == delta


def test_spans(build, config):
    plans = [image_plan(name="first"), video_plan(frames=3, name="clip"), image_plan(2, 2, name="second")]
    messages = [
        Message("user", (part(plans[0]), Text("what?"))),
        Message("assistant", (Text("this"),)),
        Message("user", (Text("and"), part(plans[1]), part(plans[2]))),
    ]
    prompt = build(messages, plans, min_segment=4)
    described = [(span.digest, span.media_index, span.unit_index, span.grid_thw) for span in prompt.spans]
    assert described == [
        ("first-0", 0, 0, (1, 4, 6)),
        ("clip-0", 1, 0, (1, 4, 4)),
        ("clip-1", 1, 1, (1, 4, 4)),
        ("second-0", 2, 0, (1, 2, 2)),
    ]
    pads = np.isin(prompt.token_ids, [config.image_token_id, config.video_token_id])
    covered = np.zeros_like(pads)
    for span in prompt.spans:
        assert span.stop - span.start == span.grid_thw.num_tokens()
        assert pads[span.start : span.stop].all()
        assert prompt.token_ids[span.start - 1] == config.vision_start_token_id
        assert prompt.token_ids[span.stop] == config.vision_end_token_id
        covered[span.start : span.stop] = True
    assert np.array_equal(pads, covered)
    stops = [segment.stop for segment in prompt.segments]
    assert prompt.spans[0].stop in stops
    assert prompt.spans[3].stop in stops
    assert prompt.spans[1].stop not in stops, "only the last span of a turn is a place to cut"
    assert {index for segment in prompt.segments for index in segment.span_indices} == {0, 1, 2, 3}


def test_a_plan_without_digests_gives_spans_without(build):
    assert build([Message("user", (Image(b"x"),))], [image_plan().unpinned()]).spans[0].digest is None


def test_typed_placeholders_are_not_media(build, tokenizer):
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = build([Message("user", (Text(typed), Image(b"x"), Text(typed)))], [image_plan(2, 2)])
    assert [span.stop - span.start for span in prompt.spans] == [1]
    assert tokenizer.decode(prompt.token_ids.tolist(), skip_special=False).count(typed) == 3


@given(turns=turns, min_segment=st.sampled_from([1, 4, 16]))
def test_a_history_with_media_is_how_the_next_turn_begins(build, turns, min_segment):
    messages = [*messages_of(turns[:2]), Message("assistant", (Text("I see."),))]
    following = [*messages, *messages_of([turns[-1]])]
    plans, next_plans = plans_of(turns[:2]), plans_of([turns[-1]])
    history = build(messages, plans, history=True, min_segment=min_segment)
    prompt = build(following, plans + next_plans, min_segment=min_segment)
    length = len(history.token_ids)
    assert prompt.token_ids[:length].tolist() == history.token_ids.tolist()
    assert np.array_equal(prompt.positions[:, :length], history.positions)
    assert prompt.spans[: len(history.spans)] == history.spans
    assert prompt.segments[: len(history.segments)] == history.segments
    addresses = segment_addresses(history, b"", salt=b"tenant", salt_from=4)
    assert segment_addresses(prompt, b"", salt=b"tenant", salt_from=4)[: len(addresses)] == addresses
    assert length - history.tail_start < min_segment, "all but the end of a short last turn can be kept"


@pytest.mark.parametrize(
    ("content", "plans", "error"),
    [
        ((Image(b"x"),), [], "hold 1 images and videos; plans came for 0"),
        ((Text("x"),), [image_plan()], "hold 0 images and videos; plans came for 1"),
        ((Image(b"x"), Video(b"x")), [image_plan()] * 2, "Medium 2 .* of kind video; its plan is for kind image"),
    ],
)
def test_plans_must_match_the_messages(build, content, plans, error):
    with pytest.raises(PromptError, match=error):
        build([Message("user", content)], plans)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ messages[0].content | length }}", "no media"),
        ("<|video_pad|><|image_pad|>", "video, image"),
        ("<|image_pad|>" * 9, "9 media"),
    ],
)
def test_a_template_that_loses_media_is_named(build, source, written):
    with pytest.raises(PromptError, match=f"wrote {written} where the messages hold image"):
        build([Message("user", (Image(b"x"),))], [image_plan()], template=ChatTemplate(source))


def test_a_bare_video_placeholder(build, config, tokenizer):
    # A template that leaves the marks to us.
    source = "{% for m in messages %}<|video_pad|>x{% endfor %}"
    prompt = build([Message("user", (Video(b"x"),))], [video_plan(frames=2)], template=ChatTemplate(source))
    marks = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    assert tokenizer.decode(prompt.token_ids.tolist(), skip_special=False) == f"<0.2 seconds>{marks}x"


def test_timestamps_are_those_of_the_plan(build, tokenizer):
    late = replace(video_plan(frames=4), timestamps_s=(61.04, 3600.25))
    prompt = build([Message("user", (Video(b"x"),))], [late])
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert re.findall("<[^>]* seconds>", text) == ["<61.0 seconds>", "<3600.2 seconds>"]
