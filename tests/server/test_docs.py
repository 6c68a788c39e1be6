"""/docs and its files; tests/web/browser/test_docs.py opens it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

import pytest

from qwen35mm.server import docs
from tests.server.conftest import HTTP

TYPES = {".js": "text/javascript", "css": "text/css"}


class Addresses(HTMLParser):
    """The addresses that a page names, and whether a script or a style stands in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.found += [value for name in ("src", "href", "action") if (value := named.get(name))]
        if (tag == "script" and "src" not in named) or tag == "style" or {"style", "onclick", "onload"} & {*named}:
            self.inline.append(tag)


def test_all_that_the_page_loads_is_this_servers(address: str) -> None:
    page = HTTP.get(f"{address}/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "http" not in policy
    assert "unsafe" not in policy
    addresses = Addresses(page.text)
    assert addresses.inline == [], "the policy lets no such thing run"
    loaded = [each for each in addresses.found if each != "data:,"]
    assert len(loaded) == 4
    for each in loaded:
        assert urljoin(f"{address}/docs", each).startswith(f"{address}/docs/")
        file = HTTP.get(urljoin(f"{address}/docs", each))
        assert file.headers["content-type"] == f"{TYPES[each[-3:]]}; charset=utf-8"
        assert file.headers["x-content-type-options"] == "nosniff"
        if each.endswith("css"):
            assert [link for link in re.findall(r"url\(([^)]*)|@import", file.text) if "data:" not in link] == []
        # A browser that has it is told so, and sent nothing.
        same = HTTP.get(urljoin(f"{address}/docs", each), headers={"if-none-match": file.headers["etag"]})
        assert (file.headers["cache-control"], same.status_code, same.content) == ("no-cache", 304, b"")


@pytest.mark.parametrize("name", ["index.html", "redoc.standalone.js", "..%2Findex.html", "main.js"])
def test_no_other_file_is_there(address: str, name: str) -> None:
    assert HTTP.get(f"{address}/docs/{name}").status_code == 404


def test_without_the_package_the_extra_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "_PACKAGE", "no_package_of_this_name")
    docs._files.cache_clear()
    answer = HTTP.get(f"{address}/docs")
    assert answer.status_code == 501
    assert "pip install 'qwen35mm[serve]'" in answer.json()["error"]["message"]
