"""Tools on the page: a server is named, switched on, asked for, and runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.tools.fakes import fake
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser


def test_a_tool_is_switched_on_asked_for_and_then_always_allowed(
    page: ChatPage, backend: FakeBackend, tmp_path: Path
) -> None:
    server = {name: asdict(fake(tmp_path))[name] for name in ("command", "args")}
    panel = page.open_settings()
    panel.get_by_text("MCP servers", exact=True).click()
    box = panel.get_by_role("textbox", name="MCP servers")
    box.fill("{")
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.get_by_role("alert")).to_contain_text("isn't JSON")
    box.fill(json.dumps({"mcpServers": {"fake": server}}))
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.locator(".servers")).to_contain_text("fake_server.py")
    panel.get_by_role("button", name="Close settings").click()
    page.add("Tools: fake")
    # They are no default of a model.
    panel = page.open_settings(advanced=True)
    panel.get_by_role("button", name="Reset to model defaults").click()
    panel.get_by_role("button", name="Close settings").click()

    page.ask('call fake__picture {"text": "<b>all</b>"}')
    call = page.page.locator(".call")
    expect(call.locator("pre")).to_have_text('{\n  "text": "<b>all</b>"\n}')
    # The model's answer is over, and nothing has run.
    expect(page.stop_button).to_have_count(0)
    assert len(backend.calls) == 1
    # What the program didn't hear of can be said again.
    page.page.route("**/api/run_calls", lambda route: route.abort("aborted"), times=1)
    call.get_by_role("button", name="Always allow this tool").click()
    call.get_by_role("button", name="Always allow this tool").click()
    page.wait_answered(2)
    result = page.page.locator(".message.tool")
    expect(result.locator("img")).to_be_visible()
    result.get_by_text("Result of fake · picture").click()
    expect(result.locator("pre")).to_have_text("One pixel.")
    assert len(backend.calls[-1].messages[-1].media) == 1

    page.tool(page.answers.last, "Delete").click()
    page.dialog.get_by_role("button", name="Delete").click()
    expect(page.answers).to_have_count(1)
    page.tool(result, "Answer with this result").click()
    page.wait_answered(2)

    # It may run, but the page couldn't say so.
    page.page.route("**/api/run_calls", lambda route: route.abort("aborted"), times=1)
    page.ask("call fake__picture")
    expect(page.page.get_by_text("this call hasn't run yet")).to_be_visible()
    page.page.get_by_role("button", name="Allow once").click()
    expect(result).to_have_count(2)
    page.wait_answered(4)
    page.page.reload()
    expect(result).to_have_count(2)
    expect(page.page.get_by_role("button", name="Allow once")).to_have_count(0)

    panel = page.open_settings()
    panel.get_by_role("button", name="Ask again before fake/picture").click()
    expect(panel.get_by_text("Runs without asking")).to_have_count(0)
    panel.get_by_text("MCP servers", exact=True).click()
    panel.get_by_role("textbox", name="MCP servers").fill('{"mcpServers": {}}')
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.locator(".servers")).to_have_count(0)
