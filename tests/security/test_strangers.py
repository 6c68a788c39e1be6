"""What is one person's is nobody else's: ids, files, exports, streams and kept responses, each way to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile
from tests.security.conftest import OpenFront
from tests.security.fronts import KEYS, Front, started

WORDS = {"ann": "secret words", "bob": "other words"}
SECRET = "Nobody else may read that."
SETTINGS = {"max_tokens": 4, "thinking": False}
STATUSES = (400, 401, 403, 404)


@dataclass(frozen=True)
class Two:
    """Ann, who has a chat with a picture, and Bob, who knows all its names."""

    front: Front
    ann: httpx.Client
    bob: httpx.Client
    chat: str
    reply: str
    question: str
    picture: dict[str, Any]
    clip: dict[str, Any]

    def fill(self, value: Any) -> Any:
        """A path or body with Ann's names in it."""
        text = json.dumps(value)
        names = {"CHAT": self.chat, "REPLY": self.reply, "QUESTION": self.question}
        names |= {"PICTURE": self.picture["digest"], "CLIP": self.clip["digest"]}
        for name, own in names.items():
            text = text.replace(f"<{name}>", own)
        return json.loads(text)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounts, "COST", (2, 8, 1))
        people = AccountFile(folder / "accounts")
        for name, password in WORDS.items():
            people.add(name, password)
    with started("chat", folder / "chat", "--auth-file", folder / "accounts") as front:
        ann, bob = (_logged_in(front, name) for name in WORDS)
        files = [asset_path("samples") / next(asset_path("samples").glob(each)).name for each in ("*.jpg", "*.mp4")]
        picture, clip = (
            ann.post(f"/qwen35mm/upload?name={each.name}", content=each.read_bytes()).json()["attachments"][0]
            for each in files
        )
        attached = [{"digest": picture["digest"], "kind": "image", "name": "a.jpg"}]
        body = {"text": SECRET, "attachments": attached, "settings": SETTINGS}
        sent = ann.post("/qwen35mm/api/send", json=body).json()
        question = next(each["id"] for each in sent["chat"]["messages"] if each["role"] == "user")
        yield Two(front, ann, bob, sent["chat"]["id"], sent["reply"], question, picture, clip)
        # Nothing that Bob did has changed anything.
        chat = ann.post("/qwen35mm/api/open", json={"conversation": sent["chat"]["id"]}).json()
        assert [each["id"] for each in chat["messages"]] == [question, sent["reply"]]
        assert ann.get(f"/qwen35mm/media/{picture['digest']}").status_code == 200
        ann.close()
        bob.close()


def _logged_in(front: Front, name: str) -> httpx.Client:
    client = front.stranger(headers={"x-qwen35mm": "1"})
    answer = client.post("/login", data={"username": name, "password": WORDS[name]})
    assert answer.status_code == 200
    client.headers["x-qwen35mm"] = answer.json()["key"]
    return client


_NODE = {"conversation": "<CHAT>", "node": "<REPLY>"}
_ATTACHED = {"digest": "<PICTURE>", "kind": "image", "name": "a.jpg"}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("open", {"conversation": "<CHAT>"}),
        ("open", _NODE),
        ("answers", _NODE),
        ("rename", {"conversation": "<CHAT>", "title": "Mine"}),
        ("pin", {"conversation": "<CHAT>", "pinned": True}),
        ("restore", {"conversation": "<CHAT>"}),
        ("branch", _NODE),
        ("delete_message", _NODE),
        ("delete_message", {"conversation": "<CHAT>", "node": "<QUESTION>"}),
        ("shorten", {"conversation": "<CHAT>", "first": "<REPLY>"}),
        ("edit_answer", {**_NODE, "text": "Mine."}),
        ("measure", {"conversation": "<CHAT>", "text": "x"}),
        ("measure", {"text": "x", "attachments": [_ATTACHED]}),
        ("send", {"conversation": "<CHAT>", "parent": "<REPLY>", "text": "x"}),
        ("send", {"text": "x", "attachments": [_ATTACHED], "settings": SETTINGS}),
        ("strip", {"text": "x", "attachments": [{**_ATTACHED, "digest": "<CLIP>", "kind": "video"}]}),
        ("shown_strip", {"conversation": "<CHAT>", "node": "<QUESTION>", "at": 0}),
        ("crop", {"digest": "<PICTURE>", "source": "a", "name": "b", "box": [0.0, 0.0, 0.5, 0.5]}),
        ("again", {**_NODE, "settings": SETTINGS}),
        ("continue", {**_NODE, "settings": SETTINGS}),
        ("summarise", {"conversation": "<CHAT>", "title": "So far"}),
        ("settings", {"conversation": "<CHAT>", "settings": {"system": "Mine."}}),
        ("preview", {"digest": "<PICTURE>", "name": "a.txt"}),
    ],
)
def test_no_request_of_another_person_reaches_a_chat(name: str, body: Any, two: Two) -> None:
    answer = two.bob.post(f"/qwen35mm/api/{name}", json=two.fill(body))
    assert answer.status_code in STATUSES, answer.text[:500]
    assert SECRET not in answer.text


@pytest.mark.parametrize("name", ["stop", "delete", "end_temporary"])
def test_what_ends_something_ends_nothing_of_others(name: str, two: Two) -> None:
    body = {"node": two.reply} if name == "stop" else {"conversation": two.chat}
    assert two.bob.post(f"/qwen35mm/api/{name}", json=body).status_code in (200, *STATUSES)
    assert two.ann.post("/qwen35mm/api/open", json={"conversation": two.chat}).status_code == 200


