"""An adapter of the bundled model for a style of captions: how many captions have it, and what other skills lose.

    python -m benchmarks.tune_style --captions 60 --pictures 30 --questions 4

Captions of drawn pictures get the form "A picture of ..., flat design.", which the model doesn't have. The shares are
of other pictures than those of the training, asked in the same words. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.frame import machine
from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Image, Message, Text
from qwen35mm.cpu import set_num_threads
from qwen35mm.evaluation.cases import NAMES, Case, make_cases
from qwen35mm.evaluation.skill_test import Accuracy, SkillTest, answer_cases
from qwen35mm.model import load
from qwen35mm.tuning.encoding import Encoder
from qwen35mm.tuning.output import AdapterFolder
from qwen35mm.tuning.samples import Sample
from qwen35mm.tuning.training import Plan, Tuned, Tuner, TuneSettings

QUESTION = "Describe the picture."
_CAPTIONS = "caption 1-3"
_STYLE = re.compile(r"A picture of .*, flat design\.")
# The seed of the pictures that are trained on; the questions have another one.
_SEED = 7


def in_style(caption: str) -> str:
    """A caption in the style: "A red circle on the left." as "A picture of a red circle on the left, flat design."."""
    return f"A picture of {caption[0].lower()}{caption[1:].rstrip('.')}, flat design."


def captioned(count: int, seed: int) -> list[Case]:
    """Pictures whose right answer is a caption, with the question of this benchmark."""
    found: list[Case] = []
    while len(found) < count:
        seed += 1
        for case in make_cases(_CAPTIONS, 2 * count, "seen", seed):
            parts = case.messages[-1]["content"]
            if len(case.messages) == 1 and parts[0]["type"] == "image" and len(found) < count:
                messages = [{"role": "user", "content": [parts[0], {"type": "text", "text": QUESTION}]}]
                found.append(Case(case.skill, messages, case.expected, case.is_right))
    return found


def sample(case: Case) -> Sample:
    """A picture with its caption in the style."""
    data = case.messages[0]["content"][0]["image"]
    messages = (Message("user", (Image(data), Text(QUESTION))),)
    return Sample("picture", messages, in_style(case.expected), hashlib.sha256(data).digest())


class Printed:
    """Prints what a training says."""

    def planned(self, plan: Plan) -> None:
        print(
            f"{plan.num_samples} captions, {plan.num_held_out} held out, {plan.num_steps} steps, {plan.seconds:.0f} s"
        )

    def stepped(self, done: int, total: int, loss: float | None, seconds_left: float | None) -> None:
        pass

    def evaluated(self, step: int, loss: float, is_best: bool) -> None:
        print(f"step {step}: held-out loss {loss:.4f}", flush=True)

    def shown(self, name: str, answer: str, expected: str) -> None:
        print(f"  {answer}\n  wanted: {expected}")


def measured(
    adapters: Sequence[Path], pictures: Sequence[Case], test: SkillTest
) -> tuple[float, list[bool], list[str]]:
    """The share of captions in the style in percent, the graded answers of the skills, and the captions."""
    loaded = load(demo_model_path(), dtype="float32", device="cpu", lora=adapters)
    captions = answer_cases(loaded, pictures)
    share = 100 * sum(_STYLE.fullmatch(each) is not None for each in captions) / len(captions)
    return share, test.run(loaded), captions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=60, help="pictures with captions to learn from")
    parser.add_argument("--pictures", type=int, default=50, help="others whose captions are counted")
    parser.add_argument("--questions", type=int, default=10, help="of each skill")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    set_num_threads(args.threads)
    settings = TuneSettings(
        rank=args.rank, epochs=args.epochs, learning_rate=args.learning_rate, dtype="float32", batch=4
    )
    encoder = Encoder.of(demo_model_path(), device="cpu")
    samples = [encoder.encode(sample(case)) for case in captioned(args.captions, _SEED)]
    pictures = captioned(args.pictures, 1000 + _SEED)
    test = SkillTest(args.questions)
    with tempfile.TemporaryDirectory() as name:
        with closing(AdapterFolder(Path(name, "adapter"))) as folder:
            tuner = Tuner(encoder, str(demo_model_path()), samples, settings, device="cpu")
            tuned: Tuned = tuner.run(folder, Printed())
        before, right_before, _ = measured((), pictures, test)
        after, right_after, captions = measured([folder.path], pictures, test)
    right = sum(case.is_right(_plain(each)) for case, each in zip(pictures, captions, strict=True))
    rows = {
        skill: Accuracy.of(
            [each for each, of in zip(right_after, test.skills, strict=True) if of == skill],
            [each for each, of in zip(right_before, test.skills, strict=True) if of == skill],
        )
        for skill in NAMES
    }
    others = [of != _CAPTIONS for of in test.skills]
    total = Accuracy.of(
        [each for each, is_other in zip(right_after, others, strict=True) if is_other],
        [each for each, is_other in zip(right_before, others, strict=True) if is_other],
    )
    print(f"| | before | after |\n|---|---|---|\n| captions in the style, % | {before:.0f} | {after:.0f} |")
    for skill, row in [*rows.items(), ("all but captions", total)]:
        print(f"| {skill}, % | {row.percent - row.change:.0f} | {row.percent:.0f} |")
    found = {
        "before": before,
        "after": after,
        "right_after": 100 * right / len(captions),
        "skills_change": round(total.change, 2),
        "skills_change_error": round(total.change_error, 2),
        "held_out_loss": [tuned.before, tuned.after],
        "steps": tuned.num_steps,
        "seconds": round(tuned.seconds),
        "rank": args.rank,
        "learning_rate": args.learning_rate,
        "machine": machine(),
    }
    print(json.dumps(found))


def _plain(caption: str) -> str:
    """A caption without the style, to be graded as those of the model alone."""
    found = re.fullmatch(r"A picture of (.*), flat design\.", caption)
    return caption if found is None else f"{found[1][0].upper()}{found[1][1:]}."


if __name__ == "__main__":
    main()
