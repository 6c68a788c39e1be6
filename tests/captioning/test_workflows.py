"""Datasets from beginning to end, as their makers type the commands; the model's answers are made up.

Each test is one trainer's or tool's workflow. What can go wrong in each step has tests of its own.
"""

from __future__ import annotations

import importlib
import io
import json
import shutil
import tarfile
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.texts.presets import PRESETS
from tests.backends.remote.server import Handler, answers, closes, running_server
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.runs import listed, texts
from tests.captioning.test_parts import make_video
from tests.cli.conftest import Done, Run
from tests.forked import PATIENCE_S

TAGS, SHORT, DETAILED = "1girl, tree, hat, sky", "A girl under a tree.", "A girl in a hat sits under a tall tree."
ANSWERS = {"tags": TAGS, "short": SHORT, "detailed": DETAILED}
Caption = Callable[..., Done]


def answer(asked: Asked) -> str:
    """To a preset what it asks for, to a summary of parts and to any other prompt something to recognise it by."""
    if not asked.digest:
        return "All of the film."
    presets = (name for name in ANSWERS if asked.question in (PRESETS[name].text, PRESETS[name].video_text))
    return ANSWERS.get(next(presets, ""), f"An answer to: {asked.question}")


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(answer)


@pytest.fixture
def caption(qwen35mm: Run, model: FakeModel, media_in_process: None, monkeypatch: pytest.MonkeyPatch) -> Caption:
    """`qwen35mm caption`, which must do all that it was asked for."""

    @asynccontextmanager
    async def open_captioner(*_: object, **__: object) -> AsyncIterator[Captioner]:
        yield model.captioner()

    command = importlib.import_module("qwen35mm.cli.caption")
    monkeypatch.setattr(command, "open_captioner", open_captioner)
    monkeypatch.setattr(command, "begin_digest", lambda *_: None)

    def caption(*arguments: object) -> Done:
        done = qwen35mm("caption", *arguments)
        assert done.returncode == 0, done.stderr
        return done

    return caption


def pictures(folder: Path, *names: str) -> Path:
    """Pictures of these names, all different."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(zlib.crc32(name.encode())).save(path)
    return folder


def files(folder: Path) -> list[str]:
    """What a trainer finds in a folder."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if ".qwen35mm" not in path.parts)


def test_kohya_folders_with_repeats_and_trigger_words(caption: Caption, tmp_path: Path, model: FakeModel) -> None:
    images = pictures(tmp_path / "img", "10_ohwx girl/a.png", "10_ohwx girl/b.jpg", "2_style/c.png")
    for folder, trigger in (("10_ohwx girl", "ohwx girl"), ("2_style", "sks style")):
        (images / folder / "trigger.txt").write_text(trigger)
    options = ("--for", "kohya-sdxl", "--preset", "tags", "--folder-prompts")
    caption(images, *options)
    assert (images / "10_ohwx girl" / "b.txt").read_text() == f"ohwx girl, {TAGS}\n"
    assert (images / "2_style" / "c.txt").read_text() == f"sks style, {TAGS}\n"
    assert files(images / "2_style") == ["c.png", "c.txt", "trigger.txt"]
    pictures(images, "2_style/new.png")
    assert "1 done, 3 skipped" in caption(images, *options).stderr
    assert len(model.asked) == 4


def test_onetrainer_draws_one_of_several_captions(caption: Caption, tmp_path: Path) -> None:
    concept = pictures(tmp_path / "concept", "a.png", "more/b.png")
    caption(concept, "--for", "onetrainer", "--preset", "tags,short", "--trigger", "ohwx")
    expected = f"ohwx, {TAGS}\nohwx, {SHORT}\n"
    assert texts(concept) == {"a.txt": expected, "more/b.txt": expected}


