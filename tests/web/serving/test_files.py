"""Uploads: what a file is, is known by its content; what can't be used is refused in words and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat.documents import documents
from qwen35mm.pools import UPLOADS
from qwen35mm.web.serving import files as files_module
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import CLIP, PICTURE
from tests.chat.documents.test_documents import pages_pdf, words
from tests.chat.helpers import files_in
from tests.web.serving.page_client import ANN, BOB, PageClient, problem


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PageClient:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return PageClient(tmp_path / "chats")


def stored(page: PageClient) -> list[str]:
    """Digests of all files, after those that nobody holds were deleted."""
    page.store.media.collect_garbage(0.0)
    return files_in(page.store.media.path("0" * 64).parent.parent)


def leftovers(folder: Path) -> list[Path]:
    return [*folder.glob("chats/media/.writing-*"), *folder.glob("temporary/*")]


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        (PICTURE.read_bytes(), "a.txt", "image"),
        (CLIP.read_bytes(), "a.png", "video"),
        (b"plain words\n", "a.png", "text"),
        ("Grüße\r\n".encode("utf-16"), "a", "text"),
        (pages_pdf([words("Hello"), words("world")]), "a.jpg", "text"),
    ],
)
async def test_a_file_is_what_its_content_is(page: PageClient, data: bytes, name: str, kind: str) -> None:
    response = await page.upload(data, name)
    assert response.status_code == 200
    (attachment,) = response.json()["attachments"]
    assert (attachment["kind"], attachment["name"]) == (kind, name)
    chat = await page.ask("look", attachments=[attachment])
    assert chat["messages"][0]["attachments"][0]["name"] == name


async def test_a_drawing_is_a_picture_and_its_source_a_text_at_wish(page: PageClient) -> None:
    source = b"<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'><rect width='9' height='9'/></svg>"
    (picture,) = (await page.upload(source, "a.svg")).json()["attachments"]
    assert (picture["kind"], picture["name"]) == ("image", "a.png")
    chat = await page.ask("look", attachments=[picture])
    assert "1 image" in chat["messages"][-1]["text"]
    assert chat["messages"][0]["attachments"][0]["size"] == [256, 512]
    recode = f"recode?digest={picture['svg']}&name=a.svg&encoding=UTF-8"
    (text,) = (await page.request("POST", recode)).json()["attachments"]
    assert (text["kind"], text["name"], text["encoding"]) == ("text", "a.svg", "UTF-8")
    # What can't be drawn is a text, with the reason.
    taken = (await page.upload(b"<svg><g>", "b.svg")).json()
    assert [each["kind"] for each in taken["attachments"]] == ["text"]
    assert english(taken["note"]) == "'b.svg' can't be drawn: it is damaged, or empty."


async def test_text_is_kept_as_plain_utf_8(page: PageClient) -> None:
    (attachment,) = (await page.upload("Grüße\r\n".encode("utf-16"), "a.txt")).json()["attachments"]
    with page.store.media.open(attachment["digest"]) as file:
        assert file.read() == "Grüße\n".encode()
    # The original isn't needed any more.
    assert stored(page) == [attachment["digest"]]
    (plain,) = (await page.upload(b"plain\n", "b.txt")).json()["attachments"]
    assert stored(page) == sorted([attachment["digest"], plain["digest"]])


async def test_a_text_can_be_read_in_another_encoding_by_who_sent_it(page: PageClient) -> None:
    words_of = "лм брй, дагн\n"
    (taken,) = (await page.upload(words_of.encode("cp1251"), "a.txt")).json()["attachments"]
    assert taken["encoding"] == "Windows-1251"
    assert stored(page) == sorted([taken["digest"], taken["raw"]])
    params = {"digest": taken["raw"], "name": "a.txt", "encoding": "Windows-1255"}
    (other,) = (await page.request("POST", "recode", params=params)).json()["attachments"]
    assert (other["kind"], other["encoding"], other["raw"]) == ("text", "Windows-1255", taken["raw"])
    with page.store.media.open(other["digest"]) as file:
        assert file.read().decode() == words_of.encode("cp1251").decode("cp1255")
    for encoding in ("UTF-8", "punycode", ""):
        response = await page.request("POST", "recode", params={**params, "encoding": encoding})
        assert (response.status_code, "Choose another encoding" in problem(response)) == (400, True)
    assert (await page.request("POST", "recode", BOB, params=params)).status_code == 404
    assert (await page.request("POST", "recode", header=False, params=params)).status_code == 404


async def test_a_text_has_a_preview(page: PageClient) -> None:
    (taken,) = (await page.upload(b"a;b\n1;2\n", "t.csv")).json()["attachments"]
    assert taken["form"] == "table"
    asked = {"digest": taken["digest"], "name": "t.csv"}
    found = (await page.call("preview", **asked)).json()
    assert found == {"rows": [["a", "b"], ["1", "2"]], "html": None, "more": False}
    assert (await page.call("preview", token=BOB, **asked)).status_code == 404


async def test_a_pdf_is_its_text_or_its_pages(page: PageClient) -> None:
    (text,) = (await page.upload(pages_pdf([words("Hello"), b""]), "paper.pdf")).json()["attachments"]
    assert (text["kind"], text["num_pages"]) == ("text", 2)
    with page.store.media.open(text["digest"]) as file:
        assert file.read() == b"[page 1]\nHello\n\n[page 2]\n"
    params = {"digest": text["pdf"], "name": "paper.pdf"}
    pages = (await page.request("POST", "pages", params=params)).json()
    assert [each["name"] for each in pages["attachments"]] == ["paper, page 1.png", "paper, page 2.png"]
    assert {each["kind"] for each in pages["attachments"]} == {"image"}
    assert pages["note"] is None
    assert (await page.request("POST", "pages", BOB, params=params)).status_code == 404
    assert (await page.request("POST", "pages", header=False, params=params)).status_code == 404


@pytest.mark.parametrize(("num_pages", "num_taken"), [(3, 3), (5, 3)])
async def test_a_scan_is_its_first_pages(
    page: PageClient, monkeypatch: pytest.MonkeyPatch, num_pages: int, num_taken: int
) -> None:
    monkeypatch.setattr(files_module, "MAX_PAGE_PICTURES", 3)
    found = (await page.upload(pages_pdf([b""] * num_pages), "scan.pdf")).json()
    assert [each["name"] for each in found["attachments"]] == [f"scan, page {n + 1}.png" for n in range(num_taken)]
    note = f"Only 3 of {num_pages} pages are used." if num_pages > 3 else None
    assert (found["note"] and english(found["note"])) == note
    measured = (await page.call("measure", text="x", attachments=found["attachments"])).json()
    assert [view["error"] for view in measured["media"]] == [None] * num_taken


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01\x02\x03" * 50,
        b"\x89PNG\r\n\x1a\n"[:5],
        b"%PDF-1.7\n and no more",
        b"x" * (4 * 2**20 + 1),
    ],
)
async def test_what_can_t_be_used_is_refused_by_its_name(page: PageClient, tmp_path: Path, data: bytes) -> None:
    response = await page.upload(data, "my file.bin")
    assert response.status_code == 400
    assert "my file.bin" in problem(response)
    assert str(tmp_path) not in problem(response)
    assert not any(len(word.strip("'\".")) == 64 for word in problem(response).split())
    assert (stored(page), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\ann\\a.txt", "a.txt"),
        ("a\x00b\r\n\x7fc.txt", "abc.txt"),
        ("\u202etxt.exe\u2066", "txt.exe"),
        ("", "file"),
        ("x" * 500 + ".txt", "x" * 116 + ".txt"),
    ],
)
async def test_a_name_is_only_shown(page: PageClient, name: str, shown: str) -> None:
    (attachment,) = (await page.upload(b"words", name)).json()["attachments"]
    assert attachment["name"] == shown


async def test_who_may_not_upload(page: PageClient) -> None:
    assert (await page.upload(b"words", "a.txt", token="nobody")).status_code == 401
    assert (await page.request("POST", "upload", header=False, content=b"words")).status_code == 404
    assert stored(page) == []


@pytest.mark.parametrize("declared", [True, False])
async def test_a_file_that_is_too_large(
    page: PageClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    limits = MediaLimits(max_image_bytes=1000, max_video_bytes=2 * 2**20)
    monkeypatch.setattr(page.backend, "media", replace(page.backend.media, limits=limits))
    if declared:
        response = await page.upload(b"x" * (2 * 2**20 + 1), "large.mp4")
        status, message = response.status_code, problem(response)
    else:
        start, body = await page.send_body("upload?name=large.mp4", [b"x" * 2**20] * 3, cut=False)
        status, message = start["status"], english(json.loads(body["body"])["error"]["message"])
    assert (status, message) == (400, "'large.mp4' is too large: the limit is 2 MiB.")
    assert (stored(page), leftovers(tmp_path)) == ([], [])
    response = await page.request("POST", "upload", content=b"words", headers={"content-length": "9" * 30})
    assert response.status_code == 400


async def test_an_upload_that_is_cut_off_leaves_nothing(page: PageClient, tmp_path: Path) -> None:
    num_threads = 4
    for path in ("upload?name=a.png", "import"):
        start, body = await page.send_body(path, [b"x" * 70_000] * 20, cut=True)
        assert start["status"] == 400
        assert english(json.loads(body["body"])["error"]["message"]) == "The connection was lost."
    assert (stored(page), leftovers(tmp_path)) == ([], [])
    # None waits for the rest: all of them can be had.
    ready = threading.Barrier(num_threads)
    await asyncio.gather(*(UPLOADS.run(ready.wait, 60) for _ in range(num_threads)))


async def test_slow_uploads_hold_nobody_up(page: PageClient) -> None:
    """More of them than there are threads: none is taken while nothing comes."""
    begun = [asyncio.Event() for _ in range(64)]
    slow = [
        asyncio.create_task(page.send_body("upload?name=a.png", [b"x" * 9], cut=None, begun=event)) for event in begun
    ]
    for event in begun:
        await event.wait()
    assert (await page.call("list")).status_code == 200
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_slow_pdfs_hold_nobody_up(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads in any pool: answers are written, pictures shown, and others' PDFs read."""
    ended = threading.Event()
    begun: list[str] = []

    def read(*_: Any, name: str, **how: Any) -> tuple[str, ...]:
        begun.append(name)
        if name != "quick":
            ended.wait()
        return ("text",)

    monkeypatch.setattr(files_module, "read_pdf_text", read)
    # Another cookie is no other person.
    cookies = [ANN, "c" * 32]
    slow = [asyncio.create_task(page.upload(b"%%PDF-%d" % n, f"{n}", cookies[n % 2])) for n in range(40)]
    try:
        while not begun:
            await asyncio.sleep(0.01)
        (picture,) = (await page.upload(PICTURE.read_bytes(), "a.png", BOB)).json()["attachments"]
        chat = await page.ask("look", BOB, attachments=[picture])
        assert chat["messages"][1]["status"] == "finished"
        assert (await page.request("GET", f"thumbnail/{picture['digest']}", BOB)).status_code == 200
        assert (await page.call("list", BOB, query="look")).json()["conversations"]
        assert (await page.upload(b"%PDF-", "quick", BOB, address="198.51.100.7")).status_code == 200
        # One person's are read one after the other.
        assert len(begun) == 2
    finally:
        ended.set()
        responses = await asyncio.gather(*slow)
    assert {response.status_code for response in responses} == {200}


