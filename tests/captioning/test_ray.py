"""Captions from engines on a Ray cluster: with actors in this process, and on real clusters whose engines die."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.contract import Event, GenerationRequest
from qwen35mm.engine import EngineSettings
from tests.captioning.fake_model import picture
from tests.captioning.runs import failures, job, listed, settings, texts

pytest.importorskip("ray")

from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError

from qwen35mm.captioning import ray_cluster
from qwen35mm.captioning.ray_cluster import open_cluster
from tests.captioning.test_parts import make_video
from tests.children import ROOT, environment
from tests.cli.conftest import Run

NUM_ITEMS = 40
# Ray, and two processes with a model, take half a minute to start.
PATIENCE_S = 240
RAY = ("--ray", "local", "--ray-actors", "2")
T = TypeVar("T")


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for seed in range(NUM_ITEMS):
        picture(seed).save(folder / f"{seed:02}.png")
    return folder


def sent(value: Any) -> Any:
    """It, as another process would get it."""
    return cloudpickle.loads(cloudpickle.dumps(value))  # pyright: ignore[reportPrivateImportUsage]


@dataclass
class LocalActor:
    """What Ray makes of a class, in this process; arguments and answers are pickled as between two."""

    actor: Any

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            try:
                answer = await getattr(self.actor, name)(*sent(arguments))
            except Exception as error:
                raise RayTaskError(name, f"{type(error).__name__}: {error}", error) from error
            return sent(answer)

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(call(*arguments)))

    def close(self) -> None:
        made = vars(self.actor)
        if "_captioner" in made:
            made["_captioner"].backend.close()
        if "_workers" in made:
            made["_workers"].close()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch, media_in_process: None) -> Iterator[list[LocalActor]]:
    """The actors of a cluster without processes of its own, in the order that they are made."""
    made: list[LocalActor] = []

    def remote(kind: Callable[..., Any]) -> Any:
        def make(*arguments: Any) -> LocalActor:
            made.append(LocalActor(kind(*sent(arguments))))
            return made[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    monkeypatch.setattr(ray_cluster, "connect", lambda address: [{"CPU": 2.0}])
    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(remote=remote, shutdown=lambda: None))
    yield made
    for actor in made:
        actor.close()


def test_engines_of_a_cluster_write_the_same_captions(tmp_path: Path, qwen35mm: Run, actors: list[LocalActor]) -> None:
    for seed in range(3):
        picture(seed).save(tmp_path / f"{seed}.png")
    command = ("caption", tmp_path, "--preset", "plain", "--max-tokens", "8", "--slots", "1", "--media-workers", "1")
    done = qwen35mm(*command, "--ray", "local", "--ray-actors", "2")
    assert done.returncode == 0, done.stderr
    assert "3 done" in done.stderr
    assert len(actors) == 2
    on_cluster = texts(tmp_path)
    # They are the same work: a run without Ray has nothing to do, and writes the same where it may.
    assert "0 done, 3 skipped" in qwen35mm(*command).stderr
    (tmp_path / "0.txt").unlink()
    assert qwen35mm(*command, "--state-dir", tmp_path / "other").returncode == 0
    assert texts(tmp_path) == on_cluster


def test_a_cluster_filters_parts_and_sums_them_up(tmp_path: Path, qwen35mm: Run, actors: list[LocalActor]) -> None:
    make_video(tmp_path / "film.mp4", (1, 2, 1))
    options = ("--preset", "plain", "--max-tokens", "8", "--slots", "1", "--split", "scenes", "--summary")
    options += ("--skip-similar", "2", "--where", "sharpness > 0", "--output", f"jsonl:{tmp_path / 'all.jsonl'}")
    done = qwen35mm("caption", tmp_path, *options, "--ray", "local", "--ray-actors", "2")
    assert (done.returncode, "1 left out by --where and --skip-similar" in done.stderr) == (0, True), done.stderr
    *parts, whole = sorted(listed(tmp_path / "all.jsonl"), key=lambda line: "part" not in line)
    assert [(part["name"][:9], part["sharpness"] > 0, part["letterbox"]) for part in parts] == [
        ("film.mp4/", True, 0.0)
    ] * 2
    assert (whole["name"], whole["flags"]) == ("film.mp4", ["truncated"])
    # Without Ray, it is the same work.
    assert "0 done, 4 skipped" in qwen35mm("caption", tmp_path, *options).stderr


def test_a_medium_with_several_captions_is_decoded_once_by_one_engine(
    tmp_path: Path, qwen35mm: Run, actors: list[LocalActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        picture(seed).save(tmp_path / f"{seed}.png")
    decoded: list[str] = []
    prepare = MediaWorkers.prepare

    async def counted(self: MediaWorkers, item: Item, *arguments: Any, **options: Any) -> Any:
        decoded.append(item.name)
        return await prepare(self, item, *arguments, **options)

    monkeypatch.setattr(MediaWorkers, "prepare", counted)
    words = ("--preset", "plain,short,tags", "--max-tokens", "8", "--slots", "1", "--media-workers", "1")
    done = qwen35mm("caption", tmp_path, *words, "--ray", "local", "--ray-actors", "2")
    assert done.returncode == 0, done.stderr
    assert len(texts(tmp_path)) == 6
    assert sorted(decoded) == ["0.png", "1.png"]


def test_what_a_cluster_cannot_do_is_said(
    tmp_path: Path, qwen35mm: Run, actors: list[LocalActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(0).save(tmp_path / "0.png")
    command = ("caption", tmp_path, "--preset", "plain", "--ray", "local", "--ray-actors", "1")
    done = qwen35mm(*command, "--model", "/nowhere")
    assert (done.returncode, "There is no folder '/nowhere'" in done.stderr) == (1, True), done.stderr

    async def die(*_: object) -> None:
        raise RayActorError

    monkeypatch.setattr(ray_cluster.CaptionActor, "caption", die)
    monkeypatch.setattr(ray_cluster, "RayActorError", RayTaskError)
    qwen35mm(*command)
    assert [each["kind"] for each in failures(tmp_path)] == ["worker"]


class DeadlyBackend(LocalBackend):
    """Takes its process along when it is asked "die", and at the first "die once"; `mark` tells that it did."""

    mark: Path

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        text = request.messages[-1].text
        if text == "die" or (text == "die once" and not self.mark.exists()):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        async for event in super().stream(request):
            yield event


def load_deadly(mark: Path) -> DeadlyBackend:
    backend = DeadlyBackend.load(demo_model_path(), settings=EngineSettings(slots=1))
    assert isinstance(backend, DeadlyBackend)
    backend.mark = mark
    return backend


def job_of(media: Path, *names: str) -> Job:
    """Pictures of these names, each asked its own; no more than an engine has at once."""
    paths = sorted(media.glob("*.png"))
    for path, name in zip(paths, names, strict=False):
        path.rename(media / f"{name}.png")
    for path in paths[len(names) :]:
        path.unlink()
    return job(media, "{stem}", sampling={"max_tokens": 8}, run=settings())


@pytest.mark.slow
async def test_an_engine_that_dies_is_started_again_and_nothing_is_lost(media: Path, tmp_path: Path) -> None:
    one = job_of(media, "a", "b", "die once")
    load = functools.partial(load_deadly, tmp_path / "mark")
    async with open_cluster("local", load, num_engines=1, slots=1, num_workers=1) as captioner:
        outcome = await carry_out(one, captioner)
    assert (tmp_path / "mark").exists()
    assert (outcome.counts.num_captioned, outcome.num_failures, outcome.exit_code) == (3, 0, 0)
    assert sorted(texts(media)) == ["a.txt", "b.txt", "die once.txt"]
    # Without Ray, it is the same work.
    with closing(load()) as backend:
        outcome = await carry_out(one, Captioner.local(backend, None))
    assert (outcome.counts.num_present, outcome.counts.num_captioned) == (3, 0)


def start(media: Path, *options: str) -> subprocess.Popen[str]:
    jsonl = f"jsonl:{media.parent / 'captions.jsonl'}"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "qwen35mm", "caption", str(media), "--output", "sidecar", "--output", jsonl),
            *("--preset", "plain", "--max-tokens", "24", "--slots", "2", "--media-workers", "1"),
            *options,
        ],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the run says; it must have had no trouble."""
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, errors
    return errors


