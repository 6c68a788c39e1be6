"""Sessions with servers that fail in every way."""

from __future__ import annotations

import asyncio
import builtins
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import MissingExtraError, ToolError
from qwen35mm.tools import servers as module
from qwen35mm.tools import transports
from qwen35mm.tools.config import ToolServer
from qwen35mm.tools.servers import Tool, ToolServers, _Session
from tests.tools.fakes import fake, num_starts, redescribe


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolServers]:
    monkeypatch.setattr(module, "_PING_S", 0.05)
    monkeypatch.setattr(transports, "_PATIENCE_S", 0.05)
    with ToolServers([fake(tmp_path)]) as servers:
        yield servers


# Only for tests that fail.
PATIENCE_S = 30.0


def session_of(servers: ToolServers) -> _Session:
    (session,) = servers._sessions.values()
    return session


async def at_the_end_of(servers: ToolServers, session: _Session) -> None:
    assert session._task is not None
    await servers._wait(asyncio.wait({session._task}))


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
    [
        ("die", "ended during the call"),
        ("endless", "ended during the call"),
        ("many", "ended during the call"),
        ("hang", "no result in 0.01 seconds"),
    ],
)
async def test_a_server_that_dies_floods_or_hangs_is_started_anew(
    servers: ToolServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(transports, "MAX_MESSAGE_BYTES", 1 << 20)
    tools = await tools_of(servers)
    session, patient = session_of(servers), session_of(servers)._server
    if name == "hang":
        # Only for this call: the others may take as long as the machine does.
        session._server = replace(patient, timeout_s=0.01)
    answer = await servers.call(tools[name], {})
    session._server = patient
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
async def test_what_a_server_started_ends_with_it(servers: ToolServers, tmp_path: Path) -> None:
    tools = await tools_of(servers)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert int((await servers.call(tools["parent"], {"text": str(tmp_path / "pipe")})).text)
        with pytest.raises(BlockingIOError):
            os.read(pipe, 1)
        servers.replace([])
        # Its end: nobody holds it open any more.
        assert select.select([pipe], [], [], PATIENCE_S)[0]
        assert os.read(pipe, 1) == b""
    finally:
        os.close(pipe)


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="Windows has no sessions of processes")
async def test_pipes_that_outlive_a_server_are_closed_with_its_loop(
    servers: ToolServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = await tools_of(servers)
    # It leaves the group that ends with the server, and has the server's error output.
    child = int((await servers.call(tools["parent"], {"text": os.devnull, "leaves": True})).text)
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    (thread,) = [each for each in threading.enumerate() if each.name == "qwen35mm-tools"]
    try:
        servers.close()
        thread.join(PATIENCE_S)
        gc.collect()
    finally:
        os.kill(child, signal.SIGKILL)
    assert unraised == []


async def test_a_server_that_is_still_starting_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "_END_S", 2 * PATIENCE_S)
    silent = ToolServer("silent", sys.executable, ("-S", "-E", "-c", "import sys; sys.stdin.read()"))
    servers = ToolServers([silent])
    asking = asyncio.ensure_future(servers.tools(["silent"]))
    while not servers._sessions:
        await asyncio.sleep(0)
    # It would start for a minute.
    await asyncio.wait_for(asyncio.to_thread(servers.close), PATIENCE_S)
    with pytest.raises(ToolError, match="silent doesn't answer"):
        await asking


async def test_a_server_that_was_ended_for_good_isnt_started_by_a_late_call(
    servers: ToolServers, tmp_path: Path
) -> None:
    tools = await tools_of(servers)
    session = session_of(servers)
    servers.replace([])
    late = await servers._wait(session.call("echo", {"text": "hi"}))
    assert "no longer there" in late.text
    assert "no longer there" in (await servers.call(tools["echo"], {})).text
    servers.close()
    assert "no longer there" in (await servers.call(tools["echo"], {})).text
    assert num_starts(tmp_path) == 1


async def test_an_unused_server_is_ended_and_started_by_the_next_call(
    servers: ToolServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.001)
    tools = await tools_of(servers)
    await at_the_end_of(servers, session_of(servers))
    monkeypatch.setattr(module, "IDLE_S", 900.0)
    assert (await servers.call(tools["echo"], {"text": "anew"})).text == "anew"
    assert num_starts(tmp_path) == 2
    assert not caplog.records


@pytest.mark.parametrize("code", ["sys.exit('no such key')", "input(); sys.exit('no such key')"])
async def test_a_failed_servers_last_words_are_in_the_log(code: str, caplog: pytest.LogCaptureFixture) -> None:
    with ToolServers([ToolServer("sad", sys.executable, ("-S", "-E", "-c", f"import sys; {code}"))]) as servers:
        with pytest.raises(ToolError):
            await servers.tools(["sad"])
        await at_the_end_of(servers, session_of(servers))
    assert any("no such key" in record.message for record in caplog.records if record.levelname == "WARNING")


def test_the_sdk_is_imported_by_the_first_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    load: Any = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *how: (imported.append(name), load(name, *how))[1])
    ToolServers([]).close()
    monkeypatch.undo()
    assert not any(name.startswith("mcp") for name in imported)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtraError, match="tools"):
        ToolServers([])
