"""The demo model's accuracy by skill: the table of its model card.

    python -m benchmarks.demo_skills --model assets/demo [--full]

Every question goes through a real file (PNG, JPEG, MP4) and the engine, with greedy decoding.
`qwen35mm.evaluation.cases` defines "seen" and "held out". Prints a table with 95 % intervals, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen35mm.evaluation import cases
from qwen35mm.evaluation.graders import letter_error
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skill_test import answer_cases
from qwen35mm.evaluation.skills import SKILLS
from qwen35mm.model import load

SPLITS: tuple[Split, ...] = ("seen", "combos")
_TYPED_AIM = 90.0


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, in percent (Wilson)."""
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def measure(
    model: Any,
    count: int,
    names: Sequence[str],
    kv_dtype: str = "auto",
    seed: int = cases.EVAL_SEED,
    thinks: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Accuracy by skill, and a line for each wrong answer.

    Args:
        count: questions of each skill and split. Typed questions are one list of many kinds, so ten times as many.
        thinks: whether skills with thinking think.
    """
    asked = [
        (split, replace(case, enable_thinking=case.enable_thinking and thinks))
        for name in names
        for split in SPLITS
        for case in cases.make_cases(name, 10 * count if name == cases.TYPED_SKILL else count, split, seed)
    ]
    answers = answer_cases(model, [case for _, case in asked], kv_dtype)
    table: dict[str, Any] = {}
    misses = []
    for name in names:
        found = [(s, case, answer) for (s, case), answer in zip(asked, answers, strict=True) if case.skill == name]
        graded = [(s, case.is_right(answer)) for s, case, answer in found]
        shares = {s: [is_right for split, is_right in graded if split == s] for s in SPLITS}
        row = {s: round(100 * sum(each) / len(each), 1) for s, each in shares.items() if each}
        count, right = len(graded), sum(is_right for _, is_right in graded)
        low, high = wilson(right, count)
        row |= {"right": round(100 * right / count, 1), "low": round(low, 1), "high": round(high, 1), "count": count}
        row["aim"] = SKILLS[name].aim if name in SKILLS else _TYPED_AIM
        if name.startswith("reading"):
            errors = [letter_error(answer, case.expected) for _, case, answer in found]
            row["letter_error"] = round(100 * sum(errors) / len(errors), 1)
        table[name] = row
        misses += [
            f"{name} ({s}): {_question(case)!r}: expected {case.expected!r}, got {answer!r}"
            for s, case, answer in found
            if not case.is_right(answer)
        ]
    return table, misses


def _question(case: cases.Case) -> str:
    content = case.messages[-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", f"<{part['type']}>") for part in content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--n", type=int, default=20, help="questions of each skill and column")
    parser.add_argument("--full", action="store_true", help="100 of each")
    parser.add_argument("--skills", nargs="*", default=cases.NAMES, choices=cases.NAMES, metavar="SKILL")
    parser.add_argument("--seed", type=int, default=cases.EVAL_SEED, help="another one gives other questions")
    parser.add_argument("--no-thinking", action="store_true", help="turn thinking off for the skills that think")
    parser.add_argument("--weights", default="auto", help="as `qwen35mm chat --weights` takes them")
    parser.add_argument("--kv-dtype", default="auto", help="as `qwen35mm chat --kv-dtype` takes it")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--misses", type=int, default=0, help="print this many wrong answers of each skill")
    args = parser.parse_args()
    start = time.monotonic()
    loaded = load(args.model, dtype=args.dtype, device=args.device, weights=args.weights)
    count = 100 if args.full else args.n
    table, misses = measure(loaded, count, args.skills, args.kv_dtype, args.seed, not args.no_thinking)
    print("| skill | seen | held out | 95% interval | aim |\n|---|---|---|---|---|")
    for name, row in table.items():
        seen, held_out = (f"{row[split]:.0f}" if split in row else "" for split in SPLITS)
        print(f"| {name} | {seen} | {held_out} | {row['low']:.0f} to {row['high']:.0f} | {row['aim']:.0f} |")
    for name in table:
        for line in [line for line in misses if line.startswith(f"{name} (")][: args.misses]:
            print(line)
    shares = [row["right"] for name, row in table.items() if name != cases.TYPED_SKILL]
    summary = {"model": str(args.model), "n": count, "seed": args.seed, "thinking": not args.no_thinking}
    summary |= {"weights": args.weights, "kv_dtype": args.kv_dtype, "seconds": round(time.monotonic() - start)}
    # The typed questions belong to many skills, so the mean leaves them out.
    print(json.dumps(summary | {"mean": round(sum(shares) / max(1, len(shares)), 1), "skills": table}))


if __name__ == "__main__":
    main()
