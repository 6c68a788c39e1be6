"""The page's requests: whose they are, what comes of them, and that nothing they hold is ever a crash."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from qwen35mm.chat.replies.turns import Question
from qwen35mm.http.requests import MAX_BODY_BYTES, requests_of
from qwen35mm.web.serving.api import Api
from qwen35mm.web.serving.models import Models
from qwen35mm_preprocess.say import english
from tests.web.serving.page_client import ANN, BOB, PageClient, problem

# The requests with the names of their arguments; a question's are its fields.
METHODS = {
    name: set(Question.model_fields) if "question" in names else names
    for name, (_, names) in requests_of(Api, Models).items()
}
VALUES: dict[str, Any] = {
    "none": None,
    "negative": -1,
    "huge number": 10**30,
    "list": [1, [2]],
    "object": {"a": 1},
    "long text": "x" * 100_000,
    "nul": "\0",
    "digest": "0" * 64,
    "id": "0" * 32,
}


@pytest.fixture
def page(tmp_path: Path) -> PageClient:
    return PageClient(tmp_path)


async def test_only_the_page_itself_may_ask(page: PageClient) -> None:
    for method in METHODS:
        assert (await page.request("POST", f"api/{method}", header=False, json={})).status_code == 404
    assert (await page.request("GET", "api/start")).status_code == 405
    unknown = await page.call("start", token="nobody")
    assert (unknown.status_code, unknown.json()["error"]["kind"]) == (401, "unknown person")
    for name in ("nothing", "__class__", "handle", "continue_"):
        assert (await page.call(name)).status_code == 404


async def test_a_message_that_is_sent_again_is_there_once(page: PageClient) -> None:
    """Its answer was lost on the way, and the page can't know whether it came."""
    message = {"id": "c" * 32, "text": "echo Hello"}
    first, second = await asyncio.gather(page.call("send", **message), page.call("send", **message))
    assert first.json() == second.json()
    await page.watch(first.json()["reply"])
    third = (await page.call("send", **message)).json()
    assert third["reply"] == first.json()["reply"]
    assert [each["text"] for each in third["chat"]["messages"]] == ["echo Hello", "Hello "]
    # Somebody else's message can't be had by its id, nor overwritten.
    assert (await page.call("send", BOB, id="c" * 32, text="echo mine")).status_code == 400
    assert (await page.call("send", id="C" * 32, text="echo mine")).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"1",
        b"\xff\xfe",
        "{}".encode("utf-16"),
        b'{"text": "\\ud800"}',
        b'{"text": "\xed\xa0\x80"}',
        b"[" * 100_000,
    ],
)
async def test_a_body_of_another_form_is_refused_in_words(page: PageClient, body: bytes) -> None:
    response = await page.request("POST", "api/send", content=body)
    assert response.status_code == 400
    assert re.match(
        "The request is damaged: it isn't JSON as expected.|The body is nested too deeply", problem(response)
    )
    assert page.store.find("x") == []


async def test_a_body_may_be_empty_but_not_endless(page: PageClient) -> None:
    assert (await page.request("POST", "api/list", content=b"")).status_code == 200
    large = await page.request("POST", "api/send", content=b'{"text": "' + b"x" * MAX_BODY_BYTES + b'"}')
    assert (large.status_code, "at most 16 MiB" in problem(large)) == (413, True)


@pytest.mark.parametrize("method", METHODS)
async def test_no_argument_is_a_crash(page: PageClient, method: str, caplog: pytest.LogCaptureFixture) -> None:
    chat = await page.ask("echo one")
    good: dict[str, Any] = {"conversation": chat["id"], "node": chat["messages"][0]["id"], "text": "echo two"}
    good |= {"title": "t", "name": "n", "preferences": {}, "settings": {}, "number": 0}
    for argument in METHODS[method]:
        for words, value in VALUES.items():
            response = await page.call(method, **{**good, argument: value})
            assert response.status_code in (200, 400, 404, 409), (argument, words, response.text[:200])
            if response.status_code != 200:
                message = problem(response)
                assert "Something went wrong" not in message
                assert 10 < len(message) < 600, (argument, words)
            for reply in page.replies.of(page.owner()):
                await reply.stop()
            if method in ("delete", "delete_message"):
                chat = await page.ask("echo one")
                good |= {"conversation": chat["id"], "node": chat["messages"][0]["id"]}
    assert "failed" not in caplog.text


