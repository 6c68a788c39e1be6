"""The page's scripts and styles, each joined into one file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from qwen35mm.assets import asset_path
from qwen35mm.web.serving.bundles import Bundles, join_modules

WEB = asset_path("web")
BASE = "qwen35mm/web/"
# All that a first visit loads before it can ask for a chat, packed: 0.5 s of a slow line.
MOST_BYTES = 100_000


def client_of(folder: Path) -> TestClient:
    return TestClient(Starlette(routes=[*Bundles(folder, BASE).routes()]))


def test_the_page_loads_one_script_and_one_style_sheet_packed_and_kept() -> None:
    client = client_of(WEB)
    page = client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    styles, script = re.findall(r'(?:href|src)="(qwen35mm/web/[^"]+\?\w+)"', page.text)
    assert page.text.count("stylesheet") == page.text.count("<script") == 1
    joined = {address: client.get(f"/{address}") for address in (styles, script)}
    for address, answer in joined.items():
        assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip"), address
        assert "immutable" in answer.headers["cache-control"]
        assert client.get(f"/{address}", headers={"accept-encoding": "identity"}).text == answer.text
        assert client.get(f"/{address}0").headers["cache-control"] == "no-cache", "of another version"
    (lines,) = re.findall(r"sourceMappingURL=(.*)", joined[script].text)
    assert "immutable" in client.get(f"/{BASE}{lines}").headers["cache-control"]
    assert sum(int(answer.headers["content-length"]) for answer in [page, *joined.values()]) < MOST_BYTES
    # In the page's order, since later rules have the last word.
    sheets = re.findall(r'href="qwen35mm/web/(styles/[^"]+)"', (WEB / "index.html").read_text("utf-8"))
    assert joined[styles].text == "".join((WEB / each).read_text("utf-8") for each in sheets)


def test_each_module_is_joined_once_after_those_that_it_imports() -> None:
    script = join_modules(WEB, "main.js")
    assert script.modules[-1] == "main.js"
    assert len(script.modules) == len(set(script.modules)) > 40
    assert re.findall(r"^(?:import|export)\b.*|import\.meta(?!\.url\))", script.text, re.MULTILINE) == []
    for path in script.modules:
        text = (WEB / path).read_text("utf-8")
        for other in re.findall(r'^(?:import [^;]*|\} )from "(\.[^"]+)";$', text, re.MULTILINE):
            name = (WEB / path).parent.joinpath(other).resolve().relative_to(WEB.resolve()).as_posix()
            assert script.modules.index(name) < script.modules.index(path)


def test_a_source_map_names_the_module_and_line_of_each_line() -> None:
    script = join_modules(WEB, "main.js")
    lines = script.text.split("\n")
    for section in json.loads(script.lines)["sections"]:
        (path,) = section["map"]["sources"]
        start, num_lines = section["offset"]["line"], section["map"]["mappings"].count(";") + 1
        source = (WEB / path).read_text("utf-8").split("\n")
        assert num_lines == len(source)
        assert lines[start - 1].startswith(f'modules["{path}"]')
        ends = [at for at, line in enumerate(source) if line == "}"]
        assert [lines[start + at] for at in ends] == ["}"] * len(ends)


def test_a_changed_module_has_another_address(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    shutil.copytree(WEB, folder)
    client = client_of(folder)
    before = client.get("/").text
    assert client.get("/").text == before
    with (folder / "common/words.js").open("a") as file:
        file.write("\nwindow.isChanged = true;\n")
    after = client.get("/").text
    assert after != before
    assert "window.isChanged" in client.get(f"/{BASE}page.js").text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("export default 1;\n", "can't be joined with other modules: export default 1;"),
        ('import * as other from "./b.js";\n', "can't be joined"),
        ("export let count = 0;\n", "can't be joined"),
        ('import { a } from "./a.js";\n', "imports itself: a.js > a.js"),
    ],
)
def test_a_module_that_cannot_be_joined_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.js").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        join_modules(tmp_path, "a.js")


def test_only_lines_of_comments_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text(
        "// First.\n/** A number. */\nexport const A = 1; // One.\n/** @type {B} */ (b);\n/**\n * More.\n */\nc();\n"
    )
    body = "\n\nconst A = 1; // One.\n/** @type {B} */ (b);\n\n\n\nc();\n"
    assert body in join_modules(tmp_path, "a.js").text
