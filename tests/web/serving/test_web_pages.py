"""Web addresses that are read into a message: who may, what comes, and what hostile sites get."""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.temporary import TemporaryStore
from qwen35mm.server import fetch
from qwen35mm.web.serving import app, files
from qwen35mm.web.serving.app import PREFIX, build_app
from qwen35mm_preprocess.say import english
from tests.chat.fake_backend import FakeBackend
from tests.http_server import QuietHandler, serving
from tests.web.serving.page_client import PageClient

pytest.importorskip("trafilatura")

WORDS = "".join(
    f"<p>Cat {n} is a small animal that lives with people, and it sleeps most of the day.</p>" for n in range(6)
)


def drawn(side: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


PICTURES = ("http://[bad/x.png", "cat.png", "icon.png", "http://127.0.0.1/secret.png", "http://site.example/to-inside")
NO_PICTURE = b"Words that are called a picture. " * 300


def article(*pictures: str) -> tuple[bytes, dict[str, str]]:
    sources = "".join(f"<p><img src={each!r}></p>" for each in pictures)
    page = f"<html><head><title>Cats / dogs</title></head><body><article>{WORDS}{sources}</article></body></html>"
    return page.encode(), {"Content-Type": "text/html; charset=utf-8"}


SITE: dict[str, tuple[bytes, dict[str, str]]] = {
    "/page": article(*PICTURES),
    "/odd": article("gone.png", "words.png", "cat.png"),
    "/words.png": (NO_PICTURE, {"Content-Type": "image/png"}),
    "/cat.png": (drawn(64), {"Content-Type": "image/png"}),
    "/icon.png": (drawn(16), {"Content-Type": "image/png"}),
    "/bomb": (gzip.compress(b"0" * 10**7), {"Content-Type": "text/html", "Content-Encoding": "gzip"}),
    "/huge": (b"x" * 300_000, {"Content-Type": "text/html"}),
    "/empty": (b"<script>draw()</script>", {"Content-Type": "text/html"}),
}


class Site(QuietHandler):
    def do_GET(self) -> None:
        if self.path == "/to-inside":
            self.send_whole(302, b"", {"Location": "http://169.254.169.254/latest/meta-data"})
        elif self.path in SITE:
            self.send_whole(200, *SITE[self.path])
        else:
            self.send_whole(404, b"")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    with serving(server):
        yield server.server_address[1]


@pytest.fixture
def page(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> PageClient:
    """A page whose people may read `site.example`, a name of the internet for the test alone."""
    look = fetch._global_addresses

    async def resolve(host: str, number: int) -> list[str]:
        if host == "inside.example":
            return await look("10.0.0.1", number)
        return ["127.0.0.1"] if host == "site.example" else await look(host, number)

    async def opened(client: httpx.AsyncClient, url: httpx.URL) -> httpx.Response:
        return await plain(client, url.copy_with(port=port) if url.host == "site.example" else url)

    plain = fetch._open
    monkeypatch.setattr(fetch, "_open", opened)
    monkeypatch.setattr(fetch, "_global_addresses", resolve)
    client = PageClient(tmp_path)
    client.files._reads_web = lambda _: True
    return client


async def read(page: PageClient, address: str) -> Any:
    answer = await page.request("POST", "web_page", params={"address": address})
    return answer.json() if answer.status_code == 200 else english(answer.json()["error"]["message"])


async def test_a_page_is_its_main_text_and_its_pictures(page: PageClient) -> None:
    found = await read(page, "http://site.example/page")
    text, picture = found["attachments"]
    assert (text["kind"], text["name"]) == ("text", "Cats dogs (site.example)")
    stored = (await page.file(f"media/{text['digest']}")).text
    assert stored.startswith("http://site.example/page\n\n")
    assert stored.count("is a small animal") == 6
    assert (picture["kind"], picture["name"]) == ("image", "cat.png")
    # A link to a file is the file.
    (alone,) = (await read(page, "http://site.example/cat.png"))["attachments"]
    assert alone["digest"] == picture["digest"]


async def test_what_is_no_picture_is_neither_attached_nor_kept(page: PageClient) -> None:
    text, picture = (await read(page, "http://site.example/odd"))["attachments"]
    assert (text["kind"], picture["name"]) == ("text", "cat.png")
    digest = hashlib.sha256(NO_PICTURE).hexdigest()
    assert (await page.file(f"media/{picture['digest']}")).status_code == 200
    assert (await page.file(f"media/{digest}")).status_code == 404


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://site.example/to-inside", "it isn't an address of the internet"),
        ("http://inside.example/", "it isn't an address of the internet"),
        ("http://localhost:8000/", "it isn't an address of the internet"),
        ("file:///etc/passwd", "only http and https addresses without a password are read"),
        ("http://site.example/bomb", "its server compressed it"),
        ("http://site.example/huge", "it has more than the 0 MiB that are taken"),
        ("http://site.example/gone", "its server answered 404"),
        ("http://site.example/empty", "has no text to read"),
        ("", "only http and https"),
        (f"http://site.example/page?{'x' * 4_000}", "Web addresses of more than 4,000 characters aren't read"),
    ],
)
async def test_what_cant_be_read_is_told_in_words(
    address: str, words: str, page: PageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_WEB_BYTES", 200_000)
    assert words in await read(page, address)


async def test_nothing_is_fetched_for_who_may_not(page: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fetch_public", None)  # it isn't called
    page.files._reads_web = lambda _: False
    assert "aren't read here" in await read(page, "http://site.example/page")
    bare = await page.request("POST", "web_page", header=False, params={"address": "http://site.example/page"})
    assert bare.status_code == 404


@pytest.mark.parametrize(
    ("shared", "option", "chosen", "offered", "reads"),
    [
        (False, False, None, False, False),
        (False, False, True, False, True),
        (False, True, None, True, True),
        (False, True, False, True, False),
        # Strangers can't allow it themselves.
        (True, False, True, None, False),
        (True, True, None, True, True),
    ],
)
async def test_ones_own_page_leaves_it_to_the_person_and_a_shared_one_to_its_owner(
    shared: bool,
    option: bool,
    chosen: bool | None,
    offered: bool | None,
    reads: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def noted(*args: Any, reads_web: Any, **how: Any) -> files.Files:
        made.append(reads_web)
        return files.Files(*args, reads_web=reads_web, **how)

    monkeypatch.setattr(app, "Files", noted)
    store, temporary = ConversationStore(tmp_path / "store"), TemporaryStore(tmp_path / "temporary")
    built = build_app(FakeBackend(), store, temporary=temporary, shared=shared, read_web=option)
    transport = httpx.ASGITransport(built.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        headers = {"x-qwen35mm": "a" * 32}
        start = (await client.post(f"{PREFIX}/api/start", json={}, headers=headers)).json()
        assert start["app"]["web"] is offered
        preferences = {} if chosen is None else {"read_web": chosen}
        kept = await client.post(f"{PREFIX}/api/preferences", json={"preferences": preferences}, headers=headers)
        assert kept.status_code == 200
        address = {"address": "ftp://example.org/"}
        answer = await client.post(f"{PREFIX}/web_page", params=address, headers=headers)
    words = english(answer.json()["error"]["message"])
    assert ("only http" in words) is reads, words
    assert len(made) == 2
    store.close()
    temporary.close()
