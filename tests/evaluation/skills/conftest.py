"""Questions as the grammar makes them: without the slips and short forms that people put into them."""

from __future__ import annotations

import pytest

from qwen35mm.evaluation import language


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "loosened", lambda rng, text: text)
