"""Temporary conversations over HTTP: nothing of them is stored, and nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.chat.store import temporary
from qwen35mm.chat.store.temporary import temporary_folder
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend

HEADERS = {"x-qwen35mm": "1"}
SECRET = b"a note that nobody keeps"
Parts = tuple[FakeBackend, Server, Path]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    backend = FakeBackend()
    with contextlib.closing(serve(backend, port=0, data_dir=tmp_path / "data", token="")) as server:
        yield backend, server, tmp_path
    assert list((tmp_path / "temporary").iterdir()) == []


def ask(server: Server, method: str, **arguments: Any) -> httpx.Response:
    return httpx.post(f"{server.url}qwen35mm/api/{method}", headers=HEADERS, json=arguments, timeout=60)


def watch(server: Server, reply: str) -> None:
    """Watches a reply to its end, as a page does."""
    httpx.post(f"{server.url}qwen35mm/watch", headers=HEADERS, json={"answers": [reply]}, timeout=60)


def send(server: Server, text: str, **arguments: Any) -> dict[str, Any]:
    """Sends a message, and gives the conversation as it is when it is answered."""
    sent = ask(server, "send", text=text, temporary=True, **arguments)
    assert sent.status_code == 200, sent.text
    watch(server, sent.json()["reply"])
    return ask(server, "open", conversation=sent.json()["chat"]["id"]).json()


def upload(server: Server, name: str, data: bytes) -> dict[str, Any]:
    url = f"{server.url}qwen35mm/upload"
    answer = httpx.post(url, params={"name": name, "temporary": "1"}, content=data, headers=HEADERS)
    return answer.json()["attachments"][0]


def held(folder: Path, words: bytes) -> list[Path]:
    """Files below a folder that have these words."""
    return [path for path in folder.rglob("*") if path.is_file() and words in path.read_bytes()]


def test_nothing_of_it_is_stored_and_nothing_is_left(parts: Parts) -> None:
    backend, server, folder = parts
    picture = (asset_path("samples") / "one-shape.png").read_bytes()
    files = [upload(server, "note.txt", SECRET), upload(server, "one.png", picture)]
    chat = send(server, "echo words that nobody keeps", attachments=files, settings={"system": "A hidden prompt."})
    assert chat["temporary"]
    answer = chat["messages"][-1]
    chat = send(server, "echo and more", conversation=chat["id"], parent=answer["id"])
    assert len(chat["messages"]) == 4
    assert ask(server, "list").json()["conversations"] == []
    assert ask(server, "list", query="nobody").json()["conversations"] == []
    edited = ask(server, "edit_answer", conversation=chat["id"], node=chat["messages"][-1]["id"], text="my words")
    assert edited.json()["chat"]["temporary"]
    # The engine writes nothing of it to its disk, and finds it for nobody else.
    for call in backend.calls:
        assert (call.retain, call.tenant) == ("memory", f"temporary {chat['id']}")
    for part in ("media", "thumbnail"):
        shown = httpx.get(f"{server.url}qwen35mm/{part}/{files[1]['digest']}")
        assert (shown.status_code, shown.headers["cache-control"]) == (200, "no-store")
    for words in (b"nobody keeps", b"hidden prompt", b"my words", picture):
        assert held(folder / "data", words) == []
    assert held(folder / "temporary", b"words that nobody") == []
    assert held(folder / "temporary", SECRET) != []

    assert ask(server, "end_temporary", conversation=chat["id"]).status_code == 200
    assert ask(server, "open", conversation=chat["id"]).status_code == 404
    assert httpx.get(f"{server.url}qwen35mm/media/{files[0]['digest']}").status_code == 404
    assert held(folder, SECRET) == held(folder, picture) == []


def test_another_conversation_is_stored_as_ever_beside_it(parts: Parts) -> None:
    backend, server, _ = parts
    kept = ask(server, "send", text="echo kept").json()
    watch(server, kept["reply"])
    assert "temporary" not in kept["chat"]
    lost = send(server, "echo lost")
    assert [line["id"] for line in ask(server, "list").json()["conversations"]] == [kept["chat"]["id"]]
    assert [call.retain for call in backend.calls] == ["conversation", "memory"]
    # What belongs to no conversation is kept, whatever a request says.
    ask(server, "preferences", preferences={"colours": "dark"}, temporary=True)
    assert ask(server, "start").json()["preferences"] == {"colours": "dark"}
    ask(server, "end_temporary", conversation=kept["chat"]["id"])
    assert ask(server, "open", conversation=kept["chat"]["id"]).status_code == 200
    assert ask(server, "open", conversation=lost["id"]).status_code == 200


def test_what_another_tab_is_about_to_send_outlives_it(parts: Parts) -> None:
    _, server, folder = parts
    chat = send(server, "echo one", attachments=[upload(server, "note.txt", SECRET)])
    picture = (asset_path("samples") / "one-shape.png").read_bytes()
    draft = upload(server, "one.png", picture)
    ask(server, "end_temporary", conversation=chat["id"])
    # A third tab leaves a chat that it hasn't begun.
    ask(server, "end_temporary", conversation=None)
    assert held(folder, SECRET) == []
    assert len(send(server, "echo two", attachments=[draft])["messages"]) == 2


def test_its_answer_ends_with_it(parts: Parts) -> None:
    backend, server, _ = parts
    sent = ask(server, "send", text="slow", temporary=True).json()
    how = {"headers": HEADERS, "json": {"answers": [sent["reply"]]}, "timeout": 60}
    with httpx.stream("POST", f"{server.url}qwen35mm/watch", **how) as lines:
        next(line for line in lines.iter_lines() if "word" in line)
        assert backend.active == 1
        ask(server, "end_temporary", conversation=sent["chat"]["id"])
    assert backend.active == 0


def test_it_ends_when_nothing_is_heard_of_its_page(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary.TemporaryChats.__init__, "__kwdefaults__", {"silence_s": 2.0})
    with contextlib.closing(serve(FakeBackend(), port=0, token="")) as server:
        files = [upload(server, "note.txt", SECRET)]
        sent = ask(server, "send", text="echo one", temporary=True, attachments=files).json()
        while ask(server, "start").status_code == 200 and held(parts[2], SECRET):
            pass
        assert ask(server, "open", conversation=sent["chat"]["id"]).status_code == 404


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, other = tmp_path / "qwen35mm-temporary-999999999-x", tmp_path / f"qwen35mm-temporary-{os.getpid()}-y"
    for folder in (old, other):
        folder.mkdir()
        (folder / "file").write_bytes(SECRET)
    with temporary_folder() as folder:
        assert {each.name for each in tmp_path.iterdir()} == {other.name, folder.name}
