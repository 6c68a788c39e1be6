"""Captions of held-out scenes are as good as the evaluation's answers for the same files and questions.

The very files of `training.evaluate`'s cases (PNG, JPEG and MP4) are captioned through a whole run into text files,
each with its case's own question, and the evaluation scores what the text files say. Both sides answer greedily in
float32, so not only the scores but all wrong answers have to be the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.model import LoadedModel
from training import cases
from training.answerers import MAX_NEW_TOKENS, TransformersBackend
from training.cases import Case
from training.evaluate import evaluate

# The last two answer their own questions, so that the wrong prompt is noticed as well as the wrong picture.
SKILLS = ("caption 1", "caption 2", "caption 3", "clip caption", "place", "clip color")
ONE_TURN_SKILLS = (*cases.PICTURE_CASES, *cases.CLIP_CASES)


@dataclass(frozen=True)
class Captions:
    """Answers the evaluation's cases with the text files of a captioning run."""

    backend: LocalBackend
    folder: Path

    def answers(self, cases: list[Case]) -> list[str]:
        media = self.folder / "media"
        media.mkdir()
        rows = []
        for number, case in enumerate(cases):
            (message,) = case.messages
            medium, question = message["content"]
            name = f"{number:04}.{'png' if medium['type'] == 'image' else 'mp4'}"
            (media / name).write_bytes(medium[medium["type"]])
            rows.append({"file_name": name, "question": question["text"]})
        (media / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self._caption(media)
        return [(self.folder / "captions" / f"{n:04}.txt").read_text().rstrip("\n") for n in range(len(cases))]

    def _caption(self, media: Path) -> None:
        job = Job(
            [str(media)],
            PromptSet([Question("{metadata.question}")]),
            {"max_tokens": MAX_NEW_TOKENS, "temperature": 0.0},
            outputs=[parse_output("sidecar")],
            output_settings=OutputSettings(folder=self.folder / "captions"),
        )
        outcome = asyncio.run(carry_out(job, Captioner.local(self.backend, None)))
        assert (outcome.exit_code, outcome.num_failures) == (0, 0)


@pytest.fixture
def captions(demo: LoadedModel, tmp_path: Path) -> Iterator[Captions]:
    with closing(LocalBackend(demo)) as backend:
        yield Captions(backend, tmp_path)


@pytest.fixture(scope="module")
def transformers() -> TransformersBackend:
    return TransformersBackend(demo_model_path())


@pytest.mark.slow
def test_captions_are_as_accurate_as_the_evaluation_says(captions: Captions, transformers: TransformersBackend) -> None:
    table, misses = evaluate(captions, 3, SKILLS)
    assert (table, misses) == evaluate(transformers, 3, SKILLS)
    accuracies = [accuracy for row in table.values() for accuracy in row.values()]
    assert sum(accuracies) / len(accuracies) > 85, misses


@pytest.mark.slow
def test_all_questions_of_one_turn(captions: Captions, transformers: TransformersBackend) -> None:
    assert evaluate(captions, 10, ONE_TURN_SKILLS) == evaluate(transformers, 10, ONE_TURN_SKILLS)
