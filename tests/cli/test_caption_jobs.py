"""`qwen35mm caption jobs.toml`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.cli.caption_jobs import read_jobs
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import CaptioningError
from qwen35mm.settings import ModelOptions

JOBS = """
[defaults]
preset = ["plain"]
max-tokens = 40
keep-lines = true

[[job]]
sources = "{folder}/cats"
trigger = "ohwx cat"
temperature = 0.5

[[job]]
sources = ["{folder}/dogs"]
where = "width > 1"
max_tokens = 30
recursive = false
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        shutil.copy(asset_path("samples") / "one-shape.png", tmp_path / name)
    path = tmp_path / "jobs.toml"
    path.write_text(JOBS.format(folder=tmp_path.as_posix()).replace("max_tokens", "max-tokens"))
    return path


def test_a_job_has_its_own_options_over_the_defaults_over_the_command_line(jobs: Path) -> None:
    (_, cats), (name, dogs) = read_jobs(jobs, ModelOptions(), CaptionOptions(seed=7, max_tokens=9), SamplingChoices())
    assert name == "jobs.toml, job 2"
    assert (cats.style.trigger, dogs.style.trigger) == ("ohwx cat", "")
    assert (cats.sampling["max_tokens"], dogs.sampling["max_tokens"]) == (40, 30)
    assert (cats.sampling["temperature"], dogs.sampling["temperature"]) == (0.5, None)
    assert (cats.sampling["seed"], dogs.sampling["seed"]) == (7, 7)
    assert (cats.scan.recursive, dogs.scan.recursive) == (True, False)
    assert (cats.where, dogs.where is not None) == (None, True)
    assert cats.manifest_path == dogs.manifest_path == jobs.parent / ".qwen35mm" / "captions.sqlite"
    assert isinstance(cats.prompts.questions[0], Question)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[job]]\nsources = 'a'\ntriger = 'x'", "job 1 has no key 'triger'. Did you mean 'trigger'"),
        ("[[job]]\nsources = 'a'\nbackend = 'x'", "job 1 has no key 'backend'"),
        ("[[jobs]]\nsources = 'a'", "has no key 'jobs'. Did you mean 'job'"),
        ("[[job]]\nprompt = 'a'", "job 1 needs sources"),
        ("[defaults]\nprompt = 'a'", r"needs a table \[\[job\]\]"),
        ("[[job]]\nsources = 'a'\nmax-tokens = 'many'", "job 1: .*max-tokens"),
        ("[[job]]\nsources = 'a'\njudge = 'yes'", "judge is true or false"),
        ("[[job]]\nsources = 'a'\ntrigger = ['x']", "trigger takes one value"),
        ("[[job]", "can't be read as jobs"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(CaptioningError, match=message):
        read_jobs(path, ModelOptions(), CaptionOptions(), SamplingChoices())
