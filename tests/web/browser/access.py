"""What a page owes to keyboards, fingers and screen readers, whichever screen it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

AXE = Path(__file__).resolve().parents[3] / "node_modules/axe-core/axe.min.js"
# Where a finger points, WCAG 2.2 asks for as many (2.5.5). A pointer hits less, where there is space around.
FINGER_PX = 44
TARGET_PX = 16
# More than any screen has.
MAX_STOPS = 300
# What has the focus: how much of it can be seen, and where. Inside a text a link is as high as its line.
STOP = """() => {
    const element = document.activeElement;
    // A video's own controls are stops within it.
    const [first, ...others] = walked;
    if (element === document.body || element === others.at(-1)) return null;
    const isNew = !walked.has(element);
    walked.add(element);
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= getComputedStyle(each).opacity;
    const target = (element.matches("[type=checkbox]") && element.closest("label")) || element;
    const { left, top, right, bottom, width, height } = target.getBoundingClientRect();
    const isInside = right > 0 && bottom > 0 && left < innerWidth && top < innerHeight;
    const isInText = element.matches(".prose a, .prose .moment");
    return { isNew, opacity, size: Math.min(width, height), isInside, isInText, html: element.outerHTML.slice(0, 120) };
}"""
VIOLATIONS = """async () => {
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    const told = ({ html, any }) => [html.slice(0, 160), any[0]?.message];
    return violations.flatMap(({ id, nodes }) => nodes.map((node) => [id, ...told(node)]));
}"""
# What folds is as high as a finger needs; what it says is in the middle.
OFF_MIDDLE = """() => {
    const middle = ({ top, bottom }) => (top + bottom) / 2;
    const range = document.createRange();
    return [...document.querySelectorAll("summary")].filter((summary) => {
        range.selectNodeContents(summary);
        return Math.abs(middle(range.getBoundingClientRect()) - middle(summary.getBoundingClientRect())) > 2;
    }).map((summary) => summary.outerHTML.slice(0, 120));
}"""


def check_access(page: Page, *, finger: bool = False) -> list[str]:
    """Walks through the screen by Tab, and has axe look at it; the names of the stops."""
    names, problems = walk(page, least_px=FINGER_PX if finger else TARGET_PX)
    page.evaluate(AXE.read_text())
    problems += page.evaluate(VIOLATIONS)
    problems += page.evaluate(OFF_MIDDLE) if finger else []
    assert not problems, problems
    return names


def walk(page: Page, *, least_px: float) -> tuple[list[str], list[Any]]:
    """The names of all stops of Tab, and those that can't be seen, are out of the window, too small or without a
    name."""
    devtools = page.context.new_cdp_session(page)
    page.evaluate("() => { window.walked = new Set(); }")
    names: list[str] = []
    problems: list[Any] = []
    for _ in range(MAX_STOPS):
        page.keyboard.press("Tab")
        stop: dict[str, Any] | None = page.evaluate(STOP)
        if stop is None:
            continue
        if not stop["isNew"]:
            devtools.detach()
            return names, problems
        focused = devtools.send("Runtime.evaluate", {"expression": "document.activeElement"})["result"]["objectId"]
        tree = devtools.send("Accessibility.getPartialAXTree", {"objectId": focused, "fetchRelatives": False})
        name = tree["nodes"][0].get("name", {}).get("value", "")
        names.append(name)
        is_large = stop["size"] >= least_px or stop["isInText"]
        if not (name and is_large and stop["isInside"] and stop["opacity"] > 0.5):
            problems.append((name, stop))
    raise AssertionError("Tab never comes back")
