"""`qwen35mm caption`, as a person or a script runs it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.checkpoints import weights_digest
from qwen35mm.cli.caption import open_captioner
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.engine import Engine
from qwen35mm.settings import ModelOptions
from tests.backends.remote.server import closes, fails, running_server
from tests.captioning.conftest import media_in_process
from tests.captioning.fake_model import picture
from tests.cli.conftest import Done, Run
from tests.forked import PATIENCE_S

SAMPLES = asset_path("samples")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "yellow", "green"]}, "number": {"type": "integer", "maximum": 9}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}

__all__ = ["media_in_process"]
Caption = Callable[..., Done]


@pytest.fixture
def caption(qwen35mm: Run, media_in_process: None) -> Caption:
    return functools.partial(qwen35mm, "caption")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A picture and a clip."""
    folder = tmp_path / "media"
    folder.mkdir()
    for name in ("one-shape.png", "moves-right.mp4"):
        shutil.copy(SAMPLES / name, folder)
    return folder


async def test_a_run_has_the_slots_that_the_machine_keeps_busy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    engines: list[Engine] = []

    def start(*arguments: Any, **others: Any) -> Engine:
        engines.append(Engine(*arguments, **others))
        return engines[-1]

    monkeypatch.setattr("qwen35mm.backends.local.Engine", start)
    monkeypatch.setattr("qwen35mm.model_library.fit.usable_cores", lambda: 8)
    options, model = CaptionOptions(state_dir=folder / "state"), ModelOptions(device="cpu")
    for for_many, asked, slots in ((True, None, 8), (False, None, 4), (True, 3, 3)):
        asking = replace(model, slots=asked)
        async with open_captioner(options.job([str(folder)], asking), asking, options, for_many=for_many) as captioner:
            assert captioner.num_at_once == slots
        assert engines[-1].settings.prompts_first is for_many


