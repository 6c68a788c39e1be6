"""The page's visual language: one grid for space and corners, two sizes of text in controls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.assets import asset_path

GRID_PX = 4
STYLES = sorted(asset_path("web/styles").glob("*.css"))
RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
SPACE = re.compile(r"^(?:padding|margin|(?:row-|column-)?gap|border-radius)\b")
SIZE = re.compile(r"^font(?:-size)?$")
# Selectors whose space lies off the grid, and why.
OFF_GRID = {".mark-point": "half of its own size, so that its middle lies on the point"}
# Selectors whose colour is no grey and none of the page's own, and why.
OWN_COLOUR = {".of-": "parts of a bar, which must be told from each other", ".code": "colours of code"}
# Selectors whose text has a size of its own, and why.
OWN_SIZE = {
    ".welcome h2": "the title of an empty page",
    ".temporary-mark": "only its icon is seen on a narrow page",
    ".prose": "sizes of an answer's parts, relative to its text",
}


def declarations(css: str) -> Iterator[tuple[str, str, str]]:
    """The selector, the name and the value of each declaration."""
    for rule in RULE.finditer(re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
        for each in rule[2].split(";"):
            name, _, value = each.partition(":")
            if value:
                yield " ".join(rule[1].split()), name.strip(), " ".join(value.split())


def off_grid(css: str) -> list[str]:
    found = []
    for selector, name, value in declarations(css):
        sizes = re.findall(r"([\d.]+)px", value) if SPACE.match(name) else []
        if any(float(size) % GRID_PX for size in sizes):
            found.append(f"{selector}: {name}: {value}")
    return found


def own_colours(css: str) -> list[str]:
    """Colours that stand outside the page's variables; greys, as over pictures, are none."""
    found = []
    for selector, name, value in declarations(css):
        for colour in re.findall(r"#([0-9a-f]{3}|[0-9a-f]{6})\b", value):
            parts = [int(part * (6 // len(colour)), 16) for part in re.findall("." * (len(colour) // 3), colour)]
            if max(parts) - min(parts) > 16 and selector != ":root":
                found.append(f"{selector}: {name}: {value}")
    return found


def own_sizes(css: str) -> list[str]:
    found = []
    for selector, name, value in declarations(css):
        if SIZE.match(name) and value != "inherit" and not re.match(r"var\(--(small|chrome|reading)\)", value):
            found.append(f"{selector}: {name}: {value}")
    return found


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.stem)
def test_space_lies_on_the_grid_and_texts_and_colours_are_the_page_s(path: Path) -> None:
    css = path.read_text("utf-8")
    assert [each for each in off_grid(css) if not each.startswith(tuple(OFF_GRID))] == []
    assert [each for each in own_sizes(css) if not each.startswith(tuple(OWN_SIZE))] == []
    assert [each for each in own_colours(css) if not each.startswith(tuple(OWN_COLOUR))] == []


def test_exceptions_are_needed_and_breaches_are_found() -> None:
    css = "".join(path.read_text("utf-8") for path in STYLES)
    pairs = ((OFF_GRID, off_grid(css)), (OWN_SIZE, own_sizes(css)), (OWN_COLOUR, own_colours(css)))
    for exceptions, found in pairs:
        assert [name for name in exceptions if not any(each.startswith(name) for each in found)] == []
    assert off_grid("a { padding: 8px 6px; gap: 4px } @media x { b { margin-top: -3px } }") == [
        "a: padding: 8px 6px",
        "b: margin-top: -3px",
    ]
    assert own_colours("a { color: #f00; background: #222 } b { color: #c0262d }") == [
        "a: color: #f00",
        "b: color: #c0262d",
    ]
    assert own_sizes("a { font-size: 13px; font: inherit } b { font: var(--small) / 1.5 x }") == ["a: font-size: 13px"]
