"""What the sidebar asks for: pieces of the list with marks, pins, what is deleted and restored; edited answers."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from qwen35mm.chat.store.trash import Trash
from qwen35mm.web.serving.people import People
from qwen35mm.web.serving.tidying import keep_tidy
from tests.web.serving.page_client import BOB, PageClient, problem


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    return PageClient(tmp_path)


async def listed(page: PageClient, **how: Any) -> list[dict[str, Any]]:
    return (await page.call("list", **how)).json()["conversations"]


async def test_the_list_comes_in_pieces_with_pinned_ones_first(page: PageClient) -> None:
    chats = [(await page.ask(f"echo {number}"))["id"] for number in range(5)]
    assert (await page.call("pin", conversation=chats[1], pinned=True)).status_code == 200
    expected = [chats[number] for number in (1, 4, 3, 2, 0)]
    for query in ({}, {"query": "echo"}):
        found: list[str] = []
        place: dict[str, Any] = {}
        more = True
        while more:
            answer = (await page.call("list", limit=2, **query, **place)).json()
            more = answer["more"]
            last = answer["conversations"][-1]
            place = {"after": {name: last[name] for name in ("id", "pinned", "updated_s")}}
            found += [line["id"] for line in answer["conversations"]]
        assert found == expected
    assert [line["pinned"] for line in await listed(page)] == [True, *[False] * 4]
    await page.call("pin", conversation=chats[1], pinned=False)
    assert [line["id"] for line in await listed(page)] == chats[::-1]


async def test_a_line_says_what_runs_and_what_was_not_seen_yet(page: PageClient) -> None:
    first = await page.ask("echo seen")
    sent = (await page.call("send", text="slow")).json()
    lines = {line["id"]: (line["running"], line["unseen"]) for line in await listed(page)}
    assert lines == {sent["chat"]["id"]: (True, False), first["id"]: (False, False)}
    await page.call("stop", node=sent["reply"])
    lines = {line["id"]: (line["running"], line["unseen"]) for line in await listed(page)}
    assert lines[sent["chat"]["id"]] == (False, True)
    await page.call("open", conversation=sent["chat"]["id"])
    assert not any(line["unseen"] for line in await listed(page))


async def test_a_deleted_chat_comes_back_whole_and_is_removed_without_a_page(
    page: PageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (await page.upload(b"a note of mine", "note.txt")).json()["attachments"]
    chat = await page.ask("echo this", attachments=files)
    path = page.store.media.path(files[0]["digest"])
    os.utime(path, (0, 0))
    assert (await page.call("delete", conversation=chat["id"])).status_code == 200
    assert await listed(page) == []
    assert (await page.call("open", conversation=chat["id"])).status_code == 404
    assert (await page.request("GET", f"media/{files[0]['digest']}")).status_code == 404
    assert (await page.call("restore", BOB, conversation=chat["id"])).status_code == 404
    assert (await page.call("restore", conversation=chat["id"])).status_code == 200
    assert (await page.call("open", conversation=chat["id"])).json() == chat
    assert (await page.request("GET", f"media/{files[0]['digest']}")).status_code == 200

    removed = asyncio.Event()
    loop, purge = asyncio.get_running_loop(), page.store.purge

    def purge_and_tell(min_age_s: float) -> int:
        number = purge(min_age_s)
        loop.call_soon_threadsafe(removed.set)
        return number

    monkeypatch.setattr(page.store, "purge", purge_and_tell)
    await Trash(page.store, undo_s=0.0).delete(page.owner(), chat["id"])
    with anyio.fail_after(60):
        await removed.wait()
    assert (await page.call("restore", conversation=chat["id"])).status_code == 404
    assert not path.exists()


async def test_what_was_deleted_goes_with_the_program_and_at_its_next_start(
    page: PageClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = page.owner()
    for end in ("start", "end"):
        chat = await page.ask(f"echo {end}")
        page.store._clock = lambda: 1.0
        await page.call("delete", conversation=chat["id"])
        page.store._clock = (lambda: 1e9) if end == "start" else (lambda: 1.0)
        indexed = threading.Event()
        monkeypatch.setattr(page.store, "index_texts", lambda indexed=indexed: iter(indexed.set() or ()))
        with keep_tidy(page.store, People(shared=False), forget_after_s=None):
            assert await asyncio.to_thread(indexed.wait, 60)
            kept = sqlite3.connect(tmp_path / "conversations.sqlite").execute("SELECT id FROM conversations").fetchall()
            assert bool(kept) is (end == "end")
        assert (await page.call("restore", conversation=chat["id"])).status_code == 404
    assert page.store.find(owner) == []


async def test_an_edited_answer_is_a_branch_that_the_next_prompt_holds(page: PageClient) -> None:
    chat = await page.ask("echo one")
    question, answer = chat["messages"]
    args = {"conversation": chat["id"], "node": answer["id"]}
    changed = (await page.call("edit_answer", **args, text="\nmy *own* words\n")).json()["chat"]
    edited = changed["messages"][-1]
    assert (edited["text"], edited["edited"], edited["status"]) == ("my *own* words", True, "finished")
    assert (edited["branch"]["at"], edited["branch"]["of"], edited["model"]) == (2, 2, answer["model"])
    assert "<em>own</em>" in edited["blocks"][0]
    assert edited["stats"] is None
    await page.ask("echo two", conversation=chat["id"], parent=edited["id"])
    assert [message.text for message in page.backend.calls[-1].messages] == ["echo one", "my *own* words", "echo two"]
    (before,) = [each for each in page.store.read(page.owner(), chat["id"])[1].nodes.values() if each.text == "one "]
    assert not before.edited

    archive = (await page.export()).content
    (taken,) = (await page.request("POST", "import", BOB, content=archive)).json()["conversations"]
    again = (await page.call("open", BOB, conversation=taken["id"])).json()["messages"]
    assert [(each["text"], each.get("edited")) for each in again[:2]] == [("echo one", None), ("my *own* words", True)]

    for wrong, words in [
        ({**args, "text": " \n"}, "can't be empty"),
        ({**args, "text": "x" * 2_000_001}, "at most 2,000,000"),
        ({**args, "node": question["id"], "text": "x"}, "Only an answer"),
    ]:
        response = await page.call("edit_answer", **wrong)
        assert (response.status_code, words in problem(response)) == (400, True)


async def test_an_edited_summary_is_what_prompts_begin_with(page: PageClient) -> None:
    chat = await page.ask("echo one")
    sent = (await page.call("summarise", conversation=chat["id"], title="After: it")).json()
    await page.watch(sent["reply"])
    args = {"conversation": sent["chat"]["id"], "node": sent["reply"]}
    edited = (await page.call("edit_answer", **args, text="all of it")).json()["chat"]["messages"][-1]
    await page.ask("echo two", conversation=sent["chat"]["id"], parent=edited["id"])
    system, question = page.backend.calls[-1].messages
    assert ("all of it" in system.text, question.text) == (True, "echo two")
