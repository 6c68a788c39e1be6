"""What is cached of pictures and videos: found when they are the same, never when they aren't, and not even read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import (
    CacheReport,
    Event,
    Finished,
    GenerationRequest,
    Image,
    Message,
    Result,
    Text,
    Video,
    pin_plans,
)
from qwen35mm.engine import DeferredMedia, Engine, Request
from qwen35mm.model import LoadedModel
from qwen35mm.model.vision import VisionTower
from qwen35mm_preprocess import MediaError, MediaProcessor, PreparedMedia
from tests.engine.exact import (
    GREEDY,
    MIN_SEGMENT,
    SETTINGS,
    Chat,
    assert_same,
    cache_settings,
    clip,
    cold,
    commit,
    dialog,
    picture,
    serve,
    turns,
    user,
    words,
)

# 35 tokens: the cut behind it comes with the picture alone, whatever text stands around it.
SIZE = (160, 224)


@dataclass
class Work:
    """Media decoded and grids taken up by the vision tower."""

    prepared: list[Any] = field(default_factory=list)
    encoded: list[tuple[int, int, int]] = field(default_factory=list)

    def reset(self) -> None:
        self.prepared.clear()
        self.encoded.clear()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    prepare, embed = MediaProcessor.prepare, VisionTower.embed

    def watched_prepare(self: MediaProcessor, source: Any, *args: Any, **options: Any) -> PreparedMedia:
        work.prepared.append(source)
        return prepare(self, source, *args, **options)

    def watched_embed(self: VisionTower, pixel_values: Any, grid_thw: Any) -> Any:
        work.encoded.append(tuple(grid_thw))
        return embed(self, pixel_values, grid_thw)

    monkeypatch.setattr(MediaProcessor, "prepare", watched_prepare)
    monkeypatch.setattr(VisionTower, "embed", watched_embed)
    return work


@pytest.fixture
def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded, SETTINGS, cache_settings(loaded))


def ask(engine: Engine, chat: Chat, *parts: Any) -> tuple[Request, CacheReport]:
    """A new chat of one question; its logits are those of an engine that has seen nothing."""
    request = chat.request([user(*parts)])
    (answer,) = serve(engine, request)
    reference = cold(chat.loaded, request)
    assert_same(answer, reference)
    return request, answer.result.cache


def through_picture(request: Request) -> int:
    """Tokens up to the cut behind the last picture."""
    last = request.prompt.spans[-1].stop
    (stop,) = [segment.stop for segment in request.prompt.segments if segment.end == "media" and segment.stop == last]
    return stop


def test_a_new_question_about_the_same_picture_computes_nothing_of_it(engine: Engine, chat: Chat, work: Work) -> None:
    seen = Image(picture(1, SIZE))
    ask_counted(engine, chat, work, seen, words("what is this", count=40))
    assert len(work.encoded) == 1
    request, report = ask_counted(engine, chat, work, seen, words("and how many", count=50))
    assert report.num_cached_tokens == through_picture(request)
    assert report.miss == "new content"
    assert work.encoded == []


def ask_counted(engine: Engine, chat: Chat, work: Work, *parts: Any) -> tuple[Request, CacheReport]:
    """`ask`, with the work of the cold reference left out of the count."""
    request = chat.request([user(*parts)])
    cold(chat.loaded, request)
    work.reset()
    return ask(engine, chat, *parts)


def test_text_before_another_picture_is_shared_and_the_picture_is_not(engine: Engine, chat: Chat, work: Work) -> None:
    system = Message("system", (Text(words("system", count=40)),))
    for seed in (1, 2):
        request = chat.request([system, user(Image(picture(seed, SIZE)), words("what is this"))])
        (answer,) = serve(engine, request)
        assert_same(answer, cold(chat.loaded, request))
    assert answer.result.cache.num_cached_tokens == request.prompt.system_stop
    assert answer.result.cache.miss == "different media"


def test_one_flipped_pixel_is_another_picture(engine: Engine, chat: Chat, work: Work) -> None:
    pixels = np.array(picture(1, SIZE))
    question = words("what is this", count=40)
    first, _ = ask(engine, chat, Image(PILImage.fromarray(pixels)), question)
    pixels[-1, -1, 2] ^= 1
    request, report = ask_counted(engine, chat, work, Image(PILImage.fromarray(pixels)), question)
    assert request.prompt.spans[0].grid_thw == first.prompt.spans[0].grid_thw
    assert report.num_cached_tokens == 0
    assert report.num_encoded_units == 1
    assert report.miss == "different media"


@pytest.mark.parametrize(("sides", "flat"), [((30, 100), True), ((96, 320), False)], ids=["flat", "noise"])
def test_height_and_width_are_no_more_than_each_other(
    engine: Engine, chat: Chat, work: Work, sides: tuple[int, int], flat: bool
) -> None:
    """30 x 100 has as many tokens as 100 x 30 and, in one grey, the very same bytes; it is another picture."""
    count = sides[0] * sides[1] * 3
    values = np.random.default_rng(0).integers(0, 256, (count,), dtype=np.uint8)
    if flat:
        values = np.full(count, 90, dtype=np.uint8)
    ids = []
    for height, width in (sides, sides[::-1]):
        image = Image(PILImage.fromarray(values.reshape(height, width, 3)))
        request, report = ask_counted(engine, chat, work, image, words("what is this", count=40))
        ids.append(request.prompt.token_ids.tolist())
        assert report.num_cached_tokens == 0
        assert (report.num_encoded_units, report.num_cached_units) == (1, 0)
    assert ids[0] == ids[1], "the token ids alone can't tell them apart"


def test_an_edit_before_the_picture_uses_its_embeddings_again(engine: Engine, chat: Chat, work: Work) -> None:
    seen, film = Image(picture(1, SIZE)), Video(clip())
    ask(engine, chat, words("one"), seen, film)
    request, report = ask_counted(engine, chat, work, words("another"), seen, film)
    assert work.encoded == []
    # The video's 20 temporal patches are three units.
    assert (report.num_cached_tokens, report.num_encoded_units, report.num_cached_units) == (0, 0, 4)
    assert len(request.prompt.spans) == 21


def test_embeddings_come_back_from_the_disk(loaded: LoadedModel, chat: Chat, work: Work, tmp_path: Path) -> None:
    settings = cache_settings(loaded, directory=tmp_path)
    seen = Image(picture(1, SIZE))
    before = Engine(loaded, SETTINGS, settings)
    ask(before, chat, words("one"), seen)
    before.flush()
    _, report = ask_counted(Engine(loaded, SETTINGS, settings), chat, work, words("another"), seen)
    assert work.encoded == []
    assert (report.num_encoded_units, report.num_cached_units) == (0, 1)


def test_embeddings_leave_by_their_own_budget(loaded: LoadedModel, chat: Chat, work: Work) -> None:
    one = 35 * loaded.config.text.hidden_size * 4
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, vision_bytes=2 * one))
    for number, seed in enumerate((1, 2, 1, 3)):
        ask(engine, chat, words("before", number), Image(picture(seed, SIZE)))
        assert engine.runtime.vision.num_bytes <= 2 * one
    for seed, is_kept in ((1, True), (2, False)):
        _, report = ask_counted(engine, chat, work, words("after", seed), Image(picture(seed, SIZE)))
        assert report.num_cached_units == is_kept


class Unreadable:
    """A deferred medium's pixels, which must never be asked for."""

    def __call__(self) -> PreparedMedia:
        raise MediaError("the file is gone")


