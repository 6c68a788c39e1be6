"""The curves of a training's metrics."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from training.curves import drawn, main, points

LINES = [
    {"phase": "recall", "step": 25, "seconds": 1800, "right recall": 0.0},
    {"phase": "joint", "step": 25, "seconds": 3600, "right recall": 0.5, "right yes no": 0.2, "right count": 0.6},
    {"phase": "joint", "step": 50, "seconds": 7200, "right recall": 1.0, "right yes no": 0.9, "right count": 0.7},
]


def test_a_curve_is_the_mean_of_its_skills_where_all_were_asked() -> None:
    assert points(LINES, ["yes no", "count"]) == [[(1.0, pytest.approx(0.4)), (2.0, pytest.approx(0.8))]]
    unasked = {"phase": "joint", "step": 75, "seconds": 9000}
    assert [len(run) for run in points([*LINES, unasked, LINES[2]], ["recall"])] == [3, 1]
    assert points(LINES, ["caption"]) == []


def test_curves_phases_and_last_shares_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "curves.svg"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(sys, "argv", ["curves", str(metrics), "--out", str(out)])
    main()
    root = ET.fromstring(out.read_text())
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{name}text")]
    assert {"recall", "joint", "2.0 hours", "recall: 100%", "yes and no, counts: 80%"} <= {*texts}
    assert not any(str(text).startswith("captions") for text in texts)
    curves = [line.attrib["points"].split() for line in root.iter(f"{name}polyline")]
    ends = [tuple(map(float, curve[-1].split(","))) for curve in curves]
    # All end at the right, the better one higher up.
    assert len({x for x, _ in ends}) == 1
    assert {y for _, y in ends} == {40.0, 110.0}
    # Two rows hold two names in one place; the others are left out.
    short = [LINES[-1] | {"phase": f"phase {i}", "seconds": 7200 + 10 * i} for i in range(1, 9)]
    names = [each for each in ET.fromstring(drawn([*LINES, *short])).itertext() if each.startswith("phase")]
    assert names == ["phase 1", "phase 2"]
    with pytest.raises(ValueError, match=r"expected the metrics\.jsonl"):
        drawn([])