def test_musubi_trains_on_clips(caption: Caption, tmp_path: Path) -> None:
    make_video(tmp_path / "films" / "film.mp4", (1, 2, 3))
    clips, listing = tmp_path / "clips", tmp_path / "videos.jsonl"
    options = ("--split", "scenes", "--clips", clips, "--for", "musubi", "--output", f"videos:{listing}")
    for _ in range(2):
        caption(tmp_path / "films", "--preset", "detailed", *options)
    assert files(clips) == ["film.0001.mp4", "film.0002.mp4", "film.0003.mp4"]
    found = {line["video_path"]: line["caption"] for line in listed(listing)}
    assert found == {str(clips / name): DETAILED for name in files(clips)}


def test_ai_toolkit_has_a_long_and_a_short_caption(caption: Caption, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", "a.png", "b.png")
    dataset = tmp_path / "dataset.json"
    caption(photos, "--for", "ai-toolkit", "--preset", "detailed,short", "--output", f"ai-toolkit:{dataset}")
    found = json.loads(dataset.read_text())
    assert found == {str(photos / name): {"caption": DETAILED, "caption_short": SHORT} for name in ("a.png", "b.png")}


def test_shards_of_img2dataset_get_captions_from_their_metadata(
    caption: Caption, tmp_path: Path, model: FakeModel
) -> None:
    shards = pictures(tmp_path / "shards", "0.png", "1.png")
    with tarfile.open(shards / "00000.tar", "w") as tar:
        for number in range(2):
            row = {"url": f"https://example.com/{number}.png", "caption": f"alt {number}", "key": f"{number:09}"}
            parts = {"png": (shards / f"{number}.png").read_bytes(), "json": json.dumps(row).encode()}
            for suffix, content in parts.items():
                info = tarfile.TarInfo(f"{number:09}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    prompt = ("--prompt", "Its alternative text was: {metadata.caption|none}")
    outputs = (f"jsonl:{tmp_path / 'all.jsonl'}", f"webdataset:{tmp_path / 'new'}")
    caption(shards / "00000.tar", *prompt, *(part for output in outputs for part in ("--output", output)))
    assert sorted(asked.question for asked in model.asked) == [f"Its alternative text was: alt {n}" for n in range(2)]
    found = {row["metadata"]["url"]: row["caption"] for row in listed(tmp_path / "all.jsonl")}
    assert found["https://example.com/1.png"] == "An answer to: Its alternative text was: alt 1"
    with tarfile.open(tmp_path / "new" / "000000.tar") as tar:
        assert sorted(name.rpartition(".")[2] for name in tar.getnames()) == [*["json"] * 2, *["png"] * 2, *["txt"] * 2]


def test_hugging_face_loads_a_dataset_of_json_lines(
    caption: Caption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    photos, folder = pictures(tmp_path / "photos", "a.png", "cats/b.png"), tmp_path / "set"
    caption(photos, "--preset", "short,tags", "--output", f"dataset:{folder}")
    found: Any = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert [(row["text"], row["caption_tags"]) for row in found] == [(SHORT, TAGS)] * 2
    expected = sorted(Image.open(photos / name).tobytes() for name in ("a.png", "cats/b.png"))
    assert sorted(row["image"].tobytes() for row in found) == expected


def test_captions_are_corrected_in_bulk_and_the_next_run_keeps_that(
    caption: Caption, qwen35mm: Run, tmp_path: Path
) -> None:
    photos = pictures(tmp_path / "photos", "a.png", "b.png")
    caption(photos, "--preset", "tags")
    change = ("captions", "replace", photos, "--find", "1girl", "--with", "woman")
    assert "2 captions" in qwen35mm(*change).stderr
    assert texts(photos)["a.txt"] == f"{TAGS}\n", "it was only shown"
    assert qwen35mm(*change, "--write").returncode == 0
    pictures(photos, "new.png")
    assert "1 done, 2 skipped" in caption(photos, "--preset", "tags").stderr
    corrected = f"{TAGS.replace('1girl', 'woman')}\n"
    assert texts(photos) == {"a.txt": corrected, "b.txt": corrected, "new.txt": f"{TAGS}\n"}


def test_of_two_servers_one_dies_and_the_other_finishes(qwen35mm: Run, media_in_process: None, tmp_path: Path) -> None:
    photos, died = pictures(tmp_path / "photos", *(f"{number}.png" for number in range(6))), threading.Event()
    with running_server() as dying, running_server() as other:

        def die(handler: Handler) -> None:
            dying.otherwise, dying.model_acts = closes, [closes] * 1000
            died.set()
            closes(handler)

        def answer_then(handler: Handler) -> None:
            assert died.wait(PATIENCE_S)
            answers(["A ", "tree."])(handler)

        dying.acts, other.otherwise = [answers(["A ", "tree."]), die], answer_then
        done = qwen35mm("caption", photos, "--backend", dying.url, "--backend", other.url, "--slots", 1)
    assert (done.returncode, "6 done" in done.stderr) == (0, True), done.stderr
    assert f"{dying.host}: 1 answers, 1 lost, away" in done.stderr
    assert set(texts(photos).values()) == {"A tree.\n"}
    assert len(texts(photos)) == 6


def test_jobs_have_prompts_for_each_folder(caption: Caption, tmp_path: Path, model: FakeModel) -> None:
    pictures(tmp_path, "cats/a.png", "dogs/b.png", "style/c.png")
    (tmp_path / "cats" / "prompt.txt").write_text("Which cat?")
    (tmp_path / "jobs.toml").write_text(f"""
[defaults]
folder-prompts = true
preset = "tags"

[[job]]
sources = ["{(tmp_path / "cats").as_posix()}", "{(tmp_path / "dogs").as_posix()}"]
trigger = "ohwx"

[[job]]
sources = "{(tmp_path / "style").as_posix()}"
output = "sidecar:.caption"
""")
    for _ in range(2):
        assert caption(tmp_path / "jobs.toml").stderr.count("jobs.toml, job") == 2
    assert texts(tmp_path / "cats")["a.txt"] == "ohwx, An answer to: Which cat?\n"
    assert texts(tmp_path / "dogs") == {"b.txt": f"ohwx, {TAGS}\n"}
    assert (tmp_path / "style" / "c.caption").read_text() == f"{TAGS}\n"
    assert len(model.asked) == 3
    assert [path.parent for path in tmp_path.rglob(".qwen35mm")] == [tmp_path], "they have one manifest"


def test_a_long_video_becomes_scenes_clips_and_a_summary(caption: Caption, tmp_path: Path, model: FakeModel) -> None:
    make_video(tmp_path / "films" / "film.mp4", (1, 2, 3, 4))
    clips, records = tmp_path / "clips", tmp_path / "all.jsonl"
    options = (
        "--split",
        "scenes",
        "--clips",
        clips,
        "--summary",
        "--output",
        "sidecar",
        "--output",
        f"jsonl:{records}",
    )
    for _ in range(2):
        caption(tmp_path / "films", "--preset", "short", *options)
    assert texts(clips) == {f"film.000{number}.txt": f"{SHORT}\n" for number in range(1, 5)}
    assert texts(tmp_path / "films") == {"film.txt": "All of the film.\n"}
    found = {row["name"]: (row.get("start_s"), row.get("end_s")) for row in listed(records)}
    assert (found["film.mp4/0002"], found["film.mp4"]) == ((2.0, 4.0), (None, None))
    assert len(model.asked) == 5


def test_stills_and_clips_of_live_photos_have_their_own_captions(caption: Caption, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", "IMG_1.png")
    shutil.move(make_video(tmp_path / "IMG_1.mp4", (1,)), photos / "IMG_1.MOV")
    done = caption(photos, "--preset", "short", "--video-suffix", ".video.txt")
    assert texts(photos) == {"IMG_1.txt": f"{SHORT}\n", "IMG_1.video.txt": f"{SHORT}\n"}
    assert "another medium has that name" not in done.stderr
