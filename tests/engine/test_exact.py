"""Warm equals cold, bit for bit: the logits of every token, whatever was cached and whatever became of it."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from qwen35mm.cache.chain import Chain
from qwen35mm.cache.kv_files import mapped_bytes
from qwen35mm.cache.prefix_cache import PrefixCache
from qwen35mm.cache.segment_index import CachedSegment
from qwen35mm.contract import Image, Message, Video
from qwen35mm.engine import Engine, Request
from qwen35mm.engine.settings import chunk_tokens_at
from qwen35mm.model import LoadedModel
from qwen35mm.prompt.segments import cut_segments
from tests.engine.exact import (
    DENSE,
    MIN_SEGMENT,
    MODELS,
    SETTINGS,
    Answer,
    Chat,
    assert_same,
    cache_settings,
    chat_model,
    clip,
    cold,
    commit,
    dialog,
    gates_of,
    picture,
    serve,
    turns,
    user,
    words,
)
from tests.tiny import TinySpec

SYSTEM = words("system", count=40)


BOTH = pytest.mark.parametrize("loaded", MODELS, ids=[spec.name for spec, _ in MODELS], indirect=True)
# Of what the kind of model doesn't touch, one is asked.
MIXTURE = pytest.mark.parametrize("loaded", MODELS[1:], ids=[MODELS[1][0].name], indirect=True)


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return chat_model(*getattr(request, "param", MODELS[0]))


@pytest.fixture
def chat(loaded: LoadedModel) -> Chat:
    return Chat(loaded)


def six_turns(*, images: bool = True, video: bool = True, third: Message | None = None) -> list[Message]:
    """A conversation of six questions with pictures and a clip; `third` is another third one."""
    questions = [user(words("question", "images" if images else "video", index)) for index in range(6)]
    if images:
        questions[0] = user(Image(picture(0)), words("a picture"))
        questions[3] = user(words("and this one"), Image(picture(1, (30, 100))), Image(picture(2)))
    if video:
        questions[1] = user(Video(clip()), words("a clip"))
    questions[2] = third or questions[2]
    return dialog(questions, system=SYSTEM)


def with_reply(messages: list[Message]) -> list[Message]:
    """A question with the reply that `dialog` would put behind it, for a history."""
    return dialog([*(m for m in messages if m.role == "user"), user("next")], system=SYSTEM)[:-1]


def converse(engine: Engine, chat: Chat, messages: list[Message]) -> list[Answer]:
    """Asks every question in turn, each reply's history committed before the next; all are compared with cold ones."""
    answers = []
    for asked in turns(messages):
        answers.append(ask(engine, chat, asked))
        commit(engine, chat.history(with_reply(asked)))
    return answers


def ask(engine: Engine, chat: Chat, messages: list[Message], **options: Any) -> Answer:
    """One answer, compared with the cold one."""
    request = chat.request(messages, **options)
    (answer,) = serve(engine, request)
    assert_same(answer, cold(chat.loaded, request, like=engine.runtime.cache_settings))
    return answer


def cached_segments(engine: Engine, request: Request) -> list[CachedSegment]:
    """The request's segments as far as they are in memory."""
    index, chain = engine.runtime.prefixes._index, Chain.of(request.prompt, engine.runtime.root)
    found = [index.get(chain, at) for at in range(len(chain))]
    return [segment for segment in found if segment is not None]