def test_a_medium_inside_the_cached_chain_is_not_read(engine: Engine, chat: Chat, work: Work) -> None:
    messages = dialog([user(Image(picture(1, SIZE)), "what"), user(Video(clip()), "and here"), user("thanks")])
    for asked in turns(messages)[:2]:
        serve(engine, chat.request(asked))
    commit(engine, chat.history(messages[:-1]))
    request = chat.request(messages)
    expected = cold(chat.loaded, request)
    work.reset()
    deferred = tuple(DeferredMedia(medium.plan, Unreadable()) for medium in request.media)
    (answer,) = serve(engine, replace(request, media=deferred))
    assert_same(answer, expected)
    assert (work.prepared, work.encoded) == ([], [])


def test_a_medium_outside_of_it_is_read_and_a_lost_one_ends_the_request(engine: Engine, chat: Chat, work: Work) -> None:
    request = chat.request([user(Image(picture(1, SIZE)), "what")])
    (medium,) = request.media
    assert isinstance(medium, PreparedMedia)
    engine.add(replace(request, media=(DeferredMedia(medium.plan, Unreadable()),), id="lost"))
    outputs = [output for _ in range(6) for output in engine.step()]
    assert isinstance(outputs[-1].event, MediaError)
    engine.check_integrity()
    assert not engine.has_requests
    (answer,) = serve(engine, replace(request, media=(DeferredMedia(medium.plan, lambda: medium),), id="found"))
    assert_same(answer, cold(chat.loaded, request))


