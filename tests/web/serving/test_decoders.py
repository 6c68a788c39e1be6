"""What strangers put on a page is decoded in processes of their own: what a file does to one, nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image as Pictures

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cli.chat import open_page
from qwen35mm.contract import GenerationRequest, Image, Message, Text
from qwen35mm.decoding import Decoders, DecodingProcessor
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.settings import ModelOptions, PageOptions
from tests import hostile_decoder
from tests.chat.chat_kit import CLIP, PICTURE
from tests.preprocess.media_files import encode_image
from tests.web.serving.page_client import BOB, PageClient, problem
from tests.web.serving.test_crops import crop
from tests.web.serving.test_files_routes import attach

STUCK, CRASH = hostile_decoder.STUCK, hostile_decoder.CRASH


@pytest.fixture
def page(tmp_path: Path, decoders: Decoders) -> PageClient:
    page = PageClient(tmp_path)
    page.backend.media = DecodingProcessor.of(page.backend.media, decoders)
    return page


async def until(holds: Callable[[], object]) -> None:
    limit_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit_s
        await asyncio.sleep(0.01)


async def use(page: PageClient) -> None:
    """All that another person does with files."""
    picture, video = await attach_for(page, PICTURE.read_bytes()), await attach_for(page, CLIP.read_bytes())
    assert (picture["kind"], video["kind"]) == ("image", "video")
    for path in (f"thumbnail/{picture['digest']}", f"frame/{video['digest']}?time_s=0.5", "poster/0"):
        assert (await page.request("GET", path, BOB)).headers["content-type"] == "image/jpeg"
    tiff = await attach_for(page, encode_image(Pictures.new("RGB", (40, 30)), "TIFF"))
    assert (await page.request("GET", f"picture/{tiff['digest']}", BOB)).headers["content-type"] == "image/jpeg"
    (part,) = (await crop(page, picture, [0.25, 0.25, 0.75, 0.75], BOB)).json().values()
    assert len((await page.call("strip", BOB, attachments=[video])).json()["frames"]) > 1
    chat = await page.ask("look", BOB, attachments=[picture, video, part])
    assert "2 images, 1 video" in chat["messages"][-1]["text"]


async def attach_for(page: PageClient, data: bytes) -> dict[str, object]:
    (attachment,) = (await page.upload(data, "a", BOB)).json()["attachments"]
    return attachment


async def test_everybody_else_goes_on_beside_a_decoder_that_never_ends(page: PageClient, decoders: Decoders) -> None:
    left = asyncio.Event()
    upload = asyncio.create_task(
        page.send_body("upload?name=a.png", [PICTURE.read_bytes() + STUCK], cut=False, left=left)
    )
    await until(lambda: decoders._state.busy)
    (stuck,) = decoders._state.busy
    await use(page)
    assert stuck in decoders._state.busy
    # A page that is closed ends it.
    left.set()
    await upload
    await until(lambda: stuck not in decoders._state.busy)
    assert stuck._child.poll() is not None


# What else it may do is tried at the server, with the same decoders.
@pytest.mark.parametrize(
    "what",
    [CRASH, *(pytest.param(each, marks=pytest.mark.slow) for each in (hostile_decoder.NONSENSE, hostile_decoder.BOMB))],
)
async def test_what_a_file_does_is_told_to_who_sent_it(page: PageClient, what: bytes) -> None:
    bad = await page.upload(PICTURE.read_bytes() + what, "photo.png")
    words = "takes more memory" if what == hostile_decoder.BOMB else "The decoder broke down over 'photo.png'"
    assert (bad.status_code, words in problem(bad)) == (400, True)


async def test_a_file_that_turns_hostile_later_hurts_no_request(page: PageClient, decoders: Decoders) -> None:
    """As with a newer decoder: it was taken once."""
    for data, what, words in ((PICTURE.read_bytes(), CRASH, "broke down"), (CLIP.read_bytes(), STUCK, "took too long")):
        file = await attach(page, data, "a")
        page.store.media.path(file["digest"]).write_bytes(data + what)
        if file["kind"] == "video":
            decoders._timeout_s = 0.2
            asked = [page.call("strip", attachments=[file]), page.request("GET", f"frame/{file['digest']}?time_s=0")]
        else:
            asked = [page.request("GET", f"{shown}/{file['digest']}") for shown in ("thumbnail", "picture")]
            asked.append(crop(page, file, [0.0, 0.0, 0.5, 0.5]))
            measured = await page.call("measure", attachments=[file])
            assert words in str(measured.json()["media"][0]["error"])
        for each in await asyncio.gather(*asked):
            assert (each.status_code, words in problem(each)) == (400, True)


async def test_who_stops_an_answer_ends_the_reading_of_its_media(demo: LoadedModel, decoders: Decoders) -> None:
    backend = LocalBackend(demo, settings=EngineSettings(slots=2), decoders=decoders)

    async def ask(data: bytes) -> str:
        text = ""
        async for event in backend.stream(GenerationRequest([Message("user", (Image(data), Text("What is this?")))])):
            text = event.result.text if hasattr(event, "result") else text  # type: ignore
        return text

    try:
        asking = asyncio.create_task(ask(PICTURE.read_bytes() + STUCK))
        await until(lambda: decoders._state.busy)
        (stuck,) = decoders._state.busy
        assert await ask(PICTURE.read_bytes())
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: stuck not in decoders._state.busy)
        assert stuck._child.poll() is not None
    finally:
        backend.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_page_decodes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with open_page(ModelOptions(device="cpu"), PageOptions(host=host)) as (backend, _):
        assert isinstance(backend.media, DecodingProcessor)
        assert backend.media.plan(PICTURE) == backend.media.direct.plan(PICTURE)
        assert backend.media.decoders._limits == backend.media.limits
        (started, _) = backend.media.decoders._state.idle[0]
    assert started._child.poll() is not None
