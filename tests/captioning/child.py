"""A captioning run as a process of its own, which a test may kill: `python -m tests.captioning.child FOLDER [STEP]`.

With STEP, the process ends itself, without a word, at the STEP-th time that it makes something durable: an fsync or a
rename. Without it, the test kills it from outside.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.outputs import parse_output
from qwen35mm.captioning.run import RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from tests.captioning.fake_model import FakeModel

OUTPUTS = ("sidecar", "jsonl:captions.jsonl", "dataset:dataset", "webdataset:tars", "parquet:rows")


def make_job(folder: Path) -> Job:
    """All kinds of output beside the media, in small shards."""
    specs = [parse_output(text) for text in OUTPUTS]
    placed = [
        spec if spec.kind == "sidecar" else type(spec)(spec.kind, str(folder.parent / spec.target)) for spec in specs
    ]
    return Job(
        [str(folder)],
        PromptSet([Question("Describe it.")]),
        outputs=placed,
        records_per_shard=16,
        run=RunSettings(slots=4, ahead=4),
    )


def die_at(step: int) -> None:
    """Ends this process at a step of its own."""
    left = step

    def count(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace", "rename", "link"):
        setattr(os, name, count(getattr(os, name)))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        die_at(int(sys.argv[2]))
    model = FakeModel(delay_s=0.002)
    outcome = asyncio.run(carry_out(make_job(folder), model.captioner()))
    print(len(model.asked), outcome.counts.num_captioned, outcome.num_failures, flush=True)


if __name__ == "__main__":
    main()
