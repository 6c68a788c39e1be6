"""Files that go out: media and thumbnails of one's own messages, exports, and what comes back by an import."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image, ImageOps

from qwen35mm.chat.quotas import STRANGERS
from qwen35mm.web.serving.examples import NUM_EXAMPLES
from qwen35mm_preprocess import MediaLimits
from tests.chat.chat_kit import CLIP, PICTURE
from tests.preprocess.media_files import encode_video, turned
from tests.web.serving.page_client import BOB, PageClient, problem

FOREVER = "private, max-age=31536000, immutable"


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    return PageClient(tmp_path)


async def attach(page: PageClient, data: bytes, name: str) -> dict[str, Any]:
    (attachment,) = (await page.upload(data, name)).json()["attachments"]
    return attachment


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PICTURE.read_bytes(), "image/png"),
        (CLIP.read_bytes(), "video/mp4"),
        (b"<html><script>alert(1)</script>", "application/octet-stream"),
        (b"<svg onload=alert(1)> that can't be drawn", "application/octet-stream"),
    ],
)
async def test_a_file_is_given_as_what_it_is_and_does_nothing(page: PageClient, data: bytes, kind: str) -> None:
    attachment = await attach(page, data, "a.html")
    response = await page.file(f"media/{attachment['digest']}")
    assert (response.status_code, response.content) == (200, data)
    assert response.headers["content-type"] == kind
    assert response.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == FOREVER


async def test_a_player_asks_for_a_part(page: PageClient) -> None:
    data = CLIP.read_bytes()
    url = f"media/{(await attach(page, data, 'a.mp4'))['digest']}"
    part = await page.request("GET", url, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(data)}"
    assert (await page.request("GET", url, headers={"range": "bytes=-5"})).content == data[-5:]
    assert (await page.request("GET", url, headers={"range": f"bytes={len(data)}-"})).status_code == 416
    assert (await page.request("GET", url, headers={"range": "bytes=x"})).status_code in (200, 400)


@pytest.mark.parametrize("route", ["media", "picture", "thumbnail"])
async def test_only_own_files_are_given(page: PageClient, route: str) -> None:
    attachment = await attach(page, PICTURE.read_bytes(), "a.png")
    url = f"{route}/{attachment['digest']}"
    assert (await page.request("GET", url, BOB)).status_code == 404
    assert (await page.file(url, BOB)).status_code == 404
    assert (await page.request("GET", url, "nobody")).status_code == 401
    assert (await page.request("GET", url, header=False)).status_code == 401
    for digest in ("0" * 64, "x", "%2e%2e%2fconversations.sqlite", attachment["digest"].upper()):
        assert (await page.request("GET", f"{route}/{digest}")).status_code == 404
    await page.ask("look", attachments=[attachment])
    assert (await page.request("GET", url, BOB)).status_code == 404
    assert (await page.request("GET", url)).status_code == 200
    page.store.media.delete(attachment["digest"])
    assert (await page.request("GET", url)).status_code == 404


@pytest.mark.parametrize("path", [PICTURE, CLIP])
async def test_a_thumbnail_is_a_small_jpeg(page: PageClient, path: Path) -> None:
    attachment = await attach(page, path.read_bytes(), path.name)
    response = await page.request("GET", f"thumbnail/{attachment['digest']}")
    assert (response.headers["content-type"], response.headers["cache-control"]) == ("image/jpeg", FOREVER)
    with Image.open(io.BytesIO(response.content)) as picture:
        assert (picture.format, max(picture.size) <= 640) == ("JPEG", True)


async def test_a_thumbnail_is_upright_and_flat(page: PageClient) -> None:
    lying = Image.new("RGB", (1600, 800), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    data = io.BytesIO()
    lying.save(data, "JPEG", exif=exif)
    clear = io.BytesIO()
    Image.new("RGBA", (10, 10), (0, 0, 0, 0)).save(clear, "PNG")
    clip = turned(encode_video([np.zeros((48, 64, 3), np.uint8)], codec="mpeg4"), (0, 1, -1, 0))
    sizes, corners = [], []
    for each in (data.getvalue(), clear.getvalue(), clip):
        digest = (await attach(page, each, "a"))["digest"]
        with Image.open(io.BytesIO((await page.request("GET", f"thumbnail/{digest}")).content)) as picture:
            sizes.append(picture.size)
            corners.append(picture.convert("RGB").getpixel((0, 0)))
    assert sizes == [(320, 640), (10, 10), (48, 64)]
    assert corners[1] == (255, 255, 255)


async def test_a_picture_is_given_as_every_browser_shows_it(page: PageClient) -> None:
    """The file itself, or where browsers don't show it, or not all of them upright, a JPEG of its own size."""
    lying, exif = Image.new("RGB", (900, 600), "red"), Image.Exif()
    exif[0x0112] = 6
    kinds = {"JPEG": ("image/jpeg", True), "PNG": ("image/jpeg", False), "TIFF": ("image/jpeg", False)}
    for kind, (media_type, is_same) in kinds.items():
        data = io.BytesIO()
        lying.save(data, kind, exif=exif)
        response = await page.request("GET", f"picture/{(await attach(page, data.getvalue(), 'a'))['digest']}")
        assert (response.headers["content-type"], response.headers["cache-control"]) == (media_type, FOREVER)
        assert (response.content == data.getvalue()) == is_same, kind
        with Image.open(io.BytesIO(response.content)) as picture:
            assert ImageOps.exif_transpose(picture).size == (600, 900), kind
    attachment = await attach(page, CLIP.read_bytes(), "a.mp4")
    response = await page.request("GET", f"picture/{attachment['digest']}")
    assert (response.status_code, problem(response)) == (400, "The picture can't be read.")


