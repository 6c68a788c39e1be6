"""Models that can be downloaded: what they take is what their shapes say, and whether that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35mm.model_library import HUB_MODELS, BackendOptions, memory
from qwen35mm.model_library.installed import find_model
from tests.model_library.test_switch import Make, make, other

__all__ = ["make", "other"]

GIB = 1 << 30


def test_known_sizes() -> None:
    assert [model.num_bytes for model in HUB_MODELS] == [
        1_705_971_840,
        4_426_483_328,
        9_078_531_072,
        18_819_627_488,
        54_713_457_120,
        70_214_363_872,
    ]


@pytest.mark.parametrize(("number", "weights_bytes"), [(0, 1_746_942_600), (1, 4_548_221_488), (3, 19_306_310_880)])
def test_the_size_of_a_download_is_the_hubs(number: int, weights_bytes: int) -> None:
    """By the sizes of the files with weights there, in November 2026; the small files are those of the 9B."""
    assert abs(HUB_MODELS[number].download_bytes - weights_bytes - 22_992_024) < 200_000


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_documents_table_is_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    from benchmarks import ROOT, weights_memory

    monkeypatch.setattr("sys.argv", ["weights_memory"])
    weights_memory.main()
    _, _, *rows = [cells_of(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    known = {cells[0]: cells[3] for cells in map(cells_of, text.splitlines()) if len(cells) == 5}
    assert len(rows) == 10
    assert {name: " / ".join(sizes) for name, *sizes in rows}.items() <= known.items()


async def test_what_fits_is_told_before_it_is_downloaded(
    make: Make, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the planner's sums: 0.8B takes 2.59 GiB, 1.94 and 1.71 with a context of 32,768, 2B 5.21, 3.57 and 2.93."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    small, middle, *_ = HUB_MODELS
    switch = make(options=BackendOptions(device="cpu"))
    for free_gib, formats, suggestion in (
        (100, ("bf16", "bf16"), middle),
        (3.6, ("bf16", "int8"), middle),
        (3, ("bf16", "int4"), middle),
        (2.2, ("int8", None), small),
        (1.6, (None, None), None),
    ):
        switch._available = lambda _, free_gib=free_gib: int(free_gib * GIB)
        room = switch.room()
        assert (switch.format_that_fits(small, room), switch.format_that_fits(middle, room)) == formats
        assert switch.suggestion(room) is suggestion
    assert switch.format_that_fits(HUB_MODELS[-1], room) is None
    assert switch.refusal(find_model(other), room) is None
    assert "other doesn't fit" in str(switch.refusal(find_model(other), 0))
