"""Captions of held-out scenes are as good as the evaluation's answers for the same files and questions.

The very files of the evaluation's cases (PNG, JPEG and MP4) are captioned through a whole run into text files,
each with its case's own question. Both sides answer greedily in float32, so that all answers have to be the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.evaluation.cases import Case, make_cases
from qwen35mm.evaluation.skill_test import MAX_TOKENS, answer_cases
from qwen35mm.model import LoadedModel

# Those whose media are one picture or clip, in a conversation of one turn.
SKILLS = (
    "caption 1-3", "caption 4-6", "clip caption", "place", "clip color", "color", "shape", "size", "what",
    "background", "yes no", "count", "relation", "extreme", "box", "point", "json", "reading up to 5",
    "reading up to 8", "text color", "motion", "change", "when", "clip shape", "others", "unknown picture", "beyond",
)  # fmt: skip


def questions(skills: Sequence[str], count: int) -> list[Case]:
    """Of each skill; a caption's medium stands before its question, so those that have it behind are left out."""
    cases = [case for skill in skills for split in ("seen", "combos") for case in make_cases(skill, count, split)]
    return [case for case in cases if case.messages[0]["content"][0]["type"] != "text"]


def captions(backend: LocalBackend, folder: Path, cases: Sequence[Case]) -> list[str]:
    """What the text files of a captioning run say of the cases' media."""
    media = folder / "media"
    media.mkdir()
    rows = []
    for number, case in enumerate(cases):
        (message,) = case.messages
        medium, question = message["content"]
        name = f"{number:04}.{'png' if medium['type'] == 'image' else 'mp4'}"
        (media / name).write_bytes(medium[medium["type"]])
        rows.append({"file_name": name, "question": question["text"]})
    (media / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = Job(
        [str(media)],
        PromptSet([Question("{metadata.question}")]),
        {"max_tokens": MAX_TOKENS, "temperature": 0.0},
        # A JSON answer that goes round in circles is cut back where answers are cleaned.
        style=CaptionStyle(cleans=False),
        outputs=[parse_output("sidecar")],
        output_settings=OutputSettings(folder=folder / "captions"),
    )
    outcome = asyncio.run(carry_out(job, Captioner.local(backend, None)))
    assert (outcome.exit_code, outcome.num_failures) == (0, 0)
    return [(folder / "captions" / f"{number:04}.txt").read_text().rstrip("\n") for number in range(len(cases))]


@pytest.mark.slow
def test_captions_are_the_evaluations_answers(demo: LoadedModel, tmp_path: Path) -> None:
    cases = questions(SKILLS, 3)
    assert len(cases) > 3 * len(SKILLS)
    with closing(LocalBackend(demo)) as backend:
        found = captions(backend, tmp_path, cases)
    assert found == [answer.strip() for answer in answer_cases(demo, cases)]
    right = [case.is_right(answer) for case, answer in zip(cases, found, strict=True)]
    assert sum(right) > 0.7 * len(right)