async def test_no_thumbnail_is_an_error_without_a_digest(page: PageClient) -> None:
    (attachment,) = (await page.upload(b"only words", "a.txt")).json()["attachments"]
    response = await page.request("GET", f"thumbnail/{attachment['digest']}")
    assert (response.status_code, problem(response)) == (400, "There is no picture of this file.")


async def test_pictures_are_made_within_the_programs_limits(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = []
    for size in ((90, 60), (9, 6)):
        data = io.BytesIO()
        Image.new("RGB", size).save(data, "TIFF")
        urls.append((await attach(page, data.getvalue(), "a.tif"))["digest"])
    media = replace(page.backend.media, limits=MediaLimits(max_source_pixels=1000))
    monkeypatch.setattr(page.backend, "media", media)
    for route in ("thumbnail", "picture"):
        found = [(await page.request("GET", f"{route}/{digest}")).status_code for digest in urls]
        assert found == [400, 200]


async def test_each_example_has_a_poster(page: PageClient) -> None:
    for number in range(NUM_EXAMPLES):
        response = await page.request("GET", f"poster/{number}", header=False)
        assert response.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(response.content)) as picture:
            assert (picture.format, max(picture.size) <= 640) == ("JPEG", True)
    assert (await page.request("GET", f"poster/{NUM_EXAMPLES}")).status_code == 404


async def test_conversations_go_out_and_come_back(page: PageClient) -> None:
    attachment = await attach(page, PICTURE.read_bytes(), "a.png")
    chat = await page.ask("look", attachments=[attachment])
    await page.ask("echo two")
    everything = await page.export()
    assert everything.headers["content-type"] == "application/zip"
    assert int(everything.headers["content-length"]) == len(everything.content)
    assert everything.headers["content-disposition"].startswith("attachment;")
    names = zipfile.ZipFile(io.BytesIO(everything.content)).namelist()
    assert len([name for name in names if name.startswith("conversations/")]) == 2
    one = await page.export(ids=chat["id"])
    imported = await page.request("POST", "import", BOB, content=one.content)
    (line,) = imported.json()["conversations"]
    assert (line["title"], line["id"] == chat["id"]) == ("look", False)
    theirs = (await page.call("open", BOB, conversation=line["id"])).json()
    assert [message["text"] for message in theirs["messages"]] == ["look", "1 image "]
    assert (await page.request("GET", f"media/{attachment['digest']}", BOB)).status_code == 200


async def test_a_conversation_goes_out_for_reading(page: PageClient) -> None:
    chat = await page.ask("echo Grüße")
    await page.call("rename", conversation=chat["id"], title='../a "b"\r\nSet-Cookie: x/Grüße')
    response = await page.export(ids=chat["id"], form="md")
    assert response.headers["content-type"] == "text/markdown; charset=utf-8"
    named = "attachment; filename*=UTF-8''.._a \"b\"Set-Cookie: x_Grüße.md"
    assert unquote(response.headers["content-disposition"]) == named
    assert "set-cookie" not in response.headers
    assert "echo Grüße" in response.text


