"""What a person chooses of a video: into the prompt, the store and archives, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from tests.web.serving.page_client import BOB, PageClient, problem
from tests.web.serving.test_files_routes import attach, rewritten

# Three seconds, fifteen frames each.
VIDEO = asset_path("samples") / "moves-right.mp4"
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
    archive = (await page.request("GET", "export")).content
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
    assert "outside of the part" in await refusal({"start_s": 1.0})
    assert "clip" in await refusal({"num_frames": -1})


async def test_a_part_is_planned_anew_for_another_checkpoint(page: PageClient) -> None:
    """Its plan is left out of an import, and what was chosen is not."""
    video = await attach(page, VIDEO.read_bytes(), "a.mp4")
    await page.ask("look", attachments=[{**video, "clip": CLIP}])

    def foreign(conversation: dict[str, Any]) -> None:
        conversation["messages"][0]["attachments"][0]["plan"]["processing"] = "0f" * 16

    archive = (await page.request("GET", "export")).content
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