def wait_for(found: Callable[[], T], process: subprocess.Popen[str]) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def engines(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The cluster's engines that are there."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any("CaptionActor" in part for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def check(media: Path) -> None:
    """Every item once in each output."""
    lines = listed(media.parent / "captions.jsonl")
    assert len(lines) == len(texts(media)) == NUM_ITEMS
    assert {line["name"].replace(".png", ".txt"): f"{line['caption']}\n" for line in lines} == texts(media)


@pytest.mark.slow
def test_one_stops_and_the_other_goes_on(media: Path) -> None:
    process = start(media, *RAY)
    wait_for(lambda: len(texts(media)) >= 4, process)
    at_work = engines(process)
    assert len(at_work) == 2
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130, errors
    num_done = len(texts(media))
    assert 4 <= num_done < NUM_ITEMS
    _, alive = psutil.wait_procs(at_work, timeout=PATIENCE_S)
    assert alive == []
    assert f"{NUM_ITEMS - num_done} done, {num_done} skipped" in finish(start(media))
    check(media)


@pytest.mark.slow
def test_engines_that_cannot_be_started_are_said_so(media: Path) -> None:
    process = start(media, "--ray", "local", "--ray-actors", "1", "--model", "/nowhere")
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1
    assert "There is no folder '/nowhere'" in " ".join(errors.split()), errors
    assert "Traceback" not in errors
    assert texts(media) == {}


@pytest.mark.slow
async def test_an_item_that_kills_its_engines_fails_alone(media: Path, tmp_path: Path) -> None:
    one = job_of(media, "a", "b", "c", "d", "die", "e")
    load = functools.partial(load_deadly, tmp_path / "mark")
    async with open_cluster("local", load, num_engines=1, slots=1, num_workers=1) as captioner:
        outcome = await carry_out(one, captioner)
    failed = failures(media)
    assert ("die.png", "worker") in [(each["name"], each["kind"]) for each in failed]
    # What was in the same engine, each time that it ended, may have failed with it.
    assert captioner.num_at_once is not None
    assert len(failed) <= captioner.num_at_once
    assert outcome.counts.num_captioned == 6 - len(failed)
    assert (outcome.stopped, outcome.exit_code) == (None, 3)