async def test_nobody_exports_another_one_s_conversation(page: PageClient) -> None:
    chat = await page.ask("echo one")
    for params in ({"ids": chat["id"]}, {"ids": chat["id"], "form": "md"}, {"form": "md"}):
        assert (await page.export(BOB, **params)).status_code == 404
    nothing = await page.export(BOB)
    assert zipfile.ZipFile(io.BytesIO(nothing.content)).namelist() == []
    for params in ({}, {"code": "guess"}, {"ticket": page.people._tickets.of(BOB)}):
        assert (await page.request("GET", "export", BOB, params=params)).status_code == 404
    code = (await page.call("download")).json()["code"]
    answers = [await page.request("GET", "export", BOB, params={"code": code}) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 404], "a code is good for once"


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 cut off"])
async def test_what_is_no_archive_is_refused_in_words(page: PageClient, data: bytes) -> None:
    response = await page.request("POST", "import", content=data)
    assert (response.status_code, len(problem(response)) > 20) == (400, True)
    assert (await page.request("POST", "import", header=False, content=data)).status_code == 404
    assert (await page.call("list")).json()["conversations"] == []


def rewritten(archive: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """An export whose conversations were changed by hand."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(".json"):
                change(values := json.loads(data))
                data = json.dumps(values).encode()
            new.writestr(name, data)
    return stream.getvalue()


async def test_what_an_import_says_of_a_medium_is_checked(page: PageClient) -> None:
    attachment = await attach(page, PICTURE.read_bytes(), "a.png")
    chat = await page.ask("look", attachments=[attachment])
    archive = (await page.export(ids=chat["id"])).content

    async def refusal(*, file: dict[str, Any] | None = None, **plan: Any) -> str:
        def change(conversation: dict[str, Any]) -> None:
            (attached,) = conversation["messages"][0]["attachments"]
            attached |= file or {}
            attached["plan"] |= plan

        response = await page.request("POST", "import", BOB, content=rewritten(archive, change))
        assert response.status_code == 400
        assert attachment["digest"] not in problem(response)
        return problem(response)

    assert "'a.png'" in await refusal(size=[60_000, 60_000])
    assert "60,000" in (await refusal(source_size=[60_000, 60_000])).replace("60000", "60,000")
    assert "size in pixels" in await refusal(source_size=[960, 1280])
    assert "video" in await refusal(file={"kind": "video"})
    assert (await page.call("list", BOB)).json()["conversations"] == []

    # Another checkpoint's plan is none: what is made of the picture is decided here, anew.
    def foreign(conversation: dict[str, Any]) -> None:
        conversation["messages"][0]["attachments"][0]["plan"] |= {"processing": "0f" * 16, "size": [60_000, 60_000]}

    response = await page.request("POST", "import", BOB, content=rewritten(archive, foreign))
    (line,) = response.json()["conversations"]
    _, tree = page.store.read(page.owner(BOB), line["id"])
    assert [file.plan for node in tree.nodes.values() for file in node.attachments] == [None]


async def test_the_server_s_limits_hold_for_imports(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = await attach(page, PICTURE.read_bytes(), "a.png")
    await page.ask("look", attachments=[attachment])
    await page.ask("echo two")
    archive = (await page.export()).content

    async def refusal(**limits: int) -> str:
        monkeypatch.setattr(page.usage, "quotas", replace(STRANGERS, **limits))
        response = await page.request("POST", "import", BOB, content=archive)
        assert response.status_code in (400, 429)
        return problem(response)

    assert "the limit is" in await refusal(archive_bytes=len(archive) - 1)
    assert "2 new chats" in await refusal(conversations=1)
    assert "larger than the limit" in await refusal(conversation_bytes=100)
    smaller = replace(page.backend.media, limits=MediaLimits(max_image_bytes=1000))
    monkeypatch.setattr(page.backend, "media", smaller)
    assert "a.png" in await refusal()
    assert (await page.call("list", BOB)).json()["conversations"] == []