async def test_another_person_s_ids_are_not_found(page: PageClient) -> None:
    chat = await page.ask("echo one")
    question, answer = chat["messages"]
    (file,) = (await page.upload(b"some words", "notes.txt")).json()["attachments"]
    theirs: dict[str, Any] = {"conversation": chat["id"]}
    attempts = [
        ("open", theirs),
        ("send", {**theirs, "parent": answer["id"], "text": "x"}),
        ("send", {"text": "x", "attachments": [file]}),
        ("measure", {**theirs, "parent": answer["id"], "text": "x"}),
        ("measure", {"text": "x", "attachments": [file]}),
        ("again", {**theirs, "node": question["id"]}),
        ("again", {**theirs, "node": question["id"], "settings": {"seed": 1}}),
        ("continue", {**theirs, "node": answer["id"]}),
        ("branch", {**theirs, "node": question["id"]}),
        ("delete_message", {**theirs, "node": question["id"]}),
        ("shorten", {**theirs, "first": question["id"]}),
        ("shorten", {**theirs, "first": None}),
        ("summarise", {**theirs, "title": "After"}),
        ("rename", {**theirs, "title": "stolen"}),
        ("delete", theirs),
        ("restore", theirs),
        ("pin", {**theirs, "pinned": True}),
        ("edit_answer", {**theirs, "node": answer["id"], "text": "x"}),
        ("settings", {**theirs, "settings": {"seed": 1}}),
    ]
    own = await page.ask("echo mine", token=BOB)
    # Nor do they become part of what is one's own.
    mixed = {
        "conversation": own["id"],
        "node": question["id"],
        "parent": answer["id"],
        "first": question["id"],
        "text": "x",
    }
    attempts += [
        (name, mixed) for name in ("send", "again", "continue", "branch", "delete_message", "shorten", "edit_answer")
    ]
    for method, arguments in attempts:
        response = await page.call(method, token=BOB, **arguments)
        assert response.status_code == 404, (method, response.text)
    assert (await page.call("open", conversation=chat["id"])).json() == chat
    assert (await page.call("open", token=BOB, conversation=own["id"])).json() == own
    assert len((await page.call("list", token=BOB)).json()["conversations"]) == 1


async def test_another_person_s_reply_is_not_stopped(page: PageClient) -> None:
    sent = (await page.call("send", text="slow")).json()
    assert (await page.call("start")).json()["running"] == [sent["reply"]]
    assert (await page.call("start", token=BOB)).json()["running"] == []
    await page.call("stop", token=BOB, node=sent["reply"])
    assert (await page.call("start")).json()["running"] == [sent["reply"]]
    assert (await page.call("stop", node=sent["reply"])).status_code == 200
    chat = (await page.call("open", conversation=sent["chat"]["id"])).json()
    assert (chat["running"], chat["messages"][1]["status"]) == ([], "stopped")


async def test_what_a_page_begins_with(page: PageClient) -> None:
    await page.ask("echo one")
    start = (await page.call("start")).json()
    assert start["app"]["model"] == "Fake-1B"
    assert [line["title"] for line in start["conversations"]] == ["echo one"]
    assert (start["preferences"], start["presets"], start["more"]) == ({}, {}, False)


async def test_conversations_are_listed_and_found(page: PageClient) -> None:
    for text in ("echo apples", "echo pears"):
        await page.ask(text)
    listed = (await page.call("list")).json()["conversations"]
    assert [line["title"] for line in listed] == ["echo pears", "echo apples"]
    assert [line["title"] for line in (await page.call("list", query="APPL")).json()["conversations"]] == [
        "echo apples"
    ]
    await page.call("rename", conversation=listed[0]["id"], title="  Fruit\n")
    assert (await page.call("open", conversation=listed[0]["id"])).json()["title"] == "Fruit"
    assert (await page.call("delete", conversation=listed[0]["id"])).status_code == 200
    assert len((await page.call("list")).json()["conversations"]) == 1


async def test_an_example_is_ready_to_be_sent(page: PageClient) -> None:
    attachment = (await page.call("example", number=0)).json()["attachment"]
    measured = (await page.call("measure", text="x", attachments=[attachment])).json()
    assert (measured["media"][0]["error"], measured["fits"]) == (None, True)
    chat = await page.ask("", attachments=[attachment])
    assert chat["title"] == attachment["name"]
    for number in (-1, 99):
        assert (await page.call("example", number=number)).status_code == 404


