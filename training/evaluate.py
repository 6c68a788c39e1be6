"""Measures a checkpoint's skills: `python -m training.evaluate --model assets/demo [--full]`.

Every question goes through a real file (PNG, JPEG, MP4) and the product's own engine, greedily, several at a time.
"Seen": combinations of colour, shape and place that training may have shown, in phrasings that it never did; "held
out": combinations, words, fonts, names, tools and photographs that it never showed. Prints a table, then one JSON line.
`--card assets/demo/README.md` puts the table into the model's card.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen35mm.evaluation import cases
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skill_test import answer_cases
from qwen35mm.evaluation.skills import SKILLS
from qwen35mm.evaluation.skills.graders import letter_error
from qwen35mm.model import load

SPLITS: tuple[Split, ...] = ("seen", "combos")
TYPED_AIM = 90.0
_CARD_TABLE = re.compile(r"\| skill \| seen .*?^Below it[^\n]*", re.DOTALL | re.MULTILINE)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share, in percent."""
    if not count:
        return 0.0, 100.0
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def evaluate(
    model: Any,
    count: int,
    names: Sequence[str],
    kv_dtype: str = "auto",
    seed: int = cases.EVAL_SEED,
    thinking: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Figures by skill, and a line for every wrong answer. `count` questions of each skill and split.

    `thinking`: whether it is on where a skill asks for it.
    """
    asked = [
        (s, replace(case, enable_thinking=case.enable_thinking and thinking))
        for name in names
        for s in SPLITS
        for case in cases.make_cases(name, _of(name, count), s, seed)
    ]
    answers = answer_cases(model, [case for _, case in asked], kv_dtype)
    table: dict[str, Any] = {}
    misses = []
    for name in names:
        found = [(s, c, a) for (s, c), a in zip(asked, answers, strict=True) if c.skill == name]
        row: dict[str, Any] = {"aim": SKILLS[name].aim if name in SKILLS else TYPED_AIM}
        for split in SPLITS:
            right = [case.is_right(answer) for s, case, answer in found if s == split]
            if right:
                row[split] = round(100 * sum(right) / len(right), 1)
        right = [case.is_right(answer) for _, case, answer in found]
        low, high = wilson(sum(right), len(right))
        row |= {"count": len(right), "right": round(100 * sum(right) / len(right), 1)}
        row |= {"low": round(low, 1), "high": round(high, 1)}
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


def mean(table: dict[str, Any]) -> float:
    """Of all skills' shares; the typed questions, which are of many skills, are left out."""
    shares = [row["right"] for name, row in table.items() if name != cases.TYPED_SKILL]
    return round(sum(shares) / len(shares), 1) if shares else math.nan


def carded(card: str, table: dict[str, Any]) -> str:
    """A model card with its table replaced, and what it says of letters and aims below it."""
    lines = ["| skill | seen | held out | 95% interval | aim |", "|---|---|---|---|---|"]
    for name, row in table.items():
        seen, held_out = (f"{row[split]:.0f}" if split in row else "" for split in SPLITS)
        lines.append(f"| {name} | {seen} | {held_out} | {row['low']:.0f} to {row['high']:.0f} | {row['aim']:.0f} |")
    letters = [f"{row['letter_error']}% in {name}" for name, row in table.items() if "letter_error" in row]
    short = {name: row["aim"] - row["right"] for name, row in table.items() if row["right"] < row["aim"]}
    worst = sorted(short, key=lambda name: -short[name])
    lines += ["", f"Mean of all rows but the typed questions: {mean(table)}. Letters wrong: {', '.join(letters)}."]
    lines += [f"At or over their aim: {', '.join(name for name in table if name not in short)}."]
    lines += [f"Below it, in points: {', '.join(f'{name} by {short[name]:.0f}' for name in worst)}."]
    return _CARD_TABLE.sub(lambda _: "\n".join(lines), card)


def _of(name: str, count: int) -> int:
    """Of each split. The typed questions are one list of many kinds: ten times as many are asked, or all."""
    return 10 * count if name == cases.TYPED_SKILL else count


def _question(case: cases.Case) -> str:
    content = case.messages[-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", f"<{part['type']}>") for part in content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--n", type=int, default=20, help="questions of each skill and split")
    parser.add_argument("--full", action="store_true", help="100 of each")
    parser.add_argument("--skills", nargs="*", default=cases.NAMES, choices=cases.NAMES, metavar="SKILL")
    parser.add_argument("--seed", type=int, default=cases.EVAL_SEED, help="another one gives other questions")
    parser.add_argument("--no-thinking", action="store_true", help="off for the skills that think, too")
    parser.add_argument("--weights", default="auto", help="as `qwen35mm chat --weights` takes them")
    parser.add_argument("--kv-dtype", default="auto", help="as `qwen35mm chat --kv-dtype` takes it")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--misses", type=int, default=0, help="print so many wrong answers of each skill")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--card", type=Path, help="a model card, whose table is replaced")
    args = parser.parse_args()
    usual = {*args.skills} == {*cases.NAMES} and args.seed == cases.EVAL_SEED and not args.no_thinking
    if args.card and not (usual and _CARD_TABLE.search(args.card.read_text())):
        parser.error(
            "--card takes all skills, no --seed or --no-thinking, and a card with a table from a '| skill | seen' "
            f"to one 'Below it'; got {args.card} and {len(args.skills)} of {len(cases.NAMES)} skills"
        )
    start = time.monotonic()
    loaded = load(args.model, dtype=args.dtype, device=args.device, weights=args.weights)
    count = 100 if args.full else args.n
    table, misses = evaluate(loaded, count, args.skills, args.kv_dtype, args.seed, not args.no_thinking)
    print(f"{'skill':20}{'seen':>7}{'held out':>10}{'all':>7}{'95% interval':>16}{'aim':>6}")
    for name, row in table.items():
        parts = [f"{row[split]:.1f}" if split in row else "" for split in SPLITS]
        interval = f"{row['low']:.1f} to {row['high']:.1f}"
        letters = f"  letters wrong: {row['letter_error']}%" if "letter_error" in row else ""
        print(f"{name:20}{parts[0]:>7}{parts[1]:>10}{row['right']:>7}{interval:>16}{row['aim']:6.0f}{letters}")
        for line in [line for line in misses if line.startswith(f"{name} (")][: args.misses]:
            print(f"    {line}")
    summary = {"model": str(args.model), "n": count, "seed": args.seed, "thinking": not args.no_thinking}
    summary |= {"weights": args.weights, "kv_dtype": args.kv_dtype}
    summary |= {"seconds": round(time.monotonic() - start), "mean": mean(table), "skills": table}
    if args.card:
        args.card.write_text(carded(args.card.read_text(), table))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