def test_no_search_or_list_finds_it(two: Two) -> None:
    for body in (
        {},
        {"query": "Nobody"},
        {"query": two.chat},
        {"query": "%"},
        {"query": '" OR 1=1 --'},
        {"query": "*"},
    ):
        answer = two.bob.post("/qwen35mm/api/list", json=body)
        assert two.chat not in answer.text
        assert SECRET not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        *("media/<PICTURE>", "picture/<PICTURE>", "thumbnail/<PICTURE>", "frame/<CLIP>", "frame/<CLIP>?time_s=0.1"),
        *("media/<CLIP>", "media/<PICTURE>?temporary=1", "media/../media/<PICTURE>", "media/<PICTURE>%00"),
        *("export?ids=<CHAT>", "export?ids=<CHAT>&form=zip", "export?ids=<CHAT>&form=md", "export?ids=<CHAT>,<CHAT>"),
    ],
)
def test_no_file_of_another_person_is_given(path: str, two: Two) -> None:
    path = two.fill(path)
    if "export" in path:
        path += f"&code={two.bob.post('/qwen35mm/api/download', json={}).json()['code']}"
    answer = two.bob.get(f"/qwen35mm/{path}")
    if "export" in path and answer.status_code == 200:
        # An archive of what is Bob's among them: nothing.
        assert len(answer.content) < 1000
    else:
        assert answer.status_code in STATUSES
    assert SECRET.encode() not in answer.content
    assert two.front.stranger().get(f"/qwen35mm/{path}").status_code in STATUSES


def test_no_stream_tells_of_another_persons_answer(two: Two) -> None:
    sent = two.ann.post("/qwen35mm/api/send", json={"text": "Hello", "settings": {"max_tokens": 200}}).json()
    for client in (two.bob, two.front.stranger(headers={"x-qwen35mm": "1"})):
        with client.stream("POST", "/qwen35mm/watch", json={"answers": [two.reply, sent["reply"]]}) as answer:
            told = answer.read()
        assert answer.status_code in (200, *STATUSES)
        assert b'"text"' not in told or b'"error"' in told
        assert b"blocks" not in told
    assert two.ann.post("/qwen35mm/api/delete", json={"conversation": sent["chat"]["id"]}).status_code == 200


@pytest.mark.parametrize("path", ["pages", "recode"])
def test_no_file_of_another_person_is_worked_on(path: str, two: Two) -> None:
    answer = two.bob.post(
        f"/qwen35mm/{path}", params={"digest": two.picture["digest"], "name": "a", "encoding": "utf-8"}
    )
    assert answer.status_code in STATUSES


def test_a_call_takes_no_file_of_another_person(two: Two) -> None:
    path = f"{two.front.folder}/gradio/{two.picture['digest']}/a.jpg"
    files = [{"path": path, "meta": {"_type": "gradio.FileData"}}]
    answer = two.bob.post("/gradio_api/call/chat", json={"data": ["What is it?", files, "", [], SETTINGS]})
    if answer.status_code == 200:
        told = two.bob.get(f"/gradio_api/call/chat/{answer.json()['event_id']}").text
        assert "event: error" in told
        assert "event: generating" not in told


@pytest.mark.parametrize(
    "headers", [{}, {"x-qwen35mm": "0" * 32}, {"cookie": "qwen35mm-login-80=made-up"}, {"authorization": "Bearer none"}]
)
@pytest.mark.parametrize(
    "path", ["start", "list", "open", "send", "models", "plan", "change_model", "add_server", "memory", "mermaid"]
)
def test_nobody_is_answered_without_a_login(path: str, headers: dict[str, str], two: Two) -> None:
    with two.front.stranger(headers={"x-qwen35mm": "1", **headers}) as client:
        assert client.post(f"/qwen35mm/api/{path}", json={"conversation": two.chat}).status_code in (401, 404)


def test_a_logged_out_session_opens_nothing(two: Two) -> None:
    client = _logged_in(two.front, "bob")
    key = client.headers["x-qwen35mm"]
    assert client.post("/qwen35mm/logout", json={}).status_code == 200
    client.close()
    with two.front.stranger(headers={"x-qwen35mm": key}) as other:
        assert other.post("/qwen35mm/api/start", json={}).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/<ID>", None),
        ("DELETE", "/v1/responses/<ID>", None),
        ("GET", "/v1/responses/<ID>/input_items", None),
        ("POST", "/v1/responses/<ID>/cancel", {}),
        ("GET", "/v1/responses/<ID>?stream=true", None),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": "<ID>", "max_output_tokens": 1}),
        ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "<ID>"}),
        ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "<ITEM>"}], "max_output_tokens": 1}),
    ],
)
def test_a_response_is_kept_for_its_key_alone(method: str, path: str, body: Any, open_front: OpenFront) -> None:
    front = open_front("serve")
    with front.client() as client:
        made = client.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 1}).json()
        names = {"<ID>": made["id"], "<ITEM>": made["output"][0]["id"]}
        for headers, status in (({"authorization": f"Bearer {KEYS[1]}"}, (400, 404)), ({}, (401,))):
            text = json.dumps([path, body])
            for name, own in names.items():
                text = text.replace(name, own)
            own_path, own_body = json.loads(text)
            with front.stranger(headers=headers) as other:
                answer = other.request(method, own_path, json=own_body)
            assert answer.status_code in status, answer.text
            assert SECRET not in answer.text
        assert client.get(f"/v1/responses/{made['id']}").status_code == 200