async def last(events: AsyncIterator[Event]) -> Result:
    (result,) = [event.result async for event in events if isinstance(event, Finished)]
    return result


@pytest.fixture
def backend(loaded: LoadedModel) -> Iterator[LocalBackend]:
    backend = local_backend(loaded, cache_settings(loaded))
    yield backend
    backend.close()


def local_backend(loaded: LoadedModel, cache: CacheSettings) -> LocalBackend:
    return LocalBackend(loaded, settings=SETTINGS, cache=cache, min_segment=MIN_SEGMENT)


async def test_a_chat_reads_and_encodes_each_medium_once(
    backend: LocalBackend, chat: Chat, work: Work, tmp_path: Path
) -> None:
    """Through the backend, with plans pinned as a chat does; the files may even be gone by then."""
    photo, film = tmp_path / "photo.png", tmp_path / "film.mp4"
    picture(1, SIZE).save(photo)
    film.write_bytes(clip().read_bytes())
    messages = [user(Image(photo), words("what")), user(Video(film), words("and"))]
    conversation: list[Message] = []
    for number, question in enumerate([*messages, user("one"), user("two")]):
        conversation.append(question)
        work.reset()
        plans = None
        async for event in backend.stream(GenerationRequest(conversation, GREEDY)):
            if not isinstance(event, Finished):
                plans = getattr(event, "plans", plans)
                continue
            reply = event.result
        assert plans is not None
        assert len(work.prepared) == (1 if number < 2 else 0)
        assert len(work.encoded) == (1, 3, 0, 0)[number]
        conversation = [*pin_plans(conversation, plans), Message("assistant", (Text(reply.text or "-"),))]
        assert backend.wait_idle(60)
        assert len(work.prepared) == (1 if number < 2 else 0), "a commit reads no medium again"
        if number == 1:
            photo.unlink()
            film.unlink()


async def test_a_restart_reads_no_old_medium(loaded: LoadedModel, chat: Chat, work: Work, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    picture(1, SIZE).save(photo)
    settings = cache_settings(loaded, directory=tmp_path / "cache")
    plan = chat.media([user(Image(picture(1, SIZE)))])[0].plan
    messages = [user(Image(photo, plan), words("what")), Message("assistant", (Text("a picture"),)), user("thanks")]
    results: list[Result] = []
    for asked in (messages[:1], messages):
        backend = local_backend(loaded, settings)
        work.reset()
        try:
            results.append(await last(backend.stream(GenerationRequest(asked, GREEDY))))
            backend.wait_idle(60)
        finally:
            backend.close()
        if asked is not messages:
            photo.unlink()
    assert set(results[1].cache.cached_from) == {"disk"}
    assert (work.prepared, work.encoded) == ([], [])
