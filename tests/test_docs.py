"""The documents name files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "qwen35mm|kernels|preprocess|assets|tests|benchmarks|training|docs"
# The log tells of what was there once.
HISTORY = {"log.md"}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name not in HISTORY], ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*(?:/|\.(?:py|js|ts|css|json|md)))`", path.read_text("utf-8"))
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
