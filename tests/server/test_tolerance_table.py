"""The documents say how requests' fields are treated as the code has it."""

from __future__ import annotations

from tests.server.tolerance_table import table
from tests.test_docs import ROOT


def test_the_documents_have_the_codes_table() -> None:
    told = ROOT.joinpath("docs", "api.md").read_text("utf-8")
    assert table() in told, f"docs/api.md needs this table:\n{table()}"