async def test_settings_and_presets_are_kept(page: PageClient) -> None:
    chat = await page.ask("echo one", settings={"seed": 1})
    assert chat["settings"] == {"seed": 1}
    assert (await page.call("settings", settings={"seed": ""})).json() == {"settings": {}}
    await page.call("settings", conversation=chat["id"], settings={"seed": 2})
    again = (await page.call("again", conversation=chat["id"], node=chat["messages"][0]["id"])).json()
    await page.watch(again["reply"])
    assert page.backend.calls[-1].params.seed == 2
    assert (await page.call("save_preset", name=" dry ", settings={"temperature": 0})).json() == {
        "presets": {"dry": {"temperature": 0.0}}
    }
    assert (await page.call("save_preset", name="  ")).status_code == 400
    assert (await page.call("save_preset", name="x", settings={"temperature": 9})).status_code == 400
    await page.call("preferences", preferences={"language": "de"})
    await page.call("preferences", preferences={"colours": "dark"})
    assert (await page.call("start")).json()["preferences"] == {"language": "de", "colours": "dark"}
    assert (await page.call("preferences", preferences={"settings": {"x": "y" * 150_000}})).status_code == 200
    assert (await page.call("preferences", preferences={"more": "y" * 60_000})).status_code == 400
    assert (await page.call("start", token=BOB)).json()["presets"] == {}
    assert (await page.call("delete_preset", token=BOB, name="dry")).status_code == 404
    assert (await page.call("delete_preset", name="dry")).json() == {"presets": {}}


async def test_a_message_that_is_too_long_comes_back_with_offers(page: PageClient) -> None:
    chat = await page.ask("echo " + "x" * 6000)
    late = chat["messages"][-1]["id"]
    response = await page.call("send", conversation=chat["id"], parent=late, text="y" * 8000)
    error = response.json()["error"]
    assert (response.status_code, error["kind"]) == (409, "too long")
    assert [offer["kind"] for offer in error["offers"]] == ["summary"]
    assert (await page.call("open", conversation=chat["id"])).json() == chat


def raise_error() -> None:
    raise RuntimeError("secret detail in /srv/private")


@pytest.mark.parametrize(
    "bug", [raise_error, lambda: int("secret"), lambda: TypeAdapter(int).validate_json('"secret"')]
)
async def test_a_bug_is_not_explained_to_strangers(
    page: PageClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bug: Callable[[], Any]
) -> None:
    def fail() -> dict[str, int]:
        return bug()

    assert english((await page.call("memory")).json()["words"]).startswith("Cache: KV ")
    monkeypatch.setattr(page.backend, "memory", fail)
    response = await page.call("memory")
    told = re.fullmatch(
        r"Something went wrong inside the program; its log has it under ([0-9a-f]{6})\. You can try again\.",
        problem(response),
    )
    assert (response.status_code, told is not None) == (500, True)
    assert "secret" not in json.dumps(response.json())
    assert told is not None
    (record,) = [record for record in caplog.records if told[1] in record.getMessage()]
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])
    assert (await page.call("models", token=ANN)).status_code == 404


@pytest.mark.parametrize("file", [1, None, {"digest": "a"}, {"digest": 1, "kind": "image", "name": "x"}])
async def test_a_file_of_another_form_is_refused(page: PageClient, file: Any) -> None:
    for kind in ("exe", ["image"]):
        file = {**file, "kind": kind} if isinstance(file, dict) else file
        response = await page.call("send", text="x", attachments=[file])
        assert (response.status_code, "attachments" in problem(response)) == (400, True)


async def test_a_chat_that_is_opened_while_a_reply_begins_tells_it_from_one_that_was_cut_off(
    page: PageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = await page.ask("echo first")
    owner, cut = page.owner(), chat["messages"][-1]["id"]
    _, tree = page.store.read(owner, chat["id"])
    page.store.update(owner, replace(tree.nodes[cut], status="running"))
    loop, add, seen = asyncio.get_running_loop(), page.store.add, []

    def add_and_open(*arguments: Any, **named: Any) -> None:
        add(*arguments, **named)
        opened = asyncio.run_coroutine_threadsafe(page.call("open", conversation=chat["id"]), loop)
        seen.append(opened.result().json())

    monkeypatch.setattr(page.store, "add", add_and_open)
    await page.call("send", conversation=chat["id"], parent=cut, text="echo second")
    (opened,) = seen
    assert [message["status"] for message in opened["messages"]] == ["finished", "interrupted", "finished", "running"]
    assert opened["running"] == [opened["messages"][-1]["id"]]
