"""Where Mermaid comes from; how it draws, the browser's tests see."""

from __future__ import annotations

import sys

import pytest

from qwen35mm.errors import NotFoundError
from qwen35mm.web.serving.previews import mermaid_path


def test_mermaid_is_read_from_its_package_which_is_never_imported() -> None:
    script = mermaid_path().read_text("utf-8")
    # The frame loads it as a classic script, and then calls `mermaid`.
    assert script.rstrip().endswith('globalThis["mermaid"] = globalThis.__esbuild_esm_mermaid_nm["mermaid"].default;')
    assert 1_000_000 < len(script) < 6_000_000
    assert "mermaidx" not in sys.modules


@pytest.mark.parametrize("package", ["no-package-of-this-name", "pytest"])
def test_without_it_the_extra_is_named(package: str) -> None:
    with pytest.raises(NotFoundError, match=r"install qwen35mm\[diagrams\]"):
        mermaid_path(package)
