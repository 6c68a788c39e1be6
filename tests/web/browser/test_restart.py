"""The page is ended and started again: what its disk cache holds is used, and the person is told so."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.web.browser import chat_pages
from tests.web.process import PageProcess

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = [sys.executable, "-m", "tests.web.endless_child", "data"]
CHAT = [sys.executable, "-m", "qwen35mm", "chat", "--port", "0", "--cache-dir", "kept"]
# Together long enough for a part of the prompt to be kept: the demo makes few tokens of a picture.
MEDIA = ("two-shapes.jpg", "moves-right.mp4", "moves-up.mp4")
QUESTION = "Describe the picture."


def ask_once(browser: Browser, folder: Path, files: list[Path]) -> tuple[str, str]:
    """Starts the chat, asks about the files in a new page, ends the chat; the answer and what it cost."""
    process = PageProcess(CHAT, folder)
    with chat_pages(browser, process.wait_for_url()) as opener:
        page = opener()
        page.ask(QUESTION, files)
        answer = page.wait_answered()
        cost = page.open_cost().inner_text().replace("\n", " ")
    assert process.end() == (0, "")
    return answer, cost


def test_what_was_shown_survives_a_kill(browser: Browser, tmp_path: Path) -> None:
    """kill -9 in the middle of an answer: what was seen of it is there again, says that it was cut off, and goes on."""
    environment = {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    process = PageProcess(ENDLESS, tmp_path, **environment)
    with chat_pages(browser, process.wait_for_url()) as opener:
        page = opener()
        page.ask("slow")
        page.wait_until(lambda: len(page.answers.locator(".answer").inner_text()) > 500)
        shown = page.answers.locator(".answer").inner_text().strip()
        page.server_ends = True
        process.kill()
    again = PageProcess(ENDLESS, tmp_path, **environment)
    with chat_pages(browser, again.wait_for_url()) as opener:
        page = opener()
        page.chats.locator("a").click()
        expect(page.answers.locator(".answer")).to_contain_text(shown)
        expect(page.answers.locator(".problem")).to_contain_text("stopped during this answer")
        page.tool(page.answers.last, "Continue").click()
        page.wait_ending("and its end.")
    assert again.end() == (0, "")


@pytest.mark.slow
def test_media_are_known_after_a_restart(browser: Browser, samples: Path, tmp_path: Path) -> None:
    files = [samples / name for name in MEDIA]
    cold_answer, cost = ask_once(browser, tmp_path, files)
    assert "From the cache nothing" in cost
    kept = {path.suffix for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert {".kv", ".state", ".vision"} <= kept

    warm_answer, cost = ask_once(browser, tmp_path, files)
    assert warm_answer == cold_answer
    num_cached = re.search(r"From the cache (\d+) tokens \((\d+) on disk\)", cost)
    num_prompt_tokens = re.search(r"Prompt (\d+) tokens", cost)
    assert num_cached, cost
    assert num_prompt_tokens, cost
    assert num_cached[1] == num_cached[2]
    assert int(num_prompt_tokens[1]) / 2 < int(num_cached[1]) < int(num_prompt_tokens[1])
