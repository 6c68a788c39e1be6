"""What one person, and all of them, may take; another key is no other person."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.requests import HTTPConnection

from qwen35mm.chat.quotas import ALONE, STRANGERS, Usage
from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import QuotaError
from qwen35mm.http.addresses import address_of
from qwen35mm.http.errors import HttpError
from qwen35mm.web import serve
from qwen35mm.web.serving import app, logins, server
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import PICTURE
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import files_in
from tests.web.serving.page_client import ANN, BOB, PageClient, problem

MB = 10**6
ELSEWHERE = "198.51.100.7"


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    quotas = replace(STRANGERS, num_bytes=3 * MB, total_bytes=5 * MB, uploads=4, total_uploads=3, conversations=2)
    return PageClient(tmp_path, quotas=quotas)


def text(letter: str, num_bytes: int = MB) -> bytes:
    return letter.encode() * num_bytes


async def test_bytes_of_one_person_and_of_all(page: PageClient, tmp_path: Path) -> None:
    for letter in "ab":
        assert (await page.upload(text(letter), letter)).status_code == 200
    refused = await page.upload(text("c", 2 * MB), "c")
    assert refused.status_code == 429
    assert "take 2.0 MB of the 3.0 MB that one person can use" in problem(refused)
    # What was refused is not kept, and a new cookie is the same person; what comes is counted as it comes.
    assert len(files_in(tmp_path / "media")) == 2
    assert (await page.upload(text("c", 2 * MB), "c", BOB)).status_code == 429
    start, _ = await page.send_body("upload?name=c", [text("c"), text("c")], cut=None)
    assert start["status"] == 429
    assert (await page.upload(text("d", MB // 2), "d", BOB)).status_code == 200
    # Somebody else has room, until all have taken what there is.
    assert (await page.upload(text("e", 2 * MB), "e", "c" * 32, address=ELSEWHERE)).status_code == 200
    refused = await page.request("POST", "api/send", "d" * 32, address="203.0.113.9", json={"text": "f" * MB})
    assert refused.status_code == 429
    assert "of all people takes 4." in problem(refused)


async def test_what_is_deleted_is_room_again(page: PageClient) -> None:
    picture = PICTURE.read_bytes()
    page.usage.quotas = replace(page.usage.quotas, num_bytes=3 * len(picture) // 2)
    chat = await page.ask("look", attachments=(await page.upload(picture, "a")).json()["attachments"])
    more = text("b", len(picture))
    assert (await page.upload(more, "b")).status_code == 429
    assert (await page.call("delete", conversation=chat["id"])).status_code == 200
    assert (await page.upload(more, "b")).status_code == 200


async def test_presets_take_room_like_texts(page: PageClient) -> None:
    page.usage.quotas = replace(page.usage.quotas, num_bytes=250_000)
    settings = {"system": "s" * 100_000}
    for name, token in [("one", ANN), ("two", BOB)]:
        assert (await page.call("save_preset", token, name=name, settings=settings)).status_code == 200
    assert (await page.call("save_preset", ANN, name="three", settings=settings)).status_code == 429
    assert (await page.call("preferences", "c" * 32, preferences={"x": "y" * 100_000})).status_code == 429
    assert (await page.call("preferences", "c" * 32, preferences={"x": "y"})).status_code == 200
    page.usage.quotas = replace(page.usage.quotas, num_bytes=1)
    assert (await page.call("preferences", ANN, preferences={"colours": "dark"})).status_code == 200


async def test_conversations(page: PageClient) -> None:
    chat = await page.ask("echo one")
    archive = (await page.export()).content
    await page.ask("echo two", BOB)
    refused = await page.call("send", text="echo three")
    assert refused.status_code == 429
    assert "You have 2 chats, and one person can have 2" in problem(refused)
    assert "1 new chat; there is room for 0" in problem(await page.request("POST", "import", BOB, content=archive))
    # What is there already takes no room.
    assert (await page.request("POST", "import", content=archive)).json()["num_known"] == 1
    assert (await page.call("summarise", conversation=chat["id"], title="After: it")).status_code == 429
    # One that is there goes on.
    parent = chat["messages"][-1]["id"]
    sent = await page.call("send", text="echo four", conversation=chat["id"], parent=parent)
    assert sent.status_code == 200
    await page.watch(sent.json()["reply"])
    await page.call("delete", conversation=chat["id"])
    assert (await page.request("POST", "import", BOB, content=archive)).status_code == 200


async def test_uploads(page: PageClient) -> None:
    for number in range(4):
        assert (await page.upload(b"text %d" % number, "a", f"{number}" * 32)).status_code == 200
    refused = await page.upload(b"text 5", "a")
    assert (refused.status_code, "4 of your files are in no message yet" in problem(refused)) == (429, True)
    begun = [asyncio.Event() for _ in range(3)]
    page.usage.quotas = replace(page.usage.quotas, uploads=100)
    slow = [asyncio.create_task(page.send_body("upload", [b"x"], cut=None, begun=event)) for event in begun]
    for event in begun:
        await event.wait()
    refused = await page.upload(b"text", "a", address=ELSEWHERE)
    assert (refused.status_code, "3 files are being uploaded already" in problem(refused)) == (429, True)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert (await page.upload(b"text", "a", address=ELSEWHERE)).status_code == 200


async def test_files_of_which_as_much_has_come_are_told_apart(tmp_path: Path) -> None:
    usage, ann = Usage(ConversationStore(tmp_path), replace(STRANGERS, num_bytes=MB, total_uploads=2)), Person("ann")
    async with usage.receiving(ann) as take_first:
        async with usage.receiving(ann):
            pass
        # It still counts, as the only one.
        with pytest.raises(QuotaError, match=r"1\.0 MB that one person can use"):
            take_first(2 * MB)
        async with usage.receiving(ann):
            pass
    for _ in range(3):
        async with usage.receiving(ann), usage.receiving(ann):
            pass


def test_watchers(tmp_path: Path) -> None:
    usage = Usage(ConversationStore(tmp_path), replace(STRANGERS, watchers=2))
    ann, bob, other = (Person(name, account=account) for name, account in [("ann", "x"), ("bob", "x"), ("cy", "y")])
    with (
        usage.watching(ann),
        usage.watching(bob),
        usage.watching(other),
        pytest.raises(QuotaError, match="2 of your pages follow answers"),
        usage.watching(bob),
    ):
        pass
    with usage.watching(bob), usage.watching(bob):
        pass


def test_a_stream_too_many_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ALONE", replace(ALONE, watchers=0))
    with contextlib.closing(serve(FakeBackend(), port=0, token="")) as served:
        how = {"headers": {"x-qwen35mm": "1"}, "json": {"answers": ["0" * 32]}}
        told = httpx.post(f"{served.url}qwen35mm/watch", **how).text
    assert '"refused"' in told
    assert "of your pages {n|follows|follow} answers" in told


async def test_alone_on_one_s_own_machine_the_disk_is_the_limit(tmp_path: Path) -> None:
    page = PageClient(tmp_path, shared=False, quotas=ALONE)
    for number in range(300):
        page.usage.check(Person("local"), num_bytes=10**12, num_files=number, num_conversations=number)
    assert page.usage.room(Person("local"), most=8 << 30)[0] == 8 << 30


@pytest.mark.parametrize(
    ("client", "forwarded", "on_space", "address"),
    [
        ("198.51.100.7", [], False, "198.51.100.7"),
        ("198.51.100.7", ["8.8.8.8"], False, "198.51.100.7"),
        ("10.0.0.1", ["8.8.8.8"], True, "8.8.8.8"),
        # The client may have said anything before what the proxy added.
        ("10.0.0.1", ["1.1.1.1, 8.8.8.8"], True, "8.8.8.8"),
        ("10.0.0.1", ["1.1.1.1", "8.8.8.8, 10.1.1.1"], True, "8.8.8.8"),
        ("10.0.0.1", ["nonsense"], True, "10.0.0.1"),
        ("10.0.0.1", [], True, "10.0.0.1"),
        ("2600:1:2:3:4:5:6:7", [], False, "2600:1:2:3::/64"),
        ("::ffff:8.8.8.8", [], False, "8.8.8.8"),
    ],
)
def test_where_somebody_asks_from(
    monkeypatch: pytest.MonkeyPatch, client: str, forwarded: list[str], on_space: bool, address: str
) -> None:
    monkeypatch.setenv("SPACE_ID", "ann/chat" if on_space else "")
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    scope = {"type": "http", "client": (client, 1), "headers": headers}
    assert address_of(HTTPConnection(scope)) == f"address {address}"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server, "ALONE", replace(ALONE, wrong_passwords=2))
    with contextlib.closing(serve(FakeBackend(), port=0, auth=[("ann", "secret")])) as served:
        yield served.url


def test_passwords_are_not_guessed(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_in(password: str, path: str = "login") -> httpx.Response:
        return httpx.post(f"{guarded}{path}", data={"username": "ann", "password": password})

    assert [log_in(each).status_code for each in ("secret", "a", "secret", "b")] == [200, 400, 200, 400]
    for path in ("login", "login/"):
        refused = log_in("secret", path)
        assert refused.status_code == 429
        assert "2 wrong passwords came" in english(refused.json()["error"]["message"])
    monkeypatch.setattr(logins, "WRONG_PASSWORDS_S", -1.0)
    assert log_in("secret").status_code == 200


async def test_right_passwords_lock_nobody_out_however_many_come_at_one_time(guarded: str) -> None:
    async with httpx.AsyncClient(base_url=guarded, timeout=60) as client:
        for _ in range(2):
            form = {"username": "ann", "password": "secret"}
            answers = await asyncio.gather(*(client.post("login", data=form) for _ in range(12)))
            assert [each.status_code for each in answers] == [200] * 12
        forged = {"x-forwarded-for": "8.8.8.8"}
        for number in range(2):
            wrong = {"username": "ann", "password": f"guess {number}"}
            assert (await client.post("login", data=wrong, headers=forged)).status_code == 400
        refused = await client.post("login", data=form, headers={"x-forwarded-for": "9.9.9.9"})
        assert refused.status_code == 429, "nobody is believed for whom they ask"


async def test_an_account_is_not_guessed_from_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_ID", "ann/chat")
    guesses = logins.Guesses(most=2)

    def asking(number: int) -> HTTPConnection:
        forwarded = (b"x-forwarded-for", f"8.8.{number}.8".encode())
        return HTTPConnection({"type": "http", "client": ("10.0.0.1", 1), "headers": [forwarded]})

    assert await guesses.check(asking(200), "ann", lambda: True)
    for number in range(20):
        assert not await guesses.check(asking(number), "ann", lambda: False)
    with pytest.raises(HttpError, match="many addresses"):
        await guesses.check(asking(100), "ann", lambda: True)
    assert await guesses.check(asking(100), "bob", lambda: True), "another account is open"
    assert await guesses.check(asking(200), "ann", lambda: True), "and to who was let in before, this one too"
