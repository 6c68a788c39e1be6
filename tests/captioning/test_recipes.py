"""The recipes of docs/captions.md and docs/corrections.md, as they stand there."""

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
from tests.captioning.test_parts import make_video
from tests.children import ROOT
from tests.cli.conftest import Run
from tests.forked import run

TEXT = (ROOT / "docs" / "captions.md").read_text("utf-8")
RECIPES = re.findall(r"^qwen35mm caption .*", TEXT.split("## Recipes")[1].split("## Sources")[0], re.M)
CORRECTIONS = re.findall(r"^qwen35mm captions .*", (ROOT / "docs" / "corrections.md").read_text("utf-8"), re.M)
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
    for concept in ("cat", "dog"):
        (tmp_path / "concepts" / concept).mkdir(parents=True)
        shutil.copy(asset_path("samples") / "one-shape.png", tmp_path / "concepts" / concept)
    (tmp_path / "concepts" / "cat" / "prompt.txt").write_text("Describe the picture.")
    (tmp_path / "concepts" / "cat" / "trigger.txt").write_text("ohwx {folder}")
    (tmp_path / "styles.txt").write_text("name: short\nDescribe the picture.\n---\nname: long\nDescribe the picture.\n")
    (tmp_path / "jobs.toml").write_text('[[job]]\nsources = "photos"\npreset = "plain"\nmax-tokens = 60\n')
    (tmp_path / "live").mkdir()
    shutil.copy(asset_path("samples") / "one-shape.png", tmp_path / "live" / "IMG_1.png")
    shutil.copy(asset_path("samples") / "moves-up.mp4", tmp_path / "live" / "IMG_1.mp4")
    (tmp_path / "films").mkdir()
    make_video(tmp_path / "films" / "film.mp4", (1, 2, 3))
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
    blocks = re.findall(r"```sh\n(.*?)```", TEXT.split("## Recipes")[1].split("## Sources")[0], re.DOTALL)
    lines = "".join(blocks).splitlines()
    assert [line for line in lines if not line.startswith("# ")] == RECIPES, "each line is one that is run"
    assert len(lines) == 2 * len(RECIPES), "each says what it is for"


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


def test_corrections_do_what_their_comments_say(place: Path, qwen35mm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    captions = place / "photos" / "wide.txt"
    shutil.copy(asset_path("samples") / "wide.jpg", place / "photos")
    captions.write_text("red, hat, blue")
    texts = []
    for correction in CORRECTIONS:
        done = qwen35mm(*shlex.split(correction)[1:])
        assert done.returncode == 0, f"{correction}: {done.stderr}"
        texts.append(captions.read_text().strip())
    assert texts == [
        "red, hat, blue",
        "red, cap, blue",
        "red, hat, blue",
        "red, hat, blue",
        "ohwx, night, red, hat, blue",
        "ohwx, night, red, blue",
        "ohwx, blue, night, red",
    ]
    assert (place / "lengths.svg").read_text().startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(place: Path, recipe: str) -> None:
    before = {path for path in place.rglob("*") if ".qwen35mm" not in path.parts}
    with running_server() as server, running_server() as other:
        of_host = {"localhost": server.url, "one": server.url, "two": other.url}
        line = re.sub(r"http://(\w+):8000", lambda match: of_host[match[1]], recipe)
        done = run(*shlex.split(line), cwd=place)
        assert bool(server.bodies or other.bodies) == ("--backend" in recipe)
    assert done.returncode == 0, done.stderr
    made = {path for path in place.rglob("*") if ".qwen35mm" not in path.parts} - before
    if "--dry-run" in recipe:
        assert not made
    elif "--mode" in recipe:
        text = (place / "tagged" / "two-shapes.txt").read_text()
        assert ("circle, diamond" in text, text != "circle, diamond\n") == ("append" in recipe, True)
    elif "--folder-prompts" in recipe:
        assert (place / "concepts" / "cat" / "one-shape.txt").read_text().startswith("ohwx cat")
    elif "--video-suffix" in recipe:
        assert {path.name for path in made} == {"IMG_1.txt", "IMG_1.video.txt"}
    elif "--split" in recipe:
        parts = {"scenes/film.0001.mp4", "scenes/film.0001.txt", "scenes/film.0003.txt"}
        expected = {place / name for name in parts} if "--clips" in recipe else {place / "films" / "film.txt"}
        assert expected <= made, sorted(made)
    elif "--shard" not in recipe:
        assert made, done.stderr
