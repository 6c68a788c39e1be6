"""Draws how the answers came: `python -m training.curves build/demo-training/metrics.jsonl --out curves.svg`.

Shares of wholly right answers in training, under teacher forcing, over the hours; phases are told apart by lines.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of each curve: the skills whose mean it is, and its colour.
CURVES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "color, shape, place": (("color", "shape", "place"), "#2563eb"),
    "captions": (("caption",), "#111827"),
    "yes and no, counts": (("yes no", "count"), "#059669"),
    "relations": (("relation", "extreme"), "#84cc16"),
    "clips": (("clip caption", "motion", "when"), "#d97706"),
    "boxes, points": (("box", "point"), "#dc2626"),
    "reading": (("reading",), "#9333ea"),
    "recall": (("recall",), "#0891b2"),
    "tools, JSON": (("tool call", "tool result", "json"), "#db2777"),
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 960, 430, 50, 40, 720, 390


def points(lines: Sequence[Mapping[str, Any]], skills: Sequence[str]) -> list[list[tuple[float, float]]]:
    """(hours, share) of every line of the metrics that has all of these skills, in runs of neighbouring lines."""
    names = [f"right {skill}" for skill in skills]
    runs: list[list[tuple[float, float]]] = [[]]
    for line in lines:
        if all(name in line for name in names):
            runs[-1].append((line["seconds"] / 3600, sum(line[name] for name in names) / len(names)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def drawn(lines: Sequence[Mapping[str, Any]]) -> str:
    """The curves as SVG; raises ValueError where there are no metrics."""
    if not lines:
        raise ValueError("There are no metrics to draw: expected the metrics.jsonl that a training wrote, got no line.")
    hours = lines[-1]["seconds"] / 3600

    def place(hour: float, share: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * hour / hours:.1f},{_BOTTOM - (_BOTTOM - _TOP) * share:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="DejaVu Sans, Arial, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for percent in range(0, 101, 20):
        left, y = place(0, percent / 100).split(",")
        parts.append(f'<path d="M{left} {y} H{_RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{float(y) + 4}" text-anchor="end" fill="#1f2937">{percent}%</text>')
    begun, taken = 0.0, [-math.inf, -math.inf]
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        if after is not None and after["phase"] == line["phase"]:
            continue
        end = line["seconds"] / 3600
        left, right = (float(place(hour, 0).split(",")[0]) for hour in (begun, end))
        middle = (left + right) / 2
        # Names stand in the first of two rows where there is room; those of phases too short for either are left out.
        reach = 4.0 * len(line["phase"])
        free = next((row for row, end in enumerate(taken) if middle - reach > end), None)
        if free is not None:
            y = _TOP - 10 - 16 * free
            taken[free] = middle + reach
            parts.append(f'<text x="{middle:.1f}" y="{y}" text-anchor="middle" fill="#4b5563">{line["phase"]}</text>')
        parts.append(f'<path d="M{right:.1f} {_TOP} V{_BOTTOM}" stroke="#9ca3af" stroke-dasharray="4 4"/>')
        begun = end
    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 26}" text-anchor="end" fill="#1f2937">{hours:.1f} hours</text>')
    row = 0
    for name, (skills, color) in CURVES.items():
        runs = points(lines, skills)
        if not runs:
            continue
        parts += [
            f'<polyline points="{" ".join(place(*point) for point in run)}" fill="none" stroke="{color}" '
            'stroke-width="2"/>'
            for run in runs
        ]
        y = _TOP + 12 + 24 * row
        parts.append(f'<path d="M{_RIGHT + 16} {y - 4} h22" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{_RIGHT + 46}" y="{y}" fill="#1f2937">{name}: {100 * runs[-1][-1][1]:.0f}%</text>')
        row += 1
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(drawn([json.loads(line) for line in args.metrics.read_text().splitlines()]))


if __name__ == "__main__":
    main()
