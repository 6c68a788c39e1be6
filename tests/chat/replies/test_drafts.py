"""What a message costs before it is sent, and offers that really fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen35mm.chat.media.plans import completed
from qwen35mm.chat.replies.drafts import Draft
from qwen35mm.chat.replies.past import Past
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.chat.store.store import new_id
from qwen35mm_preprocess import MediaError, MediaProcessor
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import CLIP, PICTURE, ChatKit
from tests.chat.fake_backend import complete


def draft(text: str = "look", *files: Attachment, path: tuple[Node, ...] = (), **settings: Any) -> Draft:
    parent = path[-1].id if path else None
    return Draft(Past(path), Node(new_id(), parent, "user", 1.0, text, attachments=files), Settings.read(settings))


def talk(num_turns: int, num_chars: int) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for number in range(2 * num_turns):
        parent = nodes[-1].id if nodes else None
        nodes.append(Node(new_id(), parent, "assistant" if number % 2 else "user", 1.0 + number, "x" * num_chars))
    return tuple(nodes)


def offers_of(kit: ChatKit, asked: Draft) -> dict[str, dict[str, Any]]:
    measured = kit.turns.drafts.measure(asked)
    assert measured["fits"] is not bool(measured["offers"])
    return {offer["kind"]: offer for offer in measured["offers"]}


def large_pictures(kit: ChatKit, folder: Path, number: int) -> list[Attachment]:
    """Pictures of different content that take up to 1,280 tokens; the demo model itself takes small ones only."""
    kit.backend.media = replace(
        kit.backend.media, image_processing=replace(kit.backend.media.image_processing, max_pixels=10**7)
    )
    for at in range(number):
        Image.new("RGB", (1600 + at, 1200), "teal").save(folder / f"{at}.png")
    return [kit.attach(folder / f"{at}.png") for at in range(number)]


def test_what_a_server_cannot_see_or_count_is_said_before_sending(kit: ChatKit) -> None:
    kit.backend.info = replace(kit.backend.info, images=False, exact_counts=False, host="cellar:8000")
    measured = kit.turns.drafts.measure(draft("look", kit.attach(PICTURE), kit.attach(CLIP, kind="video")))
    assert ["can't see pictures or videos" in english(view["error"]) for view in measured["media"]] == [True, True]
    assert measured["tokens"]["exact"] is False


def test_a_cost_is_counted_before_sending(kit: ChatKit, tmp_path: Path) -> None:
    clip, picture = kit.attach(CLIP, kind="video", name="dance.mp4"), kit.attach(PICTURE)
    (tmp_path / "notes.txt").write_text("w" * 2000)
    notes = kit.attach(tmp_path / "notes.txt", kind="text")
    measured = kit.turns.drafts.measure(draft("look", clip, picture, notes, path=talk(1, 400)))
    assert [view["name"] for view in measured["media"]] == ["dance.mp4", PICTURE.name, "notes.txt"]
    frames, tokens = english(measured["media"][0]["label"]).split(", ")
    assert frames.endswith(" frames")
    assert tokens == f"{measured['media'][0]['num_tokens']:,} tokens"
    assert english(measured["media"][2]["label"]) == "2.0 KiB"
    media_tokens = sum(view.get("num_tokens", 0) for view in measured["media"])
    assert measured["tokens"]["history"] == 2 * (400 // 4 + 4)
    assert measured["tokens"]["all"] >= measured["tokens"]["history"] + media_tokens + 500
    assert measured["tokens"]["context"] == 4096
    assert (measured["fits"], measured["offers"]) == (True, [])


def test_sliders_change_the_cost(kit: ChatKit) -> None:
    clip = kit.attach(CLIP, kind="video")
    (few,), (many,) = (kit.turns.drafts.measure(draft("look", clip, max_frames=frames))["media"] for frames in (4, 8))
    assert english(few["label"]).startswith("4 frames, ")
    assert few["num_tokens"] < many["num_tokens"]


def test_the_same_file_is_looked_at_once(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    plan = MediaProcessor.plan
    monkeypatch.setattr(MediaProcessor, "plan", lambda *args: plans.append(args) or plan(*args))
    picture = kit.attach(PICTURE)
    for text in ("a", "ab", "abc"):
        kit.turns.drafts.measure(draft(text, picture))
    assert len(plans) == 1
    kit.turns.drafts.measure(draft("abc", picture, max_image_tokens=9))
    assert len(plans) == 2


def test_a_file_that_can_t_be_read_is_named(kit: ChatKit, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    broken, good = kit.attach(tmp_path / "x", name="my picture.png"), kit.attach(PICTURE)
    measured = kit.turns.drafts.measure(draft("look", broken, good))
    assert "'my picture.png'" in english(measured["media"][0]["error"])
    assert broken.digest not in english(measured["media"][0]["error"])
    assert measured["media"][1]["error"] is None
    with pytest.raises(MediaError, match=r"'my picture\.png'") as caught:
        kit.turns.drafts.plan(draft("look", broken))
    assert broken.digest not in str(caught.value)


def test_an_unreadable_file_of_the_past_is_named(kit: ChatKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = Attachment("ab" * 32, "image", "old.png", 1)

    def count_tokens(*_: Any, **__: Any) -> int:
        raise MediaError(f"'{past.digest}' could not be opened")

    monkeypatch.setattr(kit.backend, "count_tokens", count_tokens)
    path = (replace(talk(1, 1)[0], attachments=(past,)),)
    with pytest.raises(MediaError, match=r"'old\.png' could not be opened"):
        kit.turns.drafts.measure(draft(path=path))


@pytest.mark.parametrize(("num_pictures", "what"), [(1, "the picture"), (2, "each picture and clip")])
def test_offered_limits_fit(kit: ChatKit, tmp_path: Path, num_pictures: int, what: str) -> None:
    pictures = large_pictures(kit, tmp_path, num_pictures)
    kit.backend.context_length = 1100
    asked = draft("look", *pictures)
    offer = offers_of(kit, asked)["media"]
    assert english(offer["label"]) == f"Limit {what} to {offer['settings']['max_image_tokens']:,} tokens"
    assert set(offer["settings"]) == {"max_image_tokens"}
    assert kit.turns.drafts.measure(replace(asked, limits=offer["settings"]))["fits"]


def test_an_offer_never_raises_a_limit(kit: ChatKit, tmp_path: Path) -> None:
    (picture,), clip = large_pictures(kit, tmp_path, 1), kit.attach(CLIP, kind="video")
    kit.backend.context_length = 195
    asked = draft("look", picture, clip, max_image_tokens=70)
    limits = offers_of(kit, asked)["media"]["settings"]
    assert set(limits) == {"max_video_tokens"}
    assert kit.turns.drafts.measure(draft("look", picture, clip, max_image_tokens=70, **limits))["fits"]


@pytest.mark.parametrize("num_chars", [400, 1000, 2300])
def test_an_offered_beginning_fits_and_none_before_does(kit: ChatKit, num_chars: int) -> None:
    kit.backend.context_length = 2048
    path = talk(8, num_chars)
    asked = draft("y" * 2000, path=path)
    offer = offers_of(kit, asked)["shorten"]
    start = [node.id for node in path].index(offer["first"])
    assert path[start].role == "user"
    assert english(offer["label"]) == f"Leave the oldest {start} messages out of the prompt"
    assert kit.turns.drafts.measure(replace(asked, start=start))["fits"]
    assert not kit.turns.drafts.measure(replace(asked, start=start - 2))["fits"]


def test_a_single_message_is_offered_to_be_left_out(kit: ChatKit) -> None:
    """A chat that begins with a summary has an answer first."""
    kit.backend.context_length = 2048
    _, summary, *rest = talk(2, 2000)
    offer = offers_of(kit, draft("y" * 3000, path=(summary, *rest)))["shorten"]
    assert offer["first"] == rest[0].id
    assert english(offer["label"]) == "Leave the oldest message out of the prompt"


def test_what_does_not_fit_by_itself_gets_no_offer(kit: ChatKit) -> None:
    asked = draft("y" * 20_000, path=talk(2, 100))
    measured = kit.turns.drafts.measure(asked)
    assert (measured["fits"], measured["offers"]) == (False, [])


def test_a_complete_plan_is_used_again_if_it_came_of_the_same(kit: ChatKit) -> None:
    clip = kit.attach(CLIP, kind="video")
    processor = kit.backend.media
    plan = processor.plan(kit.store.media.path(clip.digest), "video")
    assert plan.frame_indices is not None

    def again(known: Any, wanted: Any = plan) -> bool:
        files = [replace(clip, plan=plan), replace(clip, plan=known)]
        return completed(wanted, clip.digest, files, processor.video_processing) is known

    read = complete(plan)
    assert again(read)
    assert not again(read, replace(plan, similar_difference=4.0))
    assert not again(replace(read, digest=None, unit_digests=None))
    assert not again(replace(read, processing="another model"))
    assert not again(replace(read, size=(32, 32)))
    # Frames that could not be read are told of.
    size = processor.video_processing.temporal_patch_size
    kept = plan.frame_indices[:-2]
    fewer = plan.with_frames(kept, size, ["2 of 9 frames could not be decoded and are left out."])
    assert again(complete(fewer))
    assert not again(complete(plan.with_frames(kept, size)))
    note = "2 frames are left out: they show the same as those before them."
    thinner = replace(plan.with_frames(kept, size, [note]), similar_indices=plan.frame_indices[-2:])
    assert again(complete(thinner), replace(plan, similar_difference=4.0))
    assert not again(complete(thinner))
    assert not again(complete(plan), fewer)
    other = [replace(clip, digest="00" * 32, plan=read)]
    assert completed(plan, clip.digest, other, processor.video_processing) is plan
