"""Measures a checkpoint: `python -m training.evaluate --model assets/demo --n 200`.

Exact match of the greedy answer, per skill, on scenes of held-out seeds ("seen": combinations that training may have
shown) and on held-out combinations of color, shape and place or event ("combos"). Every case goes through a real
file (PNG, JPEG, MP4) and the checkpoint's own template and processors. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from training import cases
from training.answerers import BACKENDS, Backend
from training.scenes import Split

SPLITS: tuple[Split, ...] = ("seen", "combos")


def evaluate(
    backend: Backend, count: int, skills: tuple[str, ...] = cases.SKILLS
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Accuracy in percent by skill and split, and a line for every wrong answer."""
    asked = [(split, case) for skill in skills for split in SPLITS for case in cases.make_cases(skill, count, split)]
    hits: dict[str, dict[str, int]] = {skill: dict.fromkeys(SPLITS, 0) for skill in skills}
    misses = []
    for (split, case), answer in zip(asked, backend.answers([case for _, case in asked]), strict=True):
        if answer.strip() == case.expected:
            hits[case.skill][split] += 1
        else:
            misses.append(f"{case.skill} ({split}): expected {case.expected!r}, got {answer!r}")
    return {s: {split: round(100 * n / count, 1) for split, n in row.items()} for s, row in hits.items()}, misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--backend", choices=BACKENDS, default="transformers")
    parser.add_argument("--n", type=int, default=200, help="cases per skill and split")
    parser.add_argument("--skills", nargs="*", default=cases.SKILLS, choices=cases.SKILLS)
    parser.add_argument("--misses", type=int, default=0, help="print so many wrong answers")
    args = parser.parse_args()
    start = time.monotonic()
    table, misses = evaluate(BACKENDS[args.backend](args.model), args.n, tuple(args.skills))
    print(f"{'skill':16}{'seen':>8}{'combos':>8}")
    for skill, row in table.items():
        print(f"{skill:16}{row['seen']:8.1f}{row['combos']:8.1f}")
    for line in misses[: args.misses]:
        print(f"  {line}")
    summary = {"backend": args.backend, "n": args.n, "seconds": round(time.monotonic() - start)}
    print(json.dumps(summary | {"exact_match": table}))


if __name__ == "__main__":
    main()