async def test_a_pdf_ends_with_its_asker(page: PageClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker := tmp_path / "worker.py").write_text(
        f"import time\nopen({str(tmp_path / 'began')!r}, 'w').close()\ntime.sleep(3600)"
    )
    monkeypatch.setattr(documents, "_WORKER", worker)
    started: list[Any] = []
    real = subprocess.Popen
    monkeypatch.setattr(documents.subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    left = asyncio.Event()
    asking = asyncio.create_task(page.send_body("upload?name=a.pdf", [b"%PDF-"], cut=False, left=left))
    while not (tmp_path / "began").exists():
        await asyncio.sleep(0.01)
    left.set()
    start, body = await asking
    assert (start["status"], english(json.loads(body["body"])["error"]["message"])) == (400, "The connection was lost.")
    # A busy machine comes back from starting a process long after that has begun.
    while not started or started[0].returncode is None:
        await asyncio.sleep(0.01)
    assert (stored(page), leftovers(tmp_path)) == ([], [])


async def test_no_room_for_an_upload_is_said(page: PageClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.tempfile, "TemporaryFile", FullDisk)
    response = await page.upload(b"words", "a.txt")
    assert (response.status_code, problem(response)[:17]) == (400, "The disk is full ")
    assert (await page.call("list", token=ANN)).status_code == 200
