"""Of Gradio's routes only those are there that the page, its clients and a Space need; the others are a stranger's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gradio as gr
import pytest
from gradio.routes import App

from tests.security.conftest import OpenFront

# What gradio_client asks, and a Space. The page and the programs' API have addresses of the same names.
_NEEDED = re.compile(
    r"/|/login/?|/config/?|/manifest\.json|/pwa_icon(/\{size\})?|/favicon\.ico|/robots\.txt|/openapi\.json"
    r"|/gradio_api/(info/?|startup-events|upload|cancel|reset/?|heartbeat/.*|queue/(join|data)|call/\{api_name\}(/.*)?)"
)


def _routes() -> Iterator[tuple[str, str]]:
    """All that the installed Gradio answers, by its own word: a newer one may have more."""
    with gr.Blocks(analytics_enabled=False) as blocks:
        pass
    found: list[Any] = list(App.create_app(blocks).routes)
    for route in found:
        found += getattr(getattr(route, "original_router", None), "routes", [])
        for method in sorted(getattr(route, "methods", None) or ()):
            yield method, route.path


ROUTES = sorted({each for each in _routes() if not _NEEDED.fullmatch(each[1])})


def test_gradios_routes_were_found() -> None:
    assert ("GET", "/gradio_api/file={path_or_url:path}") in ROUTES
    assert ("POST", "/gradio_api/process_recording") in ROUTES
    assert len(ROUTES) > 40


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_what_nobody_needs_of_gradio_is_not_there(method: str, path: str, open_front: OpenFront) -> None:
    path = re.sub(r"\{[^}]*\}", "a", path)
    how: dict[str, Any] = {"json": {"data": []}} if method == "POST" else {}
    # Some go on without an end.
    with open_front("chat").client() as client, client.stream(method, path, **how) as answer:
        pass
    assert answer.status_code in (404, 405)


@pytest.mark.parametrize(
    "path",
    [
        *("/gradio_api/file=/etc/passwd", "/gradio_api/file=pyproject.toml", "/gradio_api/file/etc/passwd"),
        *("/gradio_api//file=/etc/passwd", "/gradio_api/./file=/etc/passwd", "/gradio_api/%66ile=/etc/passwd"),
        *("/x/../gradio_api/file=/etc/passwd", "//gradio_api/file=/etc/passwd", "/GRADIO_API/file=/etc/passwd"),
        *("/gradio_api/file=http://127.0.0.1:1/", "/gradio_api/proxy=https://example.org/", "/monitoring"),
        "/theme.css",
        *("/gradio_api/process_recording", "/gradio_api/run-history/connect", "/gradio_api/vibe-edit"),
    ],
)
def test_no_other_way_of_writing_it_leads_there(path: str, open_front: OpenFront) -> None:
    with open_front("chat").client() as client:
        for method in ("GET", "POST", "HEAD"):
            with client.stream(method, path) as answer:
                assert answer.status_code in (404, 405), method


def test_a_form_is_no_way_to_make_a_file(open_front: OpenFront) -> None:
    """`process_recording` takes any form and writes a video of any length."""
    front = open_front("chat")
    files = {"video": ("a.webm", b"\x1a\x45\xdf\xa3" * 1000)}
    before = sorted(front.folder.rglob("*"))
    with front.client() as client:
        for path in ("/gradio_api/process_recording", "/gradio_api/component_server", "/gradio_api/upload_progress"):
            assert client.post(path, data={"params": "{}"}, files=files).status_code in (404, 405)
    assert [each for each in sorted(front.folder.rglob("*")) if each not in before] == []
