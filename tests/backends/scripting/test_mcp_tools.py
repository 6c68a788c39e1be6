"""Tools of MCP servers in scripts and in `ask`: the same servers, asked for by a function or at the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwen35mm import McpTools
from qwen35mm.backends.scripting.mcp_tools import _content
from qwen35mm.backends.scripting.model import ScriptedModel
from qwen35mm.cli import app
from qwen35mm.contract import Image, SamplingParams, ToolCall
from qwen35mm.errors import ConfigError, RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.settings import ModelOptions
from qwen35mm.tools.answers import AnsweredFile, ToolAnswer
from tests.agents.scripted import Said, ScriptedBackend, calls, script_of
from tests.tools.fakes import fake

ECHO, PICTURE = calls("fake__echo", text="hello"), calls("fake__picture")


class Scripted(ScriptedBackend, ScriptedModel):
    """The scripted model, for scripts."""

    @property
    def default_params(self) -> SamplingParams:
        return self.loaded.generation

    @property
    def most_at_once(self) -> int:
        return 1

    def close(self) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    server = fake(tmp_path)
    return {"mcpServers": {"fake": {"command": server.command, "args": list(server.args)}}}


@pytest.fixture
def approved() -> list[ToolCall]:
    return []


@pytest.fixture
def servers(config: dict[str, Any], approved: list[ToolCall]) -> Iterator[McpTools]:
    def approve(call: ToolCall) -> bool:
        approved.append(call)
        return call.arguments.get("text") != "no"

    with McpTools(config, approve=approve) as servers:
        yield servers


def test_a_chat_calls_them_as_it_calls_functions(
    demo: LoadedModel, servers: McpTools, approved: list[ToolCall]
) -> None:
    backend = Scripted(demo, script_of([ECHO, calls("fake__echo", text="no"), PICTURE, Said("Done.")]))
    chat = backend.chat(tools=servers.tools())
    assert chat.ask("Do it.").text == "Done."
    assert [call.name for call in approved] == ["fake__echo", "fake__echo", "fake__picture"]
    results = [message for message in chat.messages if message.role == "tool"]
    assert [each.text for each in results] == ["hello", "The person didn't allow this call.", "One pixel."]
    assert isinstance(results[-1].media[0], Image)


async def test_an_event_loop_calls_them_too(demo: LoadedModel, servers: McpTools) -> None:
    backend = Scripted(demo, script_of([ECHO, Said("Done.")]))
    chat = backend.chat(tools=await servers.atools("fake"))
    assert (await chat.aask("Do it.")).text == "Done."
    assert chat.messages[-2].text == "hello"


def test_results_are_cut_and_say_what_isnt_read() -> None:
    def content(text: str, *files: AnsweredFile) -> Any:
        return _content(ToolAnswer(text, files))

    long = AnsweredFile("long.md", b"y" * 50_000)
    cut = content("x" * 50_000, long, long)
    assert cut.count("x") == 50_000
    assert 9_000 < cut.count("y") <= 10_000
    assert cut.count("[cut here: ") == 2
    assert content("x" * 60_001).endswith("x\n[cut here: 1 more characters]")
    assert "a.pdf is left out: PDFs" in content("", AnsweredFile("a.pdf", b"%PDF-1.7"))
    assert content("short") == "short"
    text, picture = content("short", AnsweredFile("a.png", b"\x89PNG"))
    assert (text, type(picture)) == ("short", Image)


def test_a_function_has_to_say_what_may_run(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="approve must be a function"):
        McpTools(config, approve=True)  # pyright: ignore[reportArgumentType]


class Terminal:
    """Runs `ask` with a scripted model and a person at the terminal."""

    def __init__(self, demo: LoadedModel, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._demo, self._config, self._patch = demo, config, monkeypatch

    def ask(self, said: list[Said], *more: str, answers: str | None = None) -> Any:
        backend = Scripted(self._demo, script_of(said))
        self._patch.setattr(ModelOptions, "load", lambda self, **how: backend)
        self._patch.setattr(sys.modules["qwen35mm.cli.ask"], "_is_asked_at_a_terminal", lambda: answers is not None)
        done = CliRunner().invoke(app, ["ask", "--mcp-config", str(self._config), *more, "Do it."], input=answers)
        self.asked = backend.asked
        return done


@pytest.fixture
def terminal(demo: LoadedModel, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    (tmp_path / "mcp.json").write_text(json.dumps(config))
    return Terminal(demo, tmp_path / "mcp.json", monkeypatch)


def test_ask_asks_before_a_call_until_always(terminal: Terminal) -> None:
    done = terminal.ask([ECHO, PICTURE, ECHO, Said("Done.")], answers="a\nn\n")
    assert done.exit_code == 0, done.output
    assert '"text": "hello"' in done.stderr
    assert done.stdout.endswith("Done.\n")
    assert done.stderr.count("Run it?") == 2
    results = [message.text for message in terminal.asked[-1].request.messages if message.role == "tool"]
    assert results == ["hello", "The person didn't allow this call.", "hello"]
    # Each round begins with the one before it.
    assert [each.num_cached_tokens > 0 for each in terminal.asked] == [False, True, True, True]


def test_ctrl_d_at_the_question_stops_ask(terminal: Terminal) -> None:
    done = terminal.ask([ECHO, Said("Done.")], answers="")
    assert done.exit_code == 130
    assert done.stderr.endswith("Stopped.\n")
    assert len(terminal.asked) == 1


def test_where_nobody_can_be_asked_only_what_is_allowed_runs(terminal: Terminal) -> None:
    done = terminal.ask([ECHO, PICTURE, Said("Done.")], "--json", "--allow-tool", "fake__echo")
    assert json.loads(done.stdout)["text"] == "Done."
    assert "--allow-tool fake__picture" in done.stderr
    results = [message.text for message in terminal.asked[-1].request.messages if message.role == "tool"]
    assert results == ["hello", "The person didn't allow this call."]


def test_ask_has_a_budget_of_calls(terminal: Terminal) -> None:
    done = terminal.ask([ECHO] * 3, "--max-calls", "2", "--allow-tool", "fake__echo")
    assert isinstance(done.exception, RequestError)
    assert "more than 2 times" in str(done.exception)
