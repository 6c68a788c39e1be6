"""The recipes of docs/captions.md, as they stand there."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.captioning.job import Job
from tests.backends.remote.server import running_server
from tests.children import ROOT
from tests.cli.conftest import Run
from tests.forked import run

TEXT = (ROOT / "docs" / "captions.md").read_text("utf-8")
RECIPES = re.findall(r"```sh\n(qwen35mm caption .*)\n```", TEXT.split("## Recipes")[1].split("## Sources")[0])
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square", "star"]}},
    "required": ["shape"],
    "additionalProperties": False,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    samples = asset_path("samples")
    for folder, pattern in (("photos", "*.png"), ("photos/old", "*.jpg"), ("clips", "moves-*"), ("tagged", "two*")):
        (tmp_path / folder).mkdir(parents=True)
        for path in samples.glob(pattern):
            shutil.copy(path, tmp_path / folder)
    (tmp_path / "tagged" / "two-shapes.txt").write_text("circle, diamond\n")
    (tmp_path / "shapes.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "000.tar", "w") as tar:
        for path in sorted((tmp_path / "photos").glob("*.png")):
            info = tarfile.TarInfo(path.name)
            info.size = path.stat().st_size
            tar.addfile(info, io.BytesIO(path.read_bytes()))
    return tmp_path


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 12
    told = TEXT.split("## Recipes")[1].split("## Sources")[0]
    assert len(RECIPES) == told.count("```") / 2, "each block is one that is run"


def test_the_command_takes_each_recipe(place: Path, qwen35mm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is checked before a model is loaded."""
    monkeypatch.chdir(place)
    jobs: list[Job] = []

    async def begin(job: Job, *_: object) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr(importlib.import_module("qwen35mm.cli.caption"), "_caption", begin)
    for recipe in RECIPES:
        done = qwen35mm(*shlex.split(recipe)[1:])
        assert done.returncode == 0, f"{recipe}: {done.stderr}"
    assert len(jobs) == len(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(place: Path, recipe: str) -> None:
    before = {path for path in place.rglob("*") if ".qwen35mm" not in path.parts}
    with running_server() as server:
        done = run(*shlex.split(recipe.replace("http://localhost:8000", server.url)), cwd=place)
        assert bool(server.bodies) == ("--backend" in recipe)
    assert done.returncode == 0, done.stderr
    made = {path for path in place.rglob("*") if ".qwen35mm" not in path.parts} - before
    if "--dry-run" in recipe:
        assert not made
    elif "--mode" in recipe:
        text = (place / "tagged" / "two-shapes.txt").read_text()
        assert ("circle, diamond" in text, text != "circle, diamond\n") == ("append" in recipe, True)
    elif "--shard" not in recipe:
        assert made, done.stderr
