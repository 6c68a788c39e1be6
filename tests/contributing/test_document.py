"""docs/contributing.md works through what is tested here, and names the files that the tests change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TESTS = sorted(path.name for path in FOLDER.glob("test_*.py") if path != Path(__file__))


def sections() -> dict[str, str]:
    """The document's changes by their tests."""
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    return dict(re.findall(r"^### [^\n]*\(`(test_\w+\.py)`\)\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL))


def test_each_change_has_a_test_and_each_test_its_change() -> None:
    assert sorted(sections()) == TESTS


@pytest.mark.parametrize("name", TESTS)
def test_the_files_that_a_test_changes_are_named(name: str) -> None:
    source = (FOLDER / name).read_text("utf-8")
    changed = set(re.findall(r'^[A-Z]+ = "([\w.]+/[\w./]+)"$', source, re.MULTILINE))
    assert [file for file in changed if not (ROOT / file).is_file()] == []
    assert [file for file in changed if f"`{file}`" not in sections()[name]] == []
