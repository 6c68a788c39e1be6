"""`qwen35mm gates` before it trains. Trainings are in tests/tuning."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_a_file_that_exists_is_kept(qwen35mm: Run, tmp_path: Path) -> None:
    (out := tmp_path / "gates.safetensors").write_text("mine")
    done = qwen35mm("gates", "/there/is/no/model", "--out", out)
    assert (done.returncode, "'gates.safetensors' exists. Name another file" in done.stderr) == (1, True)
    assert out.read_text() == "mine"