def test_pictures_and_clips_get_text_files_and_a_second_run_has_nothing_to_do(
    qwen35mm: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = qwen35mm("caption", folder, "--preset", "plain")
    assert done.returncode == 0, done.stderr
    assert "2 done" in done.stderr
    assert (folder / "one-shape.txt").read_text() == "A big yellow square on the right.\n"
    assert (folder / "moves-right.txt").read_text() == "A red star moves to the right.\n"
    monkeypatch.setattr(weights_digest, "hash_file", lambda path: pytest.fail(f"{path.name} is hashed again"))
    again = qwen35mm("caption", folder, "--preset", "plain")
    assert (again.returncode, "0 done, 2 skipped" in again.stderr) == (0, True), again.stderr
    # Nor for another output.
    other = folder.parent / "other"
    assert qwen35mm("caption", folder, "--preset", "plain", "--output-dir", other, "--limit", 1).returncode == 0
    assert (other / ".qwen35mm").is_dir()


def test_a_dry_run_writes_nothing_and_shows_names_that_are_no_text(caption: Caption, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "one-shape.png", tmp_path / os.fsdecode(b"caf\xe9\n\x1b[31m.png"))
    done = caption(tmp_path, "--preset", "plain", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "To caption: 1" in done.stdout
    assert "  caf\\xe9  [31m.png: A big yellow square on the right." in done.stdout
    assert len(list(tmp_path.iterdir())) == 1


def test_records_satisfy_a_schema(caption: Caption, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    lines = tmp_path / "all.jsonl"
    done = caption(folder, "--schema", tmp_path / "schema.json", "--max-tokens", "60", "--output", f"jsonl:{lines}")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        jsonschema.validate(record["data"], SCHEMA)
        assert json.loads(record["caption"]) == record["data"]
    assert not list(folder.glob("*.txt"))


def test_ctrl_c_lets_what_is_at_work_end(caption: Caption, tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    for seed in range(60):
        picture(seed).save(folder / f"{seed:03}.png")

    def press() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not list(folder.glob("*.txt")) and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    stopped = caption(folder, "--preset", "plain", "--max-tokens", "4")
    presser.join()
    assert stopped.returncode == 130, stopped.stderr
    assert "The same command resumes." in stopped.stderr
    assert 0 < len(list(folder.glob("*.txt"))) < 60


def test_text_files_are_for_a_trainer(caption: Caption, folder: Path) -> None:
    (folder / "one-shape.caption").write_text("mine")
    done = caption(folder, "--preset", "plain", "--for", "sd-scripts", "--mode", "append")
    assert done.returncode == 0, done.stderr
    first, second = ((folder / f"{name}.caption").read_text() for name in ("one-shape", "moves-right"))
    assert first.startswith("mine, A ")
    assert second.count("\n") == 1
    for options, words in (
        (("--for", "nobody"), "--for takes sd-scripts"),
        (("--caption-tokens", "9"), "give --for"),
        (("--for", "flux", "--output-dir", "x"), "beside their media"),
        (("--video-suffix", ".video.txt", "--output", "jsonl:x.jsonl"), "one output of text files"),
        (("--video-suffix", "a/b"), "An output must be one of"),
    ):
        done = caption(folder, "--preset", "plain", *options)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_nothing_to_do_is_said(caption: Caption, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = caption(tmp_path / "empty", "--preset", "plain")
    assert (done.returncode, "Nothing to caption" in done.stderr) == (3, True)
    for name in ("one-shape.txt", "moves-right.txt"):
        (folder / name).write_text("mine")
    done = caption(folder, "--preset", "plain")
    assert (done.returncode, "somebody's own captions stay" in done.stderr) == (0, True)


def test_failures_are_listed_and_tell_the_exit_code(caption: Caption, folder: Path) -> None:
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    done = caption(folder, "--preset", "plain")
    assert done.returncode == 3, done.stderr
    (failure,) = [json.loads(line) for line in (folder / ".qwen35mm" / "failures.jsonl").read_text().splitlines()]
    assert (failure["name"], failure["kind"]) == ("broken.jpg", "damaged")
    assert str(folder / ".qwen35mm" / "failures.jsonl") in done.stderr


def test_a_limit_of_an_option_counts_and_is_named(caption: Caption, folder: Path) -> None:
    done = caption(folder, "--preset", "plain", "--max-pixels", "1000")
    assert done.returncode == 4, done.stderr
    failures = (folder / ".qwen35mm" / "failures.jsonl").read_text()
    assert failures.count("raise the limit (--max-pixels)") == 2


def test_media_at_which_a_trainer_would_stop_are_said(caption: Caption, folder: Path) -> None:
    done = caption(folder, "--preset", "plain", "--limit", "1")
    assert "can't be read" not in done.stderr
    clip = folder / "moves-right.mp4"
    clip.write_bytes(clip.read_bytes()[:200])
    done = caption(folder, "--preset", "plain")
    assert done.returncode == 3, done.stderr
    assert "1 of them can't be read: moves-right.mp4. " in done.stderr
    assert "--set-aside FOLDER moves them out" in done.stderr


def test_such_media_are_set_aside_and_come_back(caption: Caption, folder: Path) -> None:
    clip, broken = folder / "moves-right.mp4", folder.parent / "broken"
    data = clip.read_bytes()[:200]
    clip.write_bytes(data)
    how = [folder, "--preset", "plain", "--set-aside", broken]
    assert caption(*how, "--dry-run").returncode == 0
    assert clip.exists()
    done = caption(*how)
    assert (done.returncode, clip.exists()) == (0, False), done.stderr
    assert f"Set aside in {broken}: 1 medium that can't be read; " in done.stderr
    assert (broken / "moves-right.mp4").read_bytes() == data
    assert (caption(*how).returncode, caption(*how, "--take-back", "--dry-run").returncode) == (0, 2)
    done = caption(*how, "--take-back")
    assert (done.returncode, clip.read_bytes(), "Back in their folders: 1 medium." in done.stderr) == (0, data, True), (
        done.stderr
    )
    done = caption(*how, "--take-back")
    assert (done.returncode, "nothing to take back" in done.stderr) == (1, True), done.stderr
    # What has the old name meanwhile stays.
    assert caption(*how).returncode == 0
    clip.write_text("mine")
    done = caption(*how, "--take-back")
    assert (done.returncode, clip.read_text(), "Something else has its name" in done.stderr) == (3, "mine", True), (
        done.stderr
    )


def test_a_preview_without_a_cache_writes_nothing_into_the_source(
    caption: Caption, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memos: list[object] = []
    local = Captioner.local

    def noted(backend: Any, memo: Any) -> Captioner:
        memos.append(memo)
        return local(backend, memo)

    monkeypatch.setattr(Captioner, "local", noted)
    before = sorted(folder.rglob("*"))
    done = caption(folder, "--preset", "plain", "--preview", "1", "--no-open", "--no-disk-cache")
    assert (done.returncode, memos, sorted(folder.rglob("*"))) == (0, [None], before), done.stderr


def test_another_server_captions_with_bounded_requests_and_its_failures(caption: Caption, folder: Path) -> None:
    for seed in range(4):
        picture(seed).save(folder / f"{seed}.png")
    with running_server() as server:
        server.acts = [
            fails(503, **{"Retry-After": "0"}),
            closes,
            fails(400, {"error": {"message": "No such picture"}}),
        ]
        done = caption(folder, "--preset", "short", "--backend", server.url, "--slots", "3")
        assert done.returncode == 3, done.stderr
        assert "5 done, 1 failed" in done.stderr
        assert server.max_active <= 3
        assert {path.read_text() for path in folder.glob("*.txt")} == {"A red square.\n"}
        (failure,) = [json.loads(line) for line in (folder / ".qwen35mm" / "failures.jsonl").read_text().splitlines()]
        assert (failure["kind"], "No such picture" in failure["message"]) == ("refused", True)
        assert len(server.bodies) == 6 + 2


def test_what_a_server_cannot_do_is_said_once_and_not_for_each_picture(caption: Caption, tmp_path: Path) -> None:
    for seed in range(2):
        picture(seed).save(tmp_path / f"{seed}.png")
    with running_server() as server:
        done = caption(tmp_path, "--backend", server.url, "--thinking-budget", "50")
        assert done.returncode == 1, done.stderr
        assert "can't be asked for thinking_budget" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert server.bodies == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "nowhere"),
        ([".", "--preset", "shrot"], "short"),
        ([".", "--prompt", "{colour}"], "{width}"),
        ([".", "--shard", "5/4"], "1/n"),
        ([".", "--temperature", "-1"], "temperature"),
        ([".", "--output", "xml:a"], "jsonl:FILE"),
        ([".", "--require", "re:("], "regular expression"),
        ([".", "--schema", "nowhere.json"], "nowhere.json"),
        ([".", "--backend", "ftp://example.com"], "http"),
    ],
)
def test_what_cannot_be_meant_is_said_before_a_model_is_looked_for(
    caption: Caption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QWEN35MM_MODEL", "./no-such-model")
    done = caption(*args)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert "no-such-model" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_folders_prompts_lists_for_trainers_and_defaults(caption: Caption, folder: Path, tmp_path: Path) -> None:
    (folder / "prompt.txt").write_text("Describe the picture.")
    (folder / "trigger.txt").write_text("ohwx")
    (folder / "one-shape.txt").write_text("1girl, hat")
    images = tmp_path / "images.jsonl"
    done = caption(
        *(
            folder,
            "--folder-prompts",
            "--prefix",
            "{metadata.by|somebody}: ",
            "--for",
            "sd-scripts",
            "--keep-tokens",
            1,
        ),
        *("--mode", "prepend", "--output", "sidecar:.txt", "--output", f"images:{images}", "--include", "*.png"),
    )
    assert done.returncode == 0, done.stderr
    assert "{metadata.by} was missing for 1 caption: its default stands there." in done.stderr
    said = "somebody: A big yellow square on the right."
    assert (folder / "one-shape.txt").read_text() == f"ohwx, 1girl, {said} hat\n"
    line = {"image_path": str(folder / "one-shape.png"), "caption": f"ohwx, {said}"}
    assert json.loads(images.read_text()) == line


@pytest.mark.parametrize("option", ["--prefix", "--suffix", "--trigger", "--output-dir"])
def test_unknown_placeholders_are_refused(caption: Caption, folder: Path, option: str) -> None:
    done = caption(folder, "--preset", "plain", option, "{foldr}")
    assert (done.returncode, "Unknown placeholder {foldr}" in done.stderr) == (1, True), done.stderr
