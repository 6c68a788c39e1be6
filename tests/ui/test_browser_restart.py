"""The page is ended and started again: what its disk cache holds is used, and the person is told so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.browser import chat_pages
from tests.ui.process import PageProcess

pytestmark = pytest.mark.browser

CHAT = [sys.executable, "-m", "qwen35mm", "chat", "--port", "0", "--cache-dir", "kept"]
# Together long enough for a part of the prompt to be kept: the demo makes few tokens of a picture.
MEDIA = ("two-shapes.jpg", "moves-right.mp4", "moves-up.mp4")
QUESTION = "Describe the picture."


def ask_once(browser: Browser, folder: Path, files: list[Path]) -> tuple[str, str]:
    """Starts the chat, asks about the files in a new page, ends the chat; the answer and the status line."""
    process = PageProcess(CHAT, folder)
    with chat_pages(browser, process.wait_for_url()) as opener:
        page = opener()
        page.ask(QUESTION, files)
        answer = page.wait_answered()
        expect(page.status).to_contain_text("prompt")
        status = page.status.inner_text()
    assert process.end() == (0, "")
    return answer, status


def test_media_are_known_after_a_restart(browser: Browser, samples: Path, tmp_path: Path) -> None:
    files = [samples / name for name in MEDIA]
    cold_answer, status = ask_once(browser, tmp_path, files)
    assert re.search(r"prompt of \d+ tokens$", status), status
    kept = {path.suffix for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert {".kv", ".state", ".vision"} <= kept

    warm_answer, status = ask_once(browser, tmp_path, files)
    assert warm_answer == cold_answer
    found = re.search(r"(\d+) of (\d+) prompt tokens from the disk cache$", status)
    assert found, status
    num_cached, num_prompt_tokens = (int(number) for number in found.groups())
    assert num_prompt_tokens / 2 < num_cached < num_prompt_tokens
