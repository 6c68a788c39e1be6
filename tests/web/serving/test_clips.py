"""What a person chooses of a video: into the prompt, the store and archives, and back."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.chat.media import strips
from qwen35mm_preprocess import VideoClip
from tests.chat.chat_kit import PICTURE
from tests.preprocess.media_files import HOUR_SCENES_S, encode_video, hour_video, scene
from tests.web.serving.page_client import BOB, PageClient, problem
from tests.web.serving.test_files_routes import attach, rewritten

# Three seconds, fifteen frames each.
VIDEO = asset_path("samples") / "moves-right.mp4"
MOST_FRAMES = json.loads((demo_model_path() / "video_preprocessor_config.json").read_text())["max_frames"]
CLIP = {"start_s": 0.4, "end_s": 1.4, "num_frames": 4, "drop_similar": False}


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    return PageClient(tmp_path)


async def test_a_chosen_part_is_counted_sent_kept_edited_and_answered_again(page: PageClient) -> None:
    page.backend.completes_plans = True
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    costs = [
        (await page.call("measure", text="look", attachments=[{**video, "clip": clip}])).json()["media"][0][
            "num_tokens"
        ]
        for clip in (None, CLIP, {**CLIP, "num_frames": 2})
    ]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == 3
    chat = await page.ask("look", attachments=[{**video, "clip": CLIP}])
    question, _ = chat["messages"]
    (part,) = page.backend.calls[-1].messages[-1].media
    assert (part.plan.frame_times_s[0], part.plan.frame_times_s[-1], len(part.plan.frame_times_s)) == (0.4, 1.4, 4)
    # The page has it for a change of the message; without it all of the video is shown again.
    (shown,) = question["attachments"]
    assert shown["clip"] == CLIP
    await page.ask("again", conversation=chat["id"], parent=None, attachments=[{**shown, "clip": None}])
    whole = page.backend.calls[-1].messages[-1].media[0].plan
    assert whole.frame_times_s[0] == 0
    # With it the message keeps the plan by which it was read.
    await page.ask("once more", conversation=chat["id"], parent=None, attachments=[shown])
    assert page.backend.calls[-1].messages[-1].media[0].plan.frame_times_s == part.plan.frame_times_s
    assert page.backend.calls[-1].messages[-1].media[0].plan.digest is not None


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"start_s": -1}, "clip"),
        ({"start_s": 2, "end_s": 1}, "clip"),
        ({"num_frames": 0}, "clip"),
        ({"num_frames": "4"}, "clip"),
        ({"other": 4}, "clip"),
        ({"start_s": 99.0}, "'a.mp4' is 3.0 seconds long; the part from 99.0 seconds on isn't in it"),
    ],
)
async def test_a_part_that_is_not_there_is_refused_in_words(page: PageClient, clip: Any, words: str) -> None:
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    response = await page.call("send", text="look", attachments=[{**video, "clip": clip}])
    assert response.status_code == 400
    assert words in problem(response)


async def test_a_chosen_part_comes_back_from_an_archive_and_is_checked(page: PageClient) -> None:
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    await page.ask("look", attachments=[{**video, "clip": CLIP}])
    archive = (await page.export()).content
    (line,) = (await page.request("POST", "import", BOB, content=archive)).json()["conversations"]
    chat = (await page.call("open", BOB, conversation=line["id"])).json()
    assert chat["messages"][0]["attachments"][0]["clip"] == CLIP

    async def refusal(clip: dict[str, Any]) -> str:
        def change(conversation: dict[str, Any]) -> None:
            conversation["messages"][0]["attachments"][0]["clip"] |= clip

        response = await page.request("POST", "import", BOB, content=rewritten(archive, change))
        assert response.status_code == 400
        return problem(response)

    assert "isn't in it" in await refusal({"start_s": 50.0, "end_s": 60.0})
    assert "outside the chosen part" in await refusal({"start_s": 1.0})
    assert "clip" in await refusal({"num_frames": -1})


async def test_a_part_is_planned_anew_for_another_checkpoint(page: PageClient) -> None:
    """Its plan is left out of an import, and what was chosen is not."""
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    await page.ask("look", attachments=[{**video, "clip": CLIP}])

    def foreign(conversation: dict[str, Any]) -> None:
        conversation["messages"][0]["attachments"][0]["plan"]["processing"] = "0f" * 16

    archive = (await page.export()).content
    response = await page.request("POST", "import", BOB, content=rewritten(archive, foreign))
    (line,) = response.json()["conversations"]
    question = (await page.call("open", BOB, conversation=line["id"])).json()["messages"][0]
    await page.call("again", BOB, conversation=line["id"], node=question["id"])
    await page.watch((await page.call("open", BOB, conversation=line["id"])).json()["messages"][1]["id"], BOB)
    (part,) = page.backend.calls[-1].messages[-1].media
    assert part.plan is None
    plan = page.backend.media.plan(part.source, "video", part.clip)
    assert plan.frame_times_s is not None
    assert (plan.frame_times_s[0], plan.frame_times_s[-1], len(plan.frame_times_s)) == (0.4, 1.4, 4)


def times(strip: dict[str, Any], *, kept: bool = True) -> list[float]:
    return [frame["time_s"] for frame in strip["frames"] if frame["is_kept"] == kept]


async def test_a_strip_is_what_the_model_is_shown(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = strips.sampled_frames

    def counting(*args: Any) -> Any:
        for frame in real(*args):
            decoded.append(1)
            yield frame

    monkeypatch.setattr(strips, "sampled_frames", counting)
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    before = (await page.call("strip", attachments=[{**video, "clip": CLIP}])).json()
    assert (len(before["frames"]), before["duration_s"], before["most"]) == (4, 3.0, MOST_FRAMES)
    chat = await page.ask("look", attachments=[{**video, "clip": CLIP}])
    question = chat["messages"][0]["id"]
    after = (await page.call("shown_strip", conversation=chat["id"], node=question, at=0)).json()
    assert after == before
    assert len(decoded) == 4, "nothing is decoded twice"
    plan = page.backend.calls[-1].messages[-1].media[0].plan
    assert times(after) == list(plan.frame_times_s)
    media = page.backend.media
    path = page.store.media.path(video["digest"])
    for shown, frame in zip(after["frames"], real(path, plan, media.video_processing, media.limits, 4.0), strict=True):
        kind, data = shown["picture"].split(",", 1)
        assert kind == "data:image/jpeg;base64"
        picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        wanted = Image.fromarray(frame.pixels)
        wanted.thumbnail(picture.size)
        assert picture.size == wanted.size
        assert np.abs(np.asarray(picture).astype(int) - np.asarray(wanted)).mean() < 6
    # As the settings say, without a choice.
    fewer = (await page.call("strip", settings={"max_frames": 3}, attachments=[video])).json()
    assert len(fewer["frames"]) == 3


async def test_frames_that_are_left_out_are_the_same_before_and_after(
    page: PageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = encode_video([scene(i // 16) for i in range(32)], fps=4)
    video = await attach(page, still, "still.mp4")
    clip = {"start_s": 0.0, "end_s": None, "num_frames": 8, "drop_similar": True}
    before = (await page.call("strip", attachments=[{**video, "clip": clip}])).json()
    assert times(before, kept=False)
    # Those that would be are known without that, and nothing is read again for it.
    monkeypatch.setattr(strips, "sampled_frames", None)
    every = (await page.call("strip", attachments=[{**video, "clip": {**clip, "drop_similar": False}}])).json()
    assert [frame["time_s"] for frame in every["frames"] if frame["is_same"]] == times(before, kept=False)
    assert times(every) == sorted(times(before) + times(before, kept=False))
    media = page.backend.media
    path = page.store.media.path(video["digest"])
    # The fake reads nothing: what a model in this process would be given.
    plan = media.prepare(path, clip=VideoClip(**clip)).plan
    assert times(before) == list(plan.frame_times_s or ())
    chat = await page.ask("look", attachments=[{**video, "clip": clip}])
    owner, question = page.owner(), chat["messages"][0]["id"]
    node = page.store.read(owner, chat["id"])[1].nodes[question]
    read = replace(node, attachments=(replace(node.attachments[0], plan=plan),))
    page.store.update(owner, read)
    after = (await page.call("shown_strip", conversation=chat["id"], node=question, at=0)).json()
    assert (times(after), times(after, kept=False)) == (times(before), times(before, kept=False))


async def test_nobody_sees_frames_of_another_s_video(page: PageClient) -> None:
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    chat = await page.ask("look", attachments=[video])
    question = chat["messages"][0]["id"]
    assert (await page.call("strip", BOB, attachments=[video])).status_code == 404
    shown = {"conversation": chat["id"], "node": question}
    assert (await page.call("shown_strip", BOB, **shown, at=0)).status_code == 404
    for at in (1, -1, 10**9):
        assert (await page.call("shown_strip", **shown, at=at)).status_code == 404
    picture = await attach(page, PICTURE.read_bytes(), "a.png")
    for files in ([picture], []):
        assert (await page.call("strip", attachments=files)).status_code == 400


async def test_a_strip_ends_with_its_asker_and_its_time(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    monkeypatch.setattr(strips, "MAX_STRIP_S", 0.0)
    response = await page.call("strip", attachments=[video])
    assert response.status_code == 400
    assert problem(response).startswith("The frames of 'a.mp4' take too long to show")
    hour = await attach(page, hour_video(), "hour.mp4")
    response = await page.call("chapters", attachments=[hour])
    assert problem(response).startswith("The frames of 'hour.mp4' take too long to show")
    monkeypatch.undo()
    left, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def endless(_path: Any, _plan: Any, _processing: Any, _limits: Any, _difference: Any, progress: Any) -> Any:
        loop.call_soon_threadsafe(left.set)
        try:
            while True:
                progress(1, 2)
                time.sleep(0.001)
        finally:
            ended.set()
        yield

    monkeypatch.setattr(strips, "sampled_frames", endless)
    body = json.dumps({"attachments": [video]}).encode()
    await page.send_body("api/strip", [body], cut=False, left=left)
    assert await asyncio.to_thread(ended.wait, 60)


async def test_an_hour_has_chapters_which_are_found_once(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    video = await attach(page, hour_video(), "hour.mp4")
    (medium,) = (await page.call("measure", text="look", attachments=[video])).json()["media"]
    assert 3600 / MOST_FRAMES <= medium["step_s"] < 3600 / (MOST_FRAMES - 1)
    found = (await page.call("chapters", attachments=[video])).json()
    assert [each["start_s"] for each in found["chapters"]] == pytest.approx(HOUR_SCENES_S, abs=15)
    monkeypatch.setattr(strips, "find_chapters", None)
    assert (await page.call("chapters", attachments=[video])).json() == found
    assert (await page.call("chapters", BOB, attachments=[video])).status_code == 404
    picture = await attach(page, PICTURE.read_bytes(), "a.png")
    assert (await page.call("chapters", attachments=[picture])).status_code == 400


async def test_a_few_strips_are_kept(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    monkeypatch.setattr(strips, "MAX_KEPT_BYTES", 1)
    made: list[int] = []
    real = strips.sampled_frames
    monkeypatch.setattr(strips, "sampled_frames", lambda *args: made.append(1) or real(*args))
    for num_frames in (4, 4, 3, 4):
        clip = {**CLIP, "num_frames": num_frames}
        assert (await page.call("strip", attachments=[{**video, "clip": clip}])).status_code == 200
    assert len(made) == 3
