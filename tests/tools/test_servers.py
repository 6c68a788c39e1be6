"""Sessions with servers that fail in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.errors import ToolError
from qwen35mm.tools import servers as module
from qwen35mm.tools import transports
from qwen35mm.tools.config import ToolServer
from qwen35mm.tools.servers import Tool, ToolServers
from tests.tools.fakes import fake, num_starts, redescribe


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolServers]:
    monkeypatch.setattr(module, "_PING_S", 0.05)
    monkeypatch.setattr(transports, "_PATIENCE_S", 0.05)
    with ToolServers([fake(tmp_path)]) as servers:
        yield servers


async def tools_of(servers: ToolServers) -> dict[str, Tool]:
    return {tool.name: tool for tool in await servers.tools(servers.names)}


async def test_a_server_is_started_by_its_first_use_and_answers_in_parts(servers: ToolServers, tmp_path: Path) -> None:
    assert servers.listed(["fake"]) == ()
    tools = await tools_of(servers)
    assert [*tools] == sorted(tools)
    assert tools["echo"].shown == "fake__echo"
    assert (await servers.call(tools["echo"], {"text": "hi"})).text == "hi"
    answer = await servers.call(tools["picture"], {})
    assert (answer.text, answer.files[0].data[:4], answer.has_failed) == ("One pixel.", b"\x89PNG", False)
    assert (await servers.call(tools["file"], {})).files[0].name == "notes.txt"
    assert num_starts(tmp_path) == 1


async def test_a_huge_result_is_taken_whole(servers: ToolServers) -> None:
    answer = await servers.call((await tools_of(servers))["huge"], {})
    assert len(answer.text) == 3_000_000


@pytest.mark.parametrize(
    ("name", "words"),
    [("die", "ended during the call"), ("endless", "ended during the call"), ("hang", "no result in 0.2 seconds")],
)
async def test_a_server_that_dies_floods_or_hangs_is_started_anew(
    servers: ToolServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(transports, "MAX_MESSAGE_BYTES", 1 << 20)
    servers.replace([fake(tmp_path, timeout_s=0.2)])
    tools = await tools_of(servers)
    answer = await servers.call(tools[name], {})
    assert words in answer.text
    assert answer.has_failed
    assert (await servers.call(tools["echo"], {"text": "again"})).text == "again"
    assert num_starts(tmp_path) == 2


async def test_a_call_that_is_cancelled_ends_at_once_and_the_next_one_works(servers: ToolServers) -> None:
    tools = await tools_of(servers)
    calling = asyncio.ensure_future(servers.call(tools["hang"], {}))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert (await servers.call(tools["echo"], {"text": "next"})).text == "next"


async def test_each_person_has_a_session_of_their_own(servers: ToolServers, tmp_path: Path) -> None:
    await servers.tools(["fake"], "ann")
    await servers.tools(["fake"], "bob")
    assert num_starts(tmp_path) == 2
    assert servers.listed(["fake"], "eve") == ()


async def test_equal_names_of_two_servers_are_told_apart(tmp_path: Path) -> None:
    with ToolServers([fake(tmp_path, "a"), fake(tmp_path, "a__a")]) as servers:
        shown = [tool.shown for tool in await servers.tools(["a__a", "a"])]
        assert len(set(shown)) == len(shown)
        assert shown == [tool.shown for tool in await servers.tools(["a", "a__a"])]


async def test_another_description_is_another_digest(servers: ToolServers, tmp_path: Path) -> None:
    before = (await tools_of(servers))["echo"]
    assert (await tools_of(servers))["echo"] == before
    redescribe(tmp_path, "and sends it to me")
    assert (await tools_of(servers))["echo"].digest != before.digest


async def test_a_server_that_cant_start_is_told_of_in_words(tmp_path: Path) -> None:
    gone = ToolServer("gone", str(tmp_path / "no-such-program"))
    closed = ToolServer("closed", url="http://127.0.0.1:9/mcp")
    with ToolServers([gone, closed]) as servers:
        for name in ("gone", "closed"):
            with pytest.raises(ToolError, match=f"{name} doesn't answer"):
                await servers.tools([name])
        with pytest.raises(ToolError, match="no tool server other"):
            await servers.tools(["other"])


async def test_a_server_gets_its_own_variables_and_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWEN35MM_BACKEND_KEY", "secret")
    script = tmp_path / "show.py"
    script.write_text(f"import os, pathlib\npathlib.Path({str(tmp_path / 'env')!r}).write_text(repr(dict(os.environ)))")
    server = fake(tmp_path)
    shown = ToolServer("env", server.command, ("-S", "-E", str(script)), {"OWN": "mine"})
    with ToolServers([shown]) as servers, pytest.raises(ToolError):
        await servers.tools(["env"])
    seen = (tmp_path / "env").read_text()
    assert "secret" not in seen
    assert "mine" in seen


async def test_what_a_server_started_ends_with_it(servers: ToolServers, tmp_path: Path) -> None:
    await servers.tools(["fake"])
    (session,) = servers._sessions.values()
    servers.replace([])
    assert session._task is not None
    assert session._task.done()
