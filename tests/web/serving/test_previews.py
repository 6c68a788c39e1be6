"""Mermaid out of Gradio's page; how it draws, the browser's tests see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qwen35mm.errors import NotFoundError
from qwen35mm.web.serving.previews import mermaid_modules


def test_the_installed_gradio_has_mermaid_with_all_it_imports() -> None:
    entry, modules = mermaid_modules()
    assert entry in modules
    kinds = (
        "flowDiagram",
        "sequenceDiagram",
        "classDiagram",
        "stateDiagram",
        "erDiagram",
        "ganttDiagram",
        "pieDiagram",
    )
    assert [kind for kind in kinds if not any(name.startswith(kind) for name in modules)] == []
    for name, text in modules.items():
        if not name.startswith("index-"):
            assert not re.search(r"""(?:from|import\()\s*["'`]\.""", text), name
    # Without what Gradio's page would show, which is five times as much.
    assert sum(map(len, modules.values())) < 6_000_000


@pytest.mark.parametrize("names", [[], ["mermaid.core-a.js", "mermaid.core-b.js"]])
def test_a_gradio_without_mermaid_is_said(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("export default 1")
    with pytest.raises(NotFoundError, match=r"Gradio, and the one that is installed here \(\d.*\) has none"):
        mermaid_modules(tmp_path)
