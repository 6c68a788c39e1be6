"""Who may name tool servers, and who may use them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile
from qwen35mm.errors import ConfigError
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.tools.fakes import fake, num_starts
from tests.web.serving.test_logins import WORDS, Visitor
from tests.web.serving.test_temporary import held


def own_page(folder: Path, **how: Any) -> Server:
    return serve(FakeBackend(), port=0, data_dir=folder, token="the-token-of-a-test", **how)


def client_of(server: Server, **headers: str) -> httpx.Client:
    assert server.token is not None
    return httpx.Client(base_url=server.url, headers={"x-qwen35mm": server.token.key, **headers})


def text_of(folder: Path, name: str = "fake") -> str:
    server = fake(folder, name)
    values = {"command": server.command, "args": list(server.args), "env": {"KEY": "secret"}}
    return json.dumps({"mcpServers": {name: values}})


def test_ones_own_page_names_servers_and_keeps_them_to_itself(tmp_path: Path) -> None:
    server = own_page(tmp_path, tools=[fake(tmp_path, "given")])
    try:
        client = client_of(server)
        assert client.post("qwen35mm/api/start", json={}).json()["tools"] == ["given"]
        saved = client.post("qwen35mm/api/save_tool_servers", json={"text": text_of(tmp_path)})
        assert [each["name"] for each in saved.json()["servers"]] == ["given", "fake"]
        assert "secret" not in json.dumps(saved.json()["servers"])
        file = tmp_path / "tools.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        # Naming one starts nothing, and a name is of one server.
        assert not (tmp_path / "fake.log").exists()
        twice = client.post("qwen35mm/api/save_tool_servers", json={"text": text_of(tmp_path, "given")})
        assert twice.status_code == 400
        assert json.loads(file.read_text())["mcpServers"].keys() == {"fake"}
        # What can't be saved isn't used either.
        file.unlink()
        file.mkdir()
        failed = client.post("qwen35mm/api/save_tool_servers", json={"text": text_of(tmp_path, "third")})
        assert failed.status_code == 400
        assert client.post("qwen35mm/api/start", json={}).json()["tools"] == ["given", "fake"]
        file.rmdir()
        assert client.post("qwen35mm/api/save_tool_servers", json={"text": text_of(tmp_path)}).status_code == 200
        # Without the page's key, and for another site's script, there is nothing.
        for stranger in (httpx.Client(base_url=server.url), client_of(server, origin="https://evil.example")):
            refused = stranger.post("qwen35mm/api/save_tool_servers", json={"text": "{}"})
            assert refused.status_code in (401, 403, 404)
    finally:
        server.close()
    again = own_page(tmp_path)
    try:
        assert client_of(again).post("qwen35mm/api/start", json={}).json()["tools"] == ["fake"]
    finally:
        again.close()


def test_servers_that_cant_be_read_dont_keep_the_page_from_starting(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text("{")
    server = own_page(tmp_path)
    try:
        found = client_of(server).post("qwen35mm/api/tool_servers", json={}).json()
        assert (found["servers"], found["text"]) == ([], "{")
    finally:
        server.close()


def test_calls_of_a_temporary_chat_and_their_files_end_with_it(tmp_path: Path) -> None:
    server = own_page(tmp_path / "data", tools=[fake(tmp_path)])
    try:
        client = client_of(server)

        def ask(method: str, **arguments: Any) -> Any:
            return client.post(f"qwen35mm/api/{method}", json=arguments).json()

        def watch(reply: str) -> None:
            client.post("qwen35mm/watch", json={"answers": [reply]})

        text = 'call fake__picture {"text": "words that nobody keeps"}'
        sent = ask("send", text=text, settings={"tools": "fake"}, temporary=True)
        watch(sent["reply"])
        conversation = sent["chat"]["id"]
        (call,) = ask("open", conversation=conversation)["messages"][-1]["calls"]
        said = {"conversation": conversation, "node": sent["reply"], "answers": {call["id"]: "always"}}
        watch(ask("run_calls", **said)["reply"])
        result = ask("open", conversation=conversation)["messages"][-2]
        assert (result["text"], len(result["attachments"])) == ("One pixel.", 1)
        shown = f"qwen35mm/media/{result['attachments'][0]['digest']}"
        picture = client.get(shown).content
        assert ask("list", query="nobody")["conversations"] == []
        ask("end_temporary", conversation=conversation)
        assert client.get(shown).status_code == 404
        # What is allowed for good is the person's, as all preferences are.
        assert ask("tool_servers")["allowed"] == ["fake/picture"]
        assert picture.startswith(b"\x89PNG")
        assert held(tmp_path / "data", b"fake/picture") != []
        assert held(tmp_path / "data", b"nobody keeps") == held(tmp_path / "data", picture) == []
    finally:
        server.close()


def test_of_several_people_only_those_who_are_named_use_tools_and_nobody_names_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "COST", (2, 8, 1))
    people = AccountFile(tmp_path / "accounts")
    for name, password in WORDS.items():
        people.add(name, password)
    tools = [fake(tmp_path)]
    server = serve(
        FakeBackend(), port=0, auth_file=tmp_path / "accounts", guests=True, tools=tools, tool_accounts=["ann"]
    )
    try:
        for name, names in (("ann", ["fake"]), ("bob", []), (None, [])):
            visitor = Visitor(server)
            if name is not None:
                visitor.log_in(name)
            assert visitor.ask("start").json()["tools"] == names
            found = visitor.ask("tool_servers").json()
            assert ([each["name"] for each in found["servers"]], found["text"]) == (names, None)
            # Where it runs is the machine's affair.
            assert str(tmp_path) not in json.dumps(found)
            assert visitor.ask("save_tool_servers", text=text_of(tmp_path)).status_code == 404
            # What a chat's settings say gives nobody a tool.
            sent = visitor.ask("send", text="echo hi", settings={"tools": "fake"}).json()
            with visitor.client.stream("POST", "qwen35mm/watch", json={"answers": [sent["reply"]]}) as answer:
                assert answer.read()
            assert (tmp_path / "fake.log").exists() is True
            assert num_starts(tmp_path) == 1
    finally:
        server.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"token": ""}, "your own page with its token"),
        ({"host": "0.0.0.0"}, "strangers could use them"),
        ({"auth": [("ann", "secret words")]}, "needs --mcp-accounts"),
        ({"tool_accounts": ["ann"]}, "which accounts"),
    ],
)
def test_tools_are_for_nobody_who_wasnt_named(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve(FakeBackend(), port=0, tools=[fake(tmp_path)], **how)
    with pytest.raises(ConfigError, match="--mcp-accounts"):
        serve(FakeBackend(), port=0, auth=[("ann", "secret words")], tool_accounts=["ann"])
