"""Logging in by a file of accounts, out again, another password, and guests, over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile
from qwen35mm.errors import ConfigError
from qwen35mm.web import Server, serve
from qwen35mm_preprocess.say import english
from tests.chat.fake_backend import FakeBackend

HEADERS = {"x-qwen35mm": "1"}
WORDS = {"ann": "secret words", "bob": "other words"}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(accounts, "COST", (2, 8, 1))
    people = AccountFile(tmp_path / "accounts")
    for name, password in WORDS.items():
        people.add(name, password)
    return tmp_path / "accounts"


class Visitor:
    """One browser."""

    def __init__(self, server: Server) -> None:
        self.client = httpx.Client(base_url=server.url, headers=HEADERS)
        self.guest = self._take(self.post("session"))

    def _take(self, response: httpx.Response) -> str:
        key = (response.json().get("key") if response.status_code == 200 else None) or self.key
        self.client.headers["x-qwen35mm"] = key
        return key

    @property
    def key(self) -> str:
        return self.client.headers["x-qwen35mm"]

    def log_in(self, name: str, password: str | None = None) -> httpx.Response:
        answer = self.client.post("login", data={"username": name, "password": password or WORDS[name]})
        self._take(answer)
        return answer

    def log_out(self) -> None:
        """As the page does, which has the guest's key again then."""
        assert self.post("logout").status_code == 200
        self.client.headers["x-qwen35mm"] = self.guest

    def ask(self, method: str, /, **arguments: Any) -> httpx.Response:
        return self.client.post(f"qwen35mm/api/{method}", json=arguments)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        answer = self.client.post(f"qwen35mm/{path}", json=arguments)
        if path == "password":
            self._take(answer)
        return answer

    @property
    def account(self) -> Any:
        return self.ask("start").json()["account"]


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[Server]:
    with contextlib.closing(serve(FakeBackend(), port=0, auth_file=path, data_dir=tmp_path / "data")) as server:
        yield server


def test_one_session_each_which_ends(server: Server, path: Path) -> None:
    ann, also_ann, bob = Visitor(server), Visitor(server), Visitor(server)
    assert ann.ask("start").status_code == 401
    assert ann.client.get("gradio_api/info").status_code == 401
    assert ann.client.get("gradio_api/theme.css").status_code == 404
    assert ann.log_in("ann", "a guess").status_code == 400
    assert ann.log_in("nobody", "a guess").status_code == 400
    for visitor, name in ((ann, "ann"), (also_ann, "ann"), (bob, "bob")):
        answer = visitor.log_in(name)
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers, "a page has no cookie: other ports would have it"
        assert visitor.account == {"name": name, "can_change": True}
    ann.ask("save_preset", name="mine", settings={})
    assert [list(each.ask("start").json()["presets"]) for each in (also_ann, bob)] == [["mine"], []]

    nobody = httpx.Client(base_url=server.url)
    assert nobody.post("qwen35mm/logout", json={}).status_code == 400, "only the page itself logs out"
    assert ann.post("logout").headers["clear-site-data"] == '"cache"'
    assert ann.ask("start").status_code == 401, "the session has ended, whatever the browser kept"
    assert also_ann.ask("start").status_code == 200
    ann.log_in("ann")
    assert also_ann.post("logout", everywhere=True).status_code == 200
    assert [each.ask("start").status_code for each in (ann, also_ann, bob)] == [401, 401, 200]

    AccountFile(path).remove("bob")
    assert bob.ask("start").status_code == 401
    AccountFile(path).add("eve", "third words")
    assert Visitor(server).log_in("eve", "third words").status_code == 200


def test_another_password(server: Server, path: Path) -> None:
    ann, also_ann, nobody = Visitor(server), Visitor(server), Visitor(server)
    assert nobody.post("password", old="x", new="fresh words").status_code == 401
    ann.log_in("ann")
    also_ann.log_in("ann")
    wrong = ann.post("password", old="a guess", new="fresh words")
    assert (wrong.status_code, wrong.json()["error"]["kind"]) == (403, "wrong password")
    assert ann.post("password", old=WORDS["ann"], new="short").status_code == 400
    assert ann.post("password", old=WORDS["ann"]).status_code == 400
    assert ann.post("password", old=WORDS["ann"], new="fresh words").status_code == 200
    assert [each.ask("start").status_code for each in (ann, also_ann)] == [200, 401]
    assert also_ann.log_in("ann").status_code == 400
    assert also_ann.log_in("ann", "fresh words").status_code == 200
    # By whoever keeps the file, too.
    AccountFile(path).add("ann", "given words")
    assert [each.ask("start").status_code for each in (ann, also_ann)] == [401, 401]


def test_wrong_old_passwords_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.web.serving.server.is_shared", lambda host: True)
    with contextlib.closing(serve(FakeBackend(), port=0, auth_file=path)) as server:
        ann = Visitor(server)
        ann.log_in("ann")
        answers = [ann.post("password", old=f"guess {number}", new="fresh words") for number in range(11)]
        assert [answer.status_code for answer in answers] == [403] * 10 + [429]
        assert "10 wrong passwords" in english(answers[-1].json()["error"]["message"])
        assert ann.log_in("ann").status_code == 429


@pytest.mark.parametrize("shared", [False, True])
def test_a_guest_sees_nothing_of_others(path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr("qwen35mm.web.serving.server.is_shared", lambda host: shared)
    backend = FakeBackend()
    with contextlib.closing(serve(backend, port=0, auth_file=path, guests=True)) as server:
        ann, guest, other = Visitor(server), Visitor(server), Visitor(server)
        ann.log_in("ann")
        assert [each.account["name"] for each in (ann, guest, other)] == ["ann", None, None]
        ids = []
        for number, visitor in enumerate((ann, guest, other)):
            sent = visitor.ask("send", text=f"echo {number}")
            assert sent.status_code == 200
            ids.append(sent.json()["chat"]["id"])
        for number, visitor in enumerate((ann, guest, other)):
            found = visitor.ask("list").json()["conversations"]
            assert [line["id"] for line in found] == [ids[number]]
            for each in ids[:number] + ids[number + 1 :]:
                assert visitor.ask("open", conversation=each).status_code == 404
        assert guest.post("password", old="x", new="fresh words").status_code == 401
        # Who logs in is somebody else.
        guest.log_in("bob")
        assert guest.ask("list").json()["conversations"] == []
        guest.log_out()
        assert [line["id"] for line in guest.ask("list").json()["conversations"]] == [ids[1]]


def test_accounts_that_let_nobody_in_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "accounts"
    for how, words in [
        ({"auth_file": path}, "account add"),
        ({"auth": [("ann", "x")], "auth_file": path}, "Name one of them"),
        ({"guests": True}, "--auth-file"),
        ({"auth": [("ann", "x")], "token": "a" * 20}, "--token"),
    ]:
        with pytest.raises(ConfigError, match=words):
            serve(FakeBackend(), port=0, **how)
    path.write_text("# nobody yet\n")
    with pytest.raises(ConfigError, match="Nobody may log in"):
        serve(FakeBackend(), port=0, auth_file=path)