@BOTH
def test_warm_from_memory_equals_cold(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    answers = converse(engine, chat, six_turns())
    reports = [answer.result.cache for answer in answers]
    assert [report.num_cached_tokens > 0 for report in reports] == [False, True, True, True, True, True]
    assert all(report.num_prefilled_tokens < 100 for report in reports[4:])


def test_an_engine_makes_sums_exact_where_its_layers_lie(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = MagicMock()
    monkeypatch.setattr("qwen35mm.engine.runtime.keep_sums_exact", asked)
    Engine(loaded, SETTINGS, cache_settings(loaded))
    asked.assert_called_once_with(loaded.model.layer_devices)


def test_pieces_that_shrink_with_their_depth_equal_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.exact._cold", {})  # what others have computed, and may use, is of other pieces
    monkeypatch.setattr("qwen35mm.engine.settings.CPU_DEEP_TOKENS", 128)
    monkeypatch.setattr("qwen35mm.engine.settings.CPU_LEAST_CHUNK_TOKENS", 8)
    loaded = chat_model(*MODELS[0])
    stops = [0, 64, 128, 129, 256, 257, 512, 1025, 10**6]
    assert [chunk_tokens_at(stop, 64, loaded.model.device) for stop in stops] == [64, 64, 64, 32, 32, 16, 16, 8, 8]
    answers = converse(Engine(loaded, SETTINGS, cache_settings(loaded)), Chat(loaded), six_turns(video=False))
    assert all(answer.result.cache.num_cached_tokens > 128 for answer in answers[2:])


@BOTH
def test_warm_from_the_disk_equals_cold(loaded: LoadedModel, chat: Chat, tmp_path: Path) -> None:
    messages = turns(six_turns())
    settings = cache_settings(loaded, directory=tmp_path)
    for first, last in ((0, 3), (3, 5), (5, 6)):
        engine = Engine(loaded, SETTINGS, settings)
        for index in range(first, last):
            report = ask(engine, chat, messages[index]).result.cache
            commit(engine, chat.history(with_reply(messages[index])))
            if index == first > 0:
                assert set(report.cached_from) == {"disk"}
                assert report.num_prefilled_tokens < 2 * MIN_SEGMENT + 50
                assert report.num_encoded_units == (2 if index == 3 else 0)
        engine.flush()


def test_an_edit_of_the_third_of_six_turns_equals_cold(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    converse(engine, chat, six_turns())
    third = user(Image(picture(3)), words("edited"))
    edited = turns(six_turns(third=third))
    before = chat.history(with_reply(edited[1])).prompt
    for index in (2, 3):
        report = ask(engine, chat, edited[index]).result.cache
        assert report.num_cached_tokens > 0
        if index == 2:
            assert report.num_cached_tokens <= before.tail_start + MIN_SEGMENT
        commit(engine, chat.history(with_reply(edited[index])))
    # The conversation as it was before is still there, and still the same.
    ask(engine, chat, turns(six_turns())[5])


@MIXTURE
def test_another_answer_and_a_branch_equal_cold(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    messages = six_turns()
    converse(engine, chat, turns(messages)[3])
    asked = turns(messages)[3]
    again = ask(engine, chat, asked).result
    assert again.cache.num_cached_tokens == chat.request(asked).prompt.tail_start
    assert again.cache.miss is None
    branch = [*with_reply(asked), user(words("a branch"))]
    other = [*with_reply(asked), user(Image(picture(9)), words("another"))]
    for messages in (branch, other, branch, other):
        assert ask(engine, chat, messages).result.cache.num_cached_tokens >= chat.history(branch[:-1]).prompt.tail_start


def drop_states(engine: Engine, segments: list[CachedSegment]) -> None:
    """In the middle and behind it no state is left."""
    for segment in segments[len(segments) // 2 :]:
        if segment.address in engine.runtime.prefixes.states:
            engine.runtime.prefixes.states.evict(segment.address)


def drop_last_state(engine: Engine, segments: list[CachedSegment]) -> None:
    """The one that the next answer would go on from."""
    states = engine.runtime.prefixes.states
    states.evict([segment.address for segment in segments if segment.address in states][-1])


def drop_kv(engine: Engine, segments: list[CachedSegment]) -> None:
    """The middle's KV and, as nobody could reach it, all behind it."""
    engine.runtime.prefixes._remove(segments[len(segments) // 2])


def reclaim(engine: Engine, segments: list[CachedSegment]) -> None:
    """As much as a new prompt would take."""
    blocks = {block for segment in segments[len(segments) // 2 :] for block in segment.blocks or ()}
    engine.runtime.prefixes.reclaim(len(blocks) - 1)


@MIXTURE
def test_an_eviction_in_the_middle_of_the_chain_equals_cold(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    asked = turns(six_turns())[4]
    request = chat.request(asked)
    converse(engine, chat, asked)
    for lose in (drop_last_state, drop_states, drop_kv, reclaim):
        segments = cached_segments(engine, request)
        assert len(segments) == len(request.prompt.segments)
        lose(engine, segments)
        engine.check_integrity()
        report = ask(engine, chat, asked).result.cache
        assert 0 < report.num_cached_tokens < request.prompt.tail_start, lose
        assert report.miss == "evicted", lose
        # What was lost is there again.
        assert ask(engine, chat, asked).result.cache.num_cached_tokens == request.prompt.tail_start, lose


def test_segments_that_left_the_device_for_host_memory_equal_cold(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, host_kv_bytes=64 << 20))
    messages = six_turns()
    asked = turns(messages)[4]
    converse(engine, chat, asked)
    allocator = engine.runtime.pools.kv.allocator
    engine.runtime.prefixes.reclaim(3)
    engine.check_integrity()
    assert allocator.num_free < allocator.num_blocks
    mixed = ask(engine, chat, asked).result.cache
    assert set(mixed.cached_from) == {"device", "host"}
    engine.runtime.prefixes.reclaim(allocator.num_blocks)
    assert allocator.num_free == allocator.num_blocks
    report = ask(engine, chat, asked).result.cache
    assert report.cached_from == {"host": chat.request(asked).prompt.tail_start}
    ask(engine, chat, messages)


@pytest.mark.parametrize(
    ("loaded", "on_disk"), [(MODELS[0], False), (MODELS[1], True)], ids=["memory", "disk"], indirect=["loaded"]
)
def test_conversations_that_drive_each_other_out_equal_cold(
    loaded: LoadedModel, chat: Chat, on_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Room for the KV of one conversation and a bit, and for four states."""
    num_evicted = 0
    evict = PrefixCache._evict

    def counted(self: PrefixCache, segment: CachedSegment) -> None:
        nonlocal num_evicted
        num_evicted += 1
        evict(self, segment)

    monkeypatch.setattr(PrefixCache, "_evict", counted)
    state_bytes = 4 * loaded.config.state_bytes(loaded.model.dtype)
    directory = tmp_path if on_disk else None
    settings = cache_settings(loaded, num_tokens=640, state_bytes=state_bytes, directory=directory)
    engine = Engine(loaded, replace(SETTINGS, context_length=640, speculate="off"), settings)
    tiers: set[str] = set()
    for index in range(1, 5):
        for images in (False, True):
            asked = turns(six_turns(images=images, video=not images))[index]
            tiers |= set(ask(engine, chat, asked).result.cache.cached_from)
            commit(engine, chat.history(with_reply(asked)))
    assert num_evicted >= 5
    assert ("disk" in tiers) == on_disk


@pytest.mark.parametrize(
    ("loaded", "lost_features"),
    [(MODELS[0], False), (MODELS[1], True)],
    ids=["kept", "encoded again"],
    indirect=["loaded"],
)
def test_a_start_inside_a_video_equals_cold(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, lost_features: bool
) -> None:
    """Long runs are cut inside a video too: the rest of it is computed behind a state that has seen half of it."""
    monkeypatch.setattr("qwen35mm.prompt.build.cut_segments", functools.partial(cut_segments, max_run=64))
    chat = Chat(loaded)
    options = {"vision_bytes": 0} if lost_features else {}
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, **options))
    asked = turns(six_turns(images=False))[2]
    request = chat.request(asked)
    inside = [index for index, s in enumerate(request.prompt.segments) if s.end == "run" and s.span_indices]
    assert len(inside) >= 2
    every_state = frozenset(range(len(request.prompt.segments)))
    monkeypatch.setattr("qwen35mm.engine.prefill.states_to_keep", lambda *args, **options: every_state)
    ask(engine, chat, asked)
    for index in inside:
        for segment in cached_segments(engine, request)[index + 1 :]:
            if segment.address in engine.runtime.prefixes.states:
                engine.runtime.prefixes.states.evict(segment.address)
        report = ask(engine, chat, asked).result.cache
        assert report.num_cached_tokens == request.prompt.segments[index].stop
        assert (report.num_encoded_units > 0) == lost_features
        assert (report.num_cached_units > 0) != lost_features


@pytest.mark.parametrize(
    ("model", "kv_dtype", "kv_keep", "kept_states"),
    [
        ((DENSE, "float32"), "int8", "1", "float32"),
        ((DENSE, "bfloat16"), "int4", "1", "bf16"),
        (MODELS[1], "fp8", "1", "float32"),
        ((DENSE, "bfloat16"), "k=f16,v=fp8_e5m2", "1", "float32"),
        ((DENSE, "float32"), "k=bf16,v=int4r", "1", "float32"),
        (MODELS[1], "k=tq3,v=tq4", "0.6", "float32"),
        ((DENSE, "float32"), "auto", "1", "bf16"),
        ((DENSE, "float32"), "auto", "text=0.5,media=0.3", "float32"),
        ((DENSE, "bfloat16"), "int8", "0.5 gated", "float32"),
        (MODELS[1], "auto", "text=1,media=0.4 gated", "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0].name}-{value[1]}",
)
def test_every_type_that_is_kept_equals_cold(
    model: tuple[TinySpec, str], kv_dtype: str, kv_keep: str, kept_states: str, tmp_path: Path
) -> None:
    """From memory, after an eviction, on a branch, and from the disk after a restart."""
    loaded = chat_model(*model)
    chat = Chat(loaded)
    kv_keep, _, gated = kv_keep.partition(" ")
    kept: dict[str, Any] = {"kv_dtype": kv_dtype, "kv_keep": kv_keep, "kept_states": kept_states}
    kept["kv_gates"] = gates_of(loaded) if gated else "none"
    settings = cache_settings(loaded, directory=tmp_path, **kept)
    messages = turns(six_turns(images=kv_keep != "1", video=False))[2]
    engine = Engine(loaded, SETTINGS, settings)
    first, *_, last = converse(engine, chat, messages)
    assert last.result.cache.num_cached_tokens > 0
    if kv_dtype != "auto":
        assert not torch.equal(first.logits, cold(loaded, chat.request(turns(messages)[0])).logits)
    if kv_keep != "1":
        whole = cold(loaded, chat.request(messages), like=replace(settings, kv_keep="1"))
        assert not torch.equal(last.logits, whole.logits)
        assert 0 < last.result.cache.num_evicted_tokens < last.result.cache.num_cached_tokens
    if gated:
        by_keys = cold(loaded, chat.request(messages), like=replace(settings, kv_gates="none"))
        assert not torch.equal(last.logits, by_keys.logits)
        other = Engine(loaded, SETTINGS, replace(settings, kv_gates="none"))
        assert other.runtime.root != engine.runtime.root
    if kept_states != "float32":
        unrounded = cold(loaded, chat.request(messages), like=replace(settings, kept_states="float32"))
        assert not torch.equal(last.logits, unrounded.logits)
        states = engine.runtime.prefixes.states
        for address in states.addresses:
            assert (state := states.get(address)) is not None
            assert state["recurrent"].dtype == torch.bfloat16
    drop_kv(engine, cached_segments(engine, chat.request(messages)))
    assert ask(engine, chat, messages).result.cache.num_cached_tokens > 0
    branch = [*with_reply(messages), user(words("a branch"))]
    ask(engine, chat, branch)
    engine.flush()
    again = Engine(loaded, SETTINGS, settings)
    assert set(ask(again, chat, branch).result.cache.cached_from) == {"disk"}
    # In another type the same tokens have another cache.
    other = Engine(loaded, SETTINGS, replace(settings, kv_dtype="auto", kv_keep="1", kept_states="float32"))
    (answer,) = serve(other, chat.request(branch))
    assert answer.result.cache.miss == "other model"


@pytest.mark.parametrize(
    ("loaded", "kv_dtype"), [(MODELS[0], "int8"), (MODELS[1], "auto")], ids=["int8", "auto"], indirect=["loaded"]
)
def test_keys_and_values_in_a_file_equal_those_in_memory(
    loaded: LoadedModel, chat: Chat, kv_dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Conversations that drive each other out of a file with room for one, branches of them, and after a restart."""
    monkeypatch.setattr("qwen35mm.cache.planner.file_room", lambda folder: 1 << 40)
    where = {"directory": tmp_path, "kv_directory": tmp_path / "kv", "kv_dtype": kv_dtype}
    settings = cache_settings(loaded, **{**where, "kv_bytes": None})
    one = replace(SETTINGS, slots=1, context_length=640)
    engine = Engine(loaded, one, settings)
    assert engine.runtime.plan.num_kv_tokens == 640
    assert list((tmp_path / "kv").iterdir()) == []
    evict = MagicMock(side_effect=engine.runtime.prefixes._evict)
    monkeypatch.setattr(engine.runtime.prefixes, "_evict", evict)
    for index in (1, 3):
        for images in (False, True):
            asked = turns(six_turns(images=images, video=not images))[index]
            ask(engine, chat, asked)
            commit(engine, chat.history(with_reply(asked)))
            branch = [*with_reply(asked), user(words("a branch"))]
            assert ask(engine, chat, branch).result.cache.num_cached_tokens > 0
    assert evict.call_count > 0
    if sys.platform == "linux":
        assert mapped_bytes() > 0
    engine.flush()
    # What was written beside a file is found beside memory, too.
    again = Engine(loaded, SETTINGS, replace(cache_settings(loaded), directory=tmp_path, kv_dtype=kv_dtype))
    assert set(ask(again, chat, branch).result.cache.cached_from) == {"disk"}


@pytest.mark.parametrize("harm", ["conv", "recurrent", "kv"])
@torch.inference_mode()
def test_the_comparison_sees_what_is_wrong_in_the_cache(loaded: LoadedModel, chat: Chat, harm: str) -> None:
    """A test that can't fail proves nothing: a little damage in one place must change the logits."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    asked = turns(six_turns(video=False))[2]
    request = chat.request(asked)
    serve(engine, request)
    last = cached_segments(engine, request)[-1]
    state = engine.runtime.prefixes.states.get(last.address)
    assert state is not None
    if harm in ("conv", "recurrent"):
        state[harm].mul_(1.25)
    else:
        pool = engine.runtime.pools.kv
        assert last.blocks is not None
        for keys, _ in pool.layers.values():
            keys[last.blocks[-1] * pool.block_size + (last.stop - 1) % pool.block_size] *= -1
    (answer,) = serve(engine, replace(request, id="harmed"))
    assert answer.result.cache.num_cached_tokens == request.prompt.tail_start
    assert not torch.equal(answer.logits[0], cold(loaded, request).logits[0])
