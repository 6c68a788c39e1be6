"""Parts of pictures and of videos' frames: cut out in full resolution, sent, kept, and linked to their source."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.chat.chat_kit import CLIP, PICTURE
from tests.preprocess.media_files import encode_image, encode_video, scene, scene_index, turned
from tests.web.serving.page_client import ANN, BOB, PageClient, problem
from tests.web.serving.test_files_routes import FOREVER, attach, rewritten

RIGHT_LOWER = [0.5, 0.5, 1.0, 1.0]


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    return PageClient(tmp_path)


async def crop(page: PageClient, source: dict[str, Any], box: list[float], token: str = ANN, **how: Any) -> Any:
    """What the request for a part of a file answers."""
    named = {"digest": source["digest"], "source": source["name"], "name": "part"}
    return await page.call("crop", token, **{**named, "box": box, **how})


async def pixels(page: PageClient, attachment: dict[str, Any]) -> np.ndarray:
    return decoded((await page.request("GET", f"media/{attachment['digest']}")).content)


def decoded(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.array(picture.convert("RGB"))


async def test_a_part_has_the_pixels_of_its_place(page: PageClient) -> None:
    whole = Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 60, 3), np.uint8), "RGB")
    for kind in ("PNG", "TIFF"):
        source = await attach(page, encode_image(whole, kind), "a")
        (part,) = (await crop(page, source, [0.25, 0.5, 0.51, 1.0])).json().values()
        # All pixels that are touched.
        assert part["crop_of"] == {
            "digest": source["digest"],
            "name": "a",
            "box": [15, 20, 31, 41],
            "size": [41, 60],
            "time_s": None,
        }
        assert (part["kind"], part["name"]) == ("image", "part")
        assert np.array_equal(await pixels(page, part), np.array(whole)[20:41, 15:31])
    (least,) = (await crop(page, source, [0.999, 0.0, 1.0, 1e-9])).json().values()
    assert least["crop_of"]["box"] == [59, 0, 60, 1]


async def test_a_part_of_a_turned_picture_or_video_is_where_it_is_seen(page: PageClient) -> None:
    lying, exif = Image.new("RGB", (80, 40), "blue"), Image.Exif()
    lying.paste("red", (0, 0, 40, 20))
    exif[0x0112] = 6
    source = await attach(page, encode_image(lying, "JPEG", exif=exif), "a.jpg")
    # Turned clockwise, its upper left is seen at the upper right.
    (part,) = (await crop(page, source, [0.6, 0.0, 1.0, 0.4])).json().values()
    assert part["crop_of"]["size"] == [80, 40]
    red, green, blue = (await pixels(page, part)).mean(axis=(0, 1))
    assert red > 200 > 50 > max(green, blue)
    clip = await attach(page, turned(encode_video([scene(0)]), (0, 1, -1, 0)), "a.mp4")
    (part,) = (await crop(page, clip, RIGHT_LOWER)).json().values()
    assert (part["crop_of"]["size"], part["crop_of"]["box"]) == ([64, 48], [24, 32, 48, 64])


async def test_a_part_of_a_video_is_of_the_frame_on_the_screen(page: PageClient) -> None:
    clip = await attach(page, encode_video([scene(index) for index in range(30)], options={"g": "8"}), "a.mp4")
    for time_s, own_s in ((0, 0.0), (1.25, 1.2), (1.2999, 1.3), (99, 2.9)):
        (part,) = (await crop(page, clip, [0.0, 0.0, 1.0, 1.0], time_s=time_s)).json().values()
        assert part["crop_of"]["time_s"] == pytest.approx(own_s)
        assert scene_index(await pixels(page, part)) == round(10 * own_s)
        shown = await page.request("GET", f"frame/{clip['digest']}", params={"time_s": time_s})
        assert (shown.headers["content-type"], shown.headers["cache-control"]) == ("image/jpeg", FOREVER)
        assert scene_index(decoded(shown.content)) == round(10 * own_s)
    bad = await page.request("GET", f"frame/{clip['digest']}", params={"time_s": "soon"})
    assert (bad.status_code, problem(bad)) == (400, "A frame's time is a number of seconds.")


@pytest.mark.parametrize("box", [[0.5, 0, 0.5, 1], [0, 0, 1.01, 1], [-0.1, 0, 1, 1], [0, 0, 1], [0.9, 0, 0.1, 1]])
async def test_what_is_no_part_is_refused_in_words(page: PageClient, box: list[float]) -> None:
    response = await crop(page, await attach(page, PICTURE.read_bytes(), "a.png"), box)
    assert response.status_code == 400
    assert "four numbers from 0 to 1" in problem(response)


async def test_a_part_is_sent_kept_exported_and_linked_only_to_ones_own(page: PageClient) -> None:
    source = await attach(page, CLIP.read_bytes(), "a.mp4")
    assert (await crop(page, source, RIGHT_LOWER, BOB)).status_code == 404
    assert (await page.request("GET", f"frame/{source['digest']}", BOB)).status_code == 404
    (part,) = (await crop(page, source, RIGHT_LOWER, time_s=1.0)).json().values()
    chat = await page.ask("look", attachments=[part])
    (sent,) = chat["messages"][0]["attachments"]
    assert sent["crop_of"] == part["crop_of"]
    assert [type(each).__name__ for each in page.backend.calls[-1].messages[-1].media] == ["Image"]
    archive = (await page.export()).content
    (line,) = (await page.request("POST", "import", BOB, content=archive)).json()["conversations"]
    (theirs,) = (await page.call("open", BOB, conversation=line["id"])).json()["messages"][0]["attachments"]
    assert theirs["crop_of"] == part["crop_of"]
    # The link opens nothing, and is left out of what they send.
    assert (await page.request("GET", f"thumbnail/{source['digest']}", BOB)).status_code == 404
    again = await page.ask("look", BOB, attachments=[theirs])
    assert again["messages"][0]["attachments"][0]["crop_of"] is None
    wrong = {**part, "crop_of": {**part["crop_of"], "box": [0, 0, 10**6, 1]}}
    response = await page.call("send", text="look", attachments=[wrong])
    assert (response.status_code, "crop_of" in problem(response)) == (400, True)

    def of_a_video(conversation: dict[str, Any]) -> None:
        conversation["messages"][0]["attachments"][0]["kind"] = "video"

    response = await page.request("POST", "import", content=rewritten(archive, of_a_video))
    assert "damaged" in problem(response)


async def test_parts_count_as_files(page: PageClient) -> None:
    source = await attach(page, PICTURE.read_bytes(), "a.png")
    page.usage.quotas = replace(page.usage.quotas, uploads=2)
    assert (await crop(page, source, RIGHT_LOWER)).status_code == 200
    refused = await crop(page, source, [0.0, 0.0, 0.5, 0.5])
    assert (refused.status_code, "2 of your files are in no message yet" in problem(refused)) == (429, True)
    page.usage.quotas = replace(page.usage.quotas, uploads=9, num_bytes=PICTURE.stat().st_size + 100)
    assert (await crop(page, source, [0.0, 0.0, 0.5, 0.5])).status_code == 429
