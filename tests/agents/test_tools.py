"""The page with real tool servers from npm and PyPI, in Chromium, with a scripted model (`make test-agents`)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock
from playwright.sync_api import expect

from qwen35mm.assets import asset_path
from qwen35mm.contract import ToolCall
from qwen35mm.model import LoadedModel
from qwen35mm.tools.config import ToolServer
from qwen35mm.web import Server, serve
from tests.agents.programs import DONE, Program
from tests.agents.scripted import Said, ScriptedBackend, is_continued
from tests.agents.test_programs import _BUILD, Session, _installed, _node
from tests.web.browser import ChatPage, find_chromium, open_browser

pytestmark = [pytest.mark.agents, pytest.mark.browser]

PAGE = "data:text/html,<title>Shown</title><body style='background:teal'><h1>A page</h1>"


@dataclass(frozen=True)
class Tools:
    """A server of tools.

    Attributes:
        package: npm's or PyPI's, with its version.
        command: in the installation's folder of executables, and its arguments, from the session's folder.
        calls: what the model calls, from that folder, one a turn.
        shown: what the last result says; `is_picture` if it is one.
    """

    name: str
    package: str
    command: Callable[[Path], list[str]]
    calls: Callable[[Path], list[ToolCall]]
    shown: str
    is_picture: bool = False
    is_npm: bool = True


SERVERS = [
    Tools(
        "files",
        "@modelcontextprotocol/server-filesystem@2026.8.31",
        lambda folder: ["mcp-server-filesystem", str(folder)],
        lambda folder: [
            ToolCall("files__read_text_file", {"path": str(folder / "notes.txt")}),
            ToolCall("files__read_media_file", {"path": str(folder / "picture.jpg")}),
        ],
        "",
        is_picture=True,
    ),
    Tools(
        "time",
        "mcp-server-time==2026.10.19",
        lambda folder: ["mcp-server-time", "--local-timezone", "UTC"],
        lambda folder: [
            ToolCall("time__convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})
        ],
        "T21:00",
        is_npm=False,
    ),
    Tools(
        "browser",
        "@playwright/mcp@0.0.83",
        lambda folder: [
            *("playwright-mcp", "--headless", "--isolated", "--no-sandbox"),
            *("--executable-path", str(find_chromium()), "--output-dir", str(folder)),
        ],
        lambda folder: [
            ToolCall("browser__browser_navigate", {"url": PAGE}),
            ToolCall("browser__browser_take_screenshot", {}),
        ],
        "creenshot",
        is_picture=True,
    ),
]


@contextlib.contextmanager
def serving(demo: LoadedModel, tools: Tools, folder: Path) -> Iterator[tuple[Server, ScriptedBackend]]:
    program = Program(tools.name, tools.package, "", lambda folder: [], is_npm=tools.is_npm)
    _BUILD.mkdir(exist_ok=True)
    with FileLock(_BUILD / f"{program.folder}.lock"):
        binaries = _installed(program)
    command, *args = tools.command(folder)
    path = f"{_node()}:/usr/local/bin:/usr/bin:/bin"
    given = ToolServer(tools.name, str(binaries / command), tuple(args), {"PATH": path})
    calls = [Said(thinking="I look.", calls=(call,)) for call in tools.calls(folder)]
    backend = ScriptedBackend(demo, Session([*calls, Said(DONE)]))
    server = serve(backend, port=0, tools=[given])
    try:
        yield server, backend
    finally:
        server.close()


@pytest.mark.parametrize("tools", SERVERS, ids=lambda tools: tools.name)
def test_the_page_calls_a_real_servers_tools(tools: Tools, demo: LoadedModel, tmp_path: Path) -> None:
    if find_chromium() is None:
        pytest.skip("no Chromium was found")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\n")
    shutil.copy(asset_path("samples") / "two-shapes.jpg", folder / "picture.jpg")
    num_calls = len(tools.calls(folder))
    with serving(demo, tools, folder) as (server, backend), open_browser() as browser:
        page = ChatPage(browser, server.address)
        page.add(f"Tools: {tools.name}")
        page.ask("Look, please.")
        for number in range(num_calls):
            allow = page.page.get_by_role("button", name="Allow once")
            # npm's servers take a while to start.
            expect(allow).to_be_visible(timeout=60_000)
            allow.click()
            expect(page.answers).to_have_count(number + 2, timeout=60_000)
        expect(page.answers.last.locator(".answer")).to_have_text(DONE, timeout=60_000)
        results = page.page.locator(".message.tool")
        expect(results).to_have_count(num_calls)
        if tools.is_picture:
            expect(results.last.locator("img")).to_be_visible()
        if tools.shown:
            results.last.locator("summary").first.click()
            expect(results.last.locator("pre").first).to_contain_text(tools.shown)
        page.close()
    asked = backend.asked
    print(f"{tools.name}: tokens read a turn: {', '.join(f'{each.num_read_tokens:,}' for each in asked)}")
    assert bool(asked[-1].prompt.spans) is tools.is_picture
    assert all(is_continued(before.prompt, after.prompt) for before, after in pairwise(asked))
    # The tools and the question are read once; a turn reads its call and its result.
    assert all(after.num_cached_tokens >= before.num_cached_tokens > 0 for before, after in pairwise(asked[1:]))
