"""Runs of the fake model, and what they left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qwen35mm.captioning.job import Job, Outcome, carry_out
from qwen35mm.captioning.outputs import parse_output
from qwen35mm.captioning.run import Run, RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from tests.captioning.fake_model import FakeModel


def job(media: Path, *questions: str, outputs: Sequence[str] = ("sidecar",), **options: Any) -> Job:
    prompts = PromptSet([Question(text) for text in questions or ("Describe it.",)])
    return Job([str(media)], prompts, outputs=[parse_output(text) for text in outputs], **options)


def settings(**options: Any) -> RunSettings:
    return RunSettings(**{"slots": 2, **options})


async def run(job: Job, model: FakeModel, identity: str = "fake", begun: Any = None) -> Outcome:
    outcome = await carry_out(job, model.captioner(identity), begun)
    counts = outcome.counts
    assert outcome.stopped not in (None, "limit") or counts.num_found == counts.num_over, counts
    return outcome


async def interrupted(job: Job, model: FakeModel, when: Callable[[Run], bool], *, times: int = 1) -> Outcome:
    """A run that a person interrupts so often, as soon as something holds."""
    tasks = []

    async def begun(run: Run) -> None:
        async def interrupt() -> None:
            while not when(run):
                await asyncio.sleep(0.01)
            for _ in range(times):
                run.stop("interrupted")

        tasks.append(asyncio.create_task(interrupt()))

    return await run(job, model, begun=begun)


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.txt"))}


def listed(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def failures(folder: Path) -> list[dict[str, Any]]:
    return listed(folder / ".qwen35mm" / "failures.jsonl")


def problems(folder: Path) -> list[dict[str, Any]]:
    return listed(folder / ".qwen35mm" / "problems.jsonl")
