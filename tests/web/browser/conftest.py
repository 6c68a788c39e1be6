"""Fixtures of the browser tests. They live for this folder, which holds no asynchronous test: see
`open_browser`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from qwen35mm.assets import asset_path
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage, chat_pages, find_chromium, open_browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        reason = "no Chromium was found; install one, or name it in QWEN35MM_CHROMIUM"
        if os.environ.get("QWEN35MM_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def fake_server() -> Iterator[tuple[FakeBackend, Server]]:
    backend = FakeBackend()
    server = serve(backend, port=0)
    yield backend, server
    server.close()


@pytest.fixture
def backend(fake_server: tuple[FakeBackend, Server]) -> FakeBackend:
    """The backend behind `open_page`, without what earlier tests did."""
    fake_server[0].calls.clear()
    return fake_server[0]


@pytest.fixture(autouse=True)
def empty_store(request: pytest.FixtureRequest) -> None:
    """No test sees another one's conversations."""
    if "fake_server" in request.fixturenames:
        server = request.getfixturevalue("fake_server")[1]
        server.store.delete_owner("local")


@pytest.fixture
def open_page(browser: Browser, fake_server: tuple[FakeBackend, Server]) -> Iterator[OpenPage]:
    """Opens pages on the fake backend, each a session of its own; they must end without a complaint."""
    with chat_pages(browser, fake_server[1].address) as opener:
        yield opener


@pytest.fixture(scope="package")
def tab(browser: Browser, fake_server: tuple[FakeBackend, Server]) -> Iterator[ChatPage]:
    page = ChatPage(browser, fake_server[1].address)
    page.leave()
    yield page
    page.close()


@pytest.fixture
def page(tab: ChatPage) -> Iterator[ChatPage]:
    """A page on the fake backend as at a first visit, in a tab that all tests of this folder share."""
    tab.visit()
    yield tab
    tab.leave()


@pytest.fixture
def samples() -> Path:
    return asset_path("samples")
