"""A sampling parameter that one of its files lacks is refused, and does something once all of them have it."""

from __future__ import annotations

from pathlib import Path

from tests.contributing.copies import Copy, needs_library

PARAMETERS = "qwen35mm/contract/sampling.py"
REFERENCE = "kernels/qwen35mm_kernels/reference/sampling.py"
TORCH = "kernels/qwen35mm_kernels/cpu/sampling.py"
FIELD = "    presence_penalty: float = _row("
OPTION = "    presence_penalty: float | None\n"
COLUMN = "    repetition_penalty: torch.Tensor = field"
DRAW = "    kept = weights >= row.min_p\n"
IMPORT = "import qwen35mm.engine.sampler"
# A minimum share squared by the likeliest token's, as top-a has it.
DRAWN = """
import torch, numpy as np
from qwen35mm.backends.remote.programs import _PROGRAMS
from qwen35mm.captioning.requests import CaptionSettings
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.engine.sampler import Sampler
from qwen35mm.contract import SamplingParams
from qwen35mm.server.fields import RequestFields

def draws(**values):
    sampler = Sampler(200, 9, (), torch.device("cpu"))
    for seed in range(200):
        sampler.admit(seed, SamplingParams(**values), seed, np.array([1]), [])
    slots = torch.arange(200)
    logits = torch.arange(9.0).expand(200, -1)
    return set(sampler.sample(logits, slots, torch.zeros_like(slots)).tolist())

assert draws(top_a=0.0) == draws() != draws(top_a=0.9) == {8}
assert RequestFields.model_validate({"top_a": 0.5}).top_a == 0.5
assert SamplingChoices(top_a=0.5).values()["top_a"] == 0.5
assert CaptionSettings(SamplingParams(top_a=0.5)).describe()["params"] == {"top_a": 0.5}
assert CaptionSettings(SamplingParams(top_a=0.0)).describe()["params"] == {}
assert "top_a" in _PROGRAMS["vllm"].unsupported and "top_a" not in _PROGRAMS["qwen35mm"].unsupported
print("works")
"""


def describe(copy: Copy) -> None:
    copy.edit(PARAMETERS, FIELD, f'    top_a: float = _row(0.0, 0, 1, is_for_draws=True, help="Top a.")\n{FIELD}')
    copy.edit(PARAMETERS, OPTION, f"    top_a: float | None\n{OPTION}")


def add_column(copy: Copy) -> None:
    copy.edit(REFERENCE, COLUMN, f"    top_a: torch.Tensor = field(metadata=_column(torch.float32, 0.0))\n{COLUMN}")


def test_what_the_kernels_do_not_read_is_refused_at_import(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    describe(copy)
    assert "must have the same parameters" in copy.run(IMPORT).stderr
    add_column(copy)
    assert copy.run(IMPORT).returncode == 0


def test_a_column_that_no_option_names_is_refused_at_import(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    add_column(copy)
    assert "must have the same parameters" in copy.run(IMPORT).stderr


@needs_library
def test_a_compiled_library_without_the_column_is_refused(tmp_path: Path) -> None:
    copy = Copy(tmp_path, compiled=True)
    describe(copy)
    add_column(copy)
    assert "reads other columns of SamplingRows" in copy.run(DRAWN).stderr


def test_it_works_everywhere_after_its_description_and_its_kernel(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    describe(copy)
    add_column(copy)
    copy.edit(TORCH, DRAW, f"{DRAW}    kept &= weights >= row.top_a * weights.max() / weights.sum()\n")
    done = copy.run(DRAWN)
    assert done.stdout == "works\n", done.stderr
