"""The documents name files that there are."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "qwen35mm|kernels|preprocess|assets|tests|benchmarks|examples|docs"
# It tells of what was there once.
HISTORY = {"CHANGELOG.md"}


def test_files_that_are_named_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text("utf-8") if path.name not in HISTORY else ""
        named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*(?:/|\.(?:py|js|ts|css|json|md)))`", text)
        assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == [], path.name


def test_the_walkthrough_names_what_its_files_define() -> None:
    text = (ROOT / "docs/walkthrough.md").read_text("utf-8")
    named = re.findall(r"`([\w.]+)`\s+\(`([\w./]+)`", text)
    assert len(named) > 40
    assert [(name, file) for name, file in named if not defines((ROOT / file).read_text("utf-8"), name)] == []


def defines(source: str, name: str) -> bool:
    """Whether a file of Python, JavaScript or C++ defines `name`, or `Class.name`."""
    *owner, name = name.split(".")
    of_owner = all(re.search(rf"\bclass {each}\b", source) for each in owner)
    return of_owner and re.search(rf"^\s*(?!return|await)([\w ]+ )?{name}( = |\(|\b.*:$)", source, re.M) is not None


def test_lines_have_120_columns_at_most() -> None:
    for path in DOCUMENTS:
        assert [line for line in path.read_text("utf-8").splitlines() if len(line) > 120] == [], path.name


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text)
        targets = [(path.parent / file if file else path, anchor) for file, anchor in links]
        assert [target for target, _ in targets if not target.exists()] == [], path.name
        anchored = [(target, anchor) for target, anchor in targets if anchor and target.suffix == ".md"]
        assert [each for each in anchored if each[1] not in anchors_of(each[0])] == [], path.name


def test_the_site_shows_every_document() -> None:
    nav = re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"))
    assert sorted(nav) == sorted([*(str(path.relative_to(ROOT)) for path in DOCUMENTS), "assets/demo/README.md"])


@functools.cache
def anchors_of(path: Path) -> set[str]:
    """Where links into a document may lead: its headings as GitHub names them, and ids."""
    text = path.read_text("utf-8")
    headings = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {heading.replace(" ", "-") for heading in headings} | set(re.findall(r'<a id="([^"]+)"', text))
