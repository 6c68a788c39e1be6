"""Videos in parts: each part once in each output, found again without decoding, and cut out without loss."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.media import workers
from qwen35mm.captioning.media.splits import parse_split
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.sources.scan import ScanOptions
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_probe import probe_video
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.kills import killed_at, needs_fork
from tests.captioning.outputs.helpers import rows_of
from tests.captioning.runs import failures, job, listed, run, settings, texts
from tests.preprocess.media_files import encode_video

pytestmark = pytest.mark.usefixtures("media_in_process")

SCENE = 20
FPS = 10


def scene(seed: int) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC))


def make_video(path: Path, seeds: Sequence[int], *, key_every: int = 5, container: str = "mp4") -> Path:
    """A video of one scene of 2 s for each seed; frames get lighter, so that each looks different."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_encoded(tuple(seeds), key_every, container))
    # A file that just changed is read again.
    os.utime(path, (1e9, 1e9))
    return path


@functools.cache
def _encoded(seeds: tuple[int, ...], key_every: int, container: str) -> bytes:
    frames = [(scene(seed) * (0.8 + t / 100)).astype(np.uint8) for seed in seeds for t in range(SCENE)]
    options = {"g": str(key_every), "keyint_min": str(key_every), "sc_threshold": "0", "crf": "10"}
    return encode_video(frames, fps=FPS, options=options, container=container)


def split(folder: Path, text: str, *, outputs: Sequence[str] = ("sidecar",), **options: Any) -> Job:
    return job(folder, outputs=outputs, split=parse_split(text), **options)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A video of three scenes, one of a single scene, and a picture."""
    folder = tmp_path / "media"
    make_video(folder / "long.mp4", (1, 2, 3))
    make_video(folder / "more" / "short.mp4", (4,))
    picture(1).save(folder / "still.png")
    return folder


async def test_each_scene_has_a_text_file_and_a_record(videos: Path, tmp_path: Path) -> None:
    model, all_rows = FakeModel(), tmp_path / "all.jsonl"
    outcome = await run(split(videos, "scenes", outputs=("sidecar", f"jsonl:{all_rows}")), model)
    assert (outcome.exit_code, outcome.counts.num_found, len(model.asked)) == (0, 5, 5)
    written = texts(videos)
    assert set(written) == {"long.0001.txt", "long.0002.txt", "long.0003.txt", "more/short.txt", "still.txt"}
    assert len(set(written.values())) == 5
    rows = {row["name"]: row for row in listed(all_rows)}
    assert [
        (name, row["part"], row["start_s"], row["end_s"], row["duration_s"], f"{row['caption']}\n")
        for name, row in sorted(rows.items())
        if "part" in row
    ] == [(f"long.mp4/{n:04}", n, 2.0 * n - 2, 2.0 * n, 2.0, written[f"long.{n:04}.txt"]) for n in (1, 2, 3)]
    assert {row["path"] for row in rows.values() if "part" in row} == {str(videos / "long.mp4")}


async def test_parts_are_found_again_without_decoding(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await _captioned(videos, "scenes", FakeModel())
    monkeypatch.setattr(workers, "find_parts", None)
    again = FakeModel()
    outcome = await run(split(videos, "scenes"), again)
    assert (outcome.counts.num_present, again.asked, texts(videos)) == (5, [], before)


async def _captioned(videos: Path, text: str, model: FakeModel) -> dict[str, str]:
    await run(split(videos, text), model)
    return texts(videos)


async def test_whole_videos_keep_their_captions(videos: Path) -> None:
    """The key of a whole video is the same, with --split or without."""
    await run(job(videos), FakeModel())
    model = FakeModel()
    outcome = await run(split(videos, "10s"), model)
    assert (outcome.counts.num_present, model.asked) == (3, [])
    assert (await run(split(videos, "scenes"), model)).counts.num_captioned == 3


async def test_parts_are_told_apart_by_what_they_show(videos: Path) -> None:
    """The model sees each part's own frames, and nothing of the next."""
    model = FakeModel()
    await run(split(videos, "scenes"), model)
    alone = FakeModel()
    other = videos.parent / "scenes"
    for number, seed in enumerate((1, 2, 3)):
        make_video(other / f"{number}.mp4", (seed,))
    await run(job(other), alone)
    assert len({asked.digest for asked in model.asked}) == len(model.asked)


async def test_prompts_know_a_part_by_its_video_and_its_own_duration(videos: Path) -> None:
    model = FakeModel()
    await run(job(videos, "{stem} {folder|top} {duration|none}", split=parse_split("4s")), model)
    assert sorted(asked.question for asked in model.asked) == [
        "long top 2.0",
        "long top 4.0",
        "short more 2.0",
        "still top none",
    ]


async def test_a_video_that_cannot_be_split_fails_alone(videos: Path) -> None:
    broken = videos / "long.mp4"
    broken.write_bytes(broken.read_bytes()[:300])
    outcome = await run(split(videos, "scenes"), FakeModel())
    assert (outcome.exit_code, [each["name"] for each in failures(videos)]) == (3, ["long.mp4"])
    make_video(broken, (1, 2, 3))
    assert (await run(split(videos, "scenes"), FakeModel())).exit_code == 0
    assert failures(videos) == []


async def test_a_limit_counts_parts(videos: Path) -> None:
    outcome = await run(split(videos, "scenes", run=settings(limit=2)), FakeModel())
    assert (outcome.exit_code, len(texts(videos))) == (0, 2)
    assert (await run(split(videos, "scenes"), FakeModel())).counts.num_captioned == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": ("webdataset:tars",)}, "give --clips FOLDER"),
        ({"output_settings": OutputSettings(embed_media=True)}, "give --clips FOLDER"),
        ({"text": "never", "clips": Path("clips")}, "say with --split which parts"),
        ({"text": "head:81", "clips": Path("clips")}, "Leave --clips out"),
    ],
)
def test_what_does_not_go_together_is_refused(videos: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptioningError, match=message):
        split(videos, options.pop("text", "scenes"), **options).check()


async def test_clips_are_captioned_as_files_with_their_real_times(videos: Path, tmp_path: Path) -> None:
    clips, model = tmp_path / "clips", FakeModel()
    specs = [f"jsonl:{tmp_path / 'all.jsonl'}", f"dataset:{tmp_path / 'set'}", f"webdataset:{tmp_path / 'tars'}"]
    specs += [f"parquet:{tmp_path / 'rows'}"]
    one = split(videos, "scenes", outputs=("sidecar", *specs), clips=clips)
    assert (await run(one, model)).exit_code == 0
    names = {f"long.{n:04}" for n in (1, 2, 3)} | {"more/short.0001"}
    assert set(texts(clips)) == {f"{name}.txt" for name in names}
    assert {path.relative_to(clips).as_posix() for path in clips.rglob("*.mp4")} == {f"{name}.mp4" for name in names}
    for spec in specs:
        rows = [row for row in rows_of(spec) if row.get("part") is not None]
        assert sorted((row["name"], row["part"], row["start_s"], row["end_s"]) for row in rows) == [
            *((f"long.mp4/{n:04}", n, 2.0 * n - 2, 2.0 * n) for n in (1, 2, 3)),
            ("more/short.mp4/0001", 1, 0.0, 2.0),
        ]
    again = FakeModel()
    assert (await run(one, again)).counts.num_present == 5
    assert again.asked == []


async def test_pictures_and_clips_are_in_two_folders_of_a_dataset(videos: Path, tmp_path: Path) -> None:
    """By what the sources have: whichever is captioned first."""
    spec, pictures = f"dataset:{tmp_path / 'set'}", f"dataset:{tmp_path / 'pictures'}"
    for limit in (1, None):
        await run(job(videos, outputs=(spec,), run=settings(limit=limit)), FakeModel())
    both = ["images/still.png", "videos/long.mp4", "videos/more/short.mp4"]
    assert sorted(row["file_name"] for row in rows_of(spec)) == both
    # Names that end like a clip's don't count, and neither does what is left out.
    picture(2).save(videos / "late.png")
    (videos / "late.mp4").write_bytes((videos / "late.png").read_bytes())
    only = job(videos, outputs=(pictures,), scan=ScanOptions(exclude=("long.mp4", "more")))
    await run(only, FakeModel())
    assert sorted(row["file_name"] for row in rows_of(pictures)) == ["late.png", "late.png.png", "still.png"]


@pytest.mark.parametrize(("container", "suffix"), [("mp4", ".mp4"), ("matroska", ".mkv"), ("mpegts", ".ts")])
async def test_clips_have_each_frame_once(tmp_path: Path, container: str, suffix: str) -> None:
    """Key frames don't lie at multiples of a second: boundaries move, and no frame is lost or doubled."""
    media, clips = tmp_path / "media", tmp_path / "clips"
    source = make_video(media / f"a{suffix}", (1, 2, 3), key_every=7, container=container)
    assert (await run(split(media, "1s", clips=clips), FakeModel())).exit_code == 0
    paths = sorted(clips.glob(f"*{suffix}"))
    assert len(paths) == 6
    whole = pixels_of(source)
    assert np.array_equal(np.concatenate([pixels_of(path) for path in paths]), whole)


def pixels_of(path: Path) -> np.ndarray:
    """Every frame of a video."""
    info = probe_video(path, MediaLimits())
    frames = decode_frames(path, info, range(info.num_frames), MediaLimits())
    return np.array([np.asarray(frame) for _, frame in frames])


@pytest.mark.parametrize("container", ["mp4", "matroska"])
async def test_clips_have_the_sound_of_their_time(tmp_path: Path, container: str) -> None:
    """Every packet of the sound once, copied, and within the clip's length."""
    media, clips = tmp_path / "media", tmp_path / "clips"
    silent = make_video(tmp_path / "silent.mp4", (1, 2))
    source = media / ("a.mp4" if container == "mp4" else "a.mkv")
    media.mkdir()
    with av.open(str(silent)) as pictures, av.open(str(source), "w", format=container) as target:
        shown = target.add_stream_from_template(pictures.streams.video[0])
        heard = target.add_stream("aac", rate=8000, layout="mono")
        for packet in pictures.demux(video=0):
            if packet.size:
                packet.stream = shown
                target.mux(packet)
        for number in range(31):
            tone = np.sin(np.arange(1024) * (number + 1) / 50).astype(np.float32)[None]
            frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, number * 1024
            target.mux(heard.encode(frame))
        target.mux(heard.encode())
    os.utime(source, (1e9, 1e9))
    assert (await run(split(media, "scenes", clips=clips), FakeModel())).exit_code == 0
    parts = [sound_of(path) for path in sorted(clips.glob("a.*.m*"))]
    whole = [packet for packet in sound_of(source) if packet[0] >= 0]
    assert [data for part in parts for _, data in part] == [data for _, data in whole]
    assert [0 <= start_s < 2.2 for part in parts for start_s, _ in part] == [True] * len(whole)
    assert len(parts) == 2


def sound_of(path: Path) -> list[tuple[float, bytes]]:
    """Start in seconds and content of each packet of a file's sound."""
    with av.open(str(path)) as file:
        stream = file.streams.audio[0]
        packets = [packet for packet in file.demux(stream) if packet.size and packet.pts is not None]
        return [(float(packet.pts * stream.time_base), bytes(packet)) for packet in packets]


async def test_a_clip_of_a_scene_has_nothing_of_another(tmp_path: Path) -> None:
    """Without a key frame at its cut, a scene's clip begins at the next one, and the record says so."""
    media, clips, rows = tmp_path / "media", tmp_path / "clips", tmp_path / "all.jsonl"
    make_video(media / "a.mp4", (1, 2), key_every=7)
    await run(split(media, "scenes", outputs=(f"jsonl:{rows}",), clips=clips), FakeModel())
    assert [(row["start_s"], row["end_s"], row["duration_s"]) for row in listed(rows)] == [
        (0.0, pytest.approx(2.0, abs=0.31), pytest.approx(2.0, abs=0.31)),
        (2.1, 4.0, 1.9),
    ]
    second = pixels_of(clips / "a.0002.mp4")
    assert np.array_equal(second, pixels_of(media / "a.mp4")[21:])


@pytest.mark.parametrize(("key_every", "times"), [(100, [(0.0, 6.0)]), (45, [(0.0, 4.0), (4.5, 6.0)])])
async def test_a_scene_without_a_key_frame_is_in_the_clip_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key_every: int, times: list[tuple[float, float]]
) -> None:
    media, clips, rows = tmp_path / "media", tmp_path / "clips", tmp_path / "all.jsonl"
    make_video(media / "a.mp4", (1, 2, 3), key_every=key_every)
    one = split(media, "scenes", outputs=("sidecar", f"jsonl:{rows}"), clips=clips)
    outcome = await run(one, FakeModel())
    assert (outcome.exit_code, failures(media)) == (0, [])
    assert sorted(texts(clips)) == [f"a.{n:04}.txt" for n in range(1, len(times) + 1)]
    # The last frames before a cut may need one behind it.
    assert [(row["start_s"], pytest.approx(row["end_s"], abs=0.31)) for row in listed(rows)] == times
    assert f"a.mp4: {3 - len(times)} of its scenes have no key frame" in caplog.text
    again = FakeModel()
    assert (await run(one, again)).counts.num_present == len(times)
    assert again.asked == []


async def test_what_no_clip_can_be_made_of_is_not_broken(tmp_path: Path) -> None:
    """Such as an AVI, whose container isn't written here."""
    media = tmp_path / "media"
    make_video(media / "a.avi", (1, 2), container="avi")
    picture(1).save(media / "still.png")
    one = split(media, "scenes", clips=tmp_path / "clips", aside=tmp_path / "broken")
    outcome = await run(one, FakeModel())
    assert (outcome.exit_code, {each["kind"] for each in failures(media)}) == (3, {"no clip"})
    assert (outcome.broken, (media / "a.avi").exists()) == ([], True)


async def test_a_clip_that_is_gone_is_cut_out_again(videos: Path, tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    await run(split(videos, "scenes", clips=clips), FakeModel())
    second = clips / "long.0002.mp4"
    content = second.read_bytes()
    second.unlink()
    model = FakeModel()
    await run(split(videos, "scenes", clips=clips), model)
    assert (second.read_bytes(), model.asked) == (content, [])


async def test_parts_of_another_split_are_told_and_pruned(videos: Path, tmp_path: Path) -> None:
    """Three scenes become two parts of four seconds: the third is of no part any more."""
    specs = ("sidecar", f"jsonl:{tmp_path / 'all.jsonl'}", f"parquet:{tmp_path / 'rows'}")
    await run(split(videos, "scenes", outputs=specs), FakeModel())
    assert (await run(split(videos, "4s", outputs=specs), FakeModel())).num_old == 1
    (videos / "long.0003.txt").write_text("mine")
    pruned = await run(split(videos, "4s", outputs=specs, run=settings(prune=True)), FakeModel())
    assert (pruned.num_old, (videos / "long.0003.txt").read_text()) == (0, "mine")
    assert {path.name for path in videos.glob("long.*.txt")} == {f"long.{n:04}.txt" for n in (1, 2, 3)}
    for spec in specs[1:]:
        assert sorted((row["name"], row.get("end_s")) for row in rows_of(spec)) == [
            ("long.mp4/0001", 4.0),
            ("long.mp4/0002", 6.0),
            ("more/short.mp4", None),
            ("still.png", None),
        ]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("with_clips", [False, True])
async def test_whole_videos_that_are_in_parts_now_are_told_and_pruned(
    videos: Path, tmp_path: Path, *, beside: bool, with_clips: bool
) -> None:
    captions = None if beside else tmp_path / "captions"
    specs = ("sidecar", f"jsonl:{tmp_path / 'all.jsonl'}", f"parquet:{tmp_path / 'rows'}")
    specs += (f"dataset:{tmp_path / 'set'}",) if with_clips else ()
    how: dict[str, Any] = {"outputs": specs, "output_settings": OutputSettings(folder=captions)}
    how["state"] = tmp_path / "state" / ".qwen35mm"
    await run(job(videos, **how), FakeModel())
    clips = tmp_path / "clips" if with_clips else None
    one = split(videos, "scenes", clips=clips, **how)
    wholes = ["long.mp4", "more/short.mp4"] if with_clips else ["long.mp4"]
    outcome = await run(one, FakeModel())
    assert (outcome.num_old, outcome.num_gone) == (len(wholes), 0)
    pruned = await run(replace(one, run=settings(prune=True)), FakeModel())
    assert (pruned.num_old, pruned.num_pruned) == (0, 0)
    names = [f"long.mp4/{n:04}" for n in (1, 2, 3)]
    names += ["more/short.mp4/0001" if with_clips else "more/short.mp4", "still.png"]
    for spec in specs[1:]:
        assert sorted(row["name"] for row in rows_of(spec)) == names
    text_files = {**texts(videos), **({} if captions is None else texts(captions))}
    assert ("long.txt" in text_files, "more/short.txt" in text_files) == (False, not with_clips)
    # Without --split again, the wholes are there as before, from the manifest.
    model = FakeModel()
    assert (await run(job(videos, **how), model)).counts.num_recalled == len(wholes)
    assert model.asked == []


async def test_captions_of_wholes_stay_where_they_are_wanted(videos: Path, tmp_path: Path) -> None:
    rows = tmp_path / "all.jsonl"
    one = split(videos, "scenes", outputs=(f"jsonl:{rows}",), run=settings(whole="timeline", prune=True))
    for _ in range(2):
        assert (await run(one, FakeModel())).num_old == 0
        assert "long.mp4" in {row["name"] for row in listed(rows)}


async def test_clips_of_another_split_are_pruned_with_their_captions(videos: Path, tmp_path: Path) -> None:
    clips, specs = tmp_path / "clips", ("sidecar", f"dataset:{tmp_path / 'set'}")
    await run(split(videos, "scenes", outputs=specs, clips=clips), FakeModel())
    changed = clips / "long.0002.mp4"
    changed.write_bytes(b"mine")
    one = split(videos, "10s", outputs=specs, clips=clips)
    assert (await run(one, FakeModel())).num_old > 0
    assert (clips / "long.0003.mp4").exists()
    await run(split(videos, "10s", outputs=specs, clips=clips, run=settings(prune=True)), FakeModel())
    names = {path.name for path in clips.rglob("*") if path.is_file() and path.suffix in (".mp4", ".txt")}
    assert names - {"long.0002.txt"} == {
        "long.0001.mp4",
        "long.0001.txt",
        "long.0002.mp4",
        "short.0001.mp4",
        "short.0001.txt",
    }
    assert changed.read_bytes() == b"mine"
    rows = {row["name"] for row in rows_of(specs[1])}
    assert "long.mp4/0003" not in rows


async def test_captions_of_old_clips_are_pruned_with_a_relative_folder(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a kill between the removal of the clips and that of their captions."""
    monkeypatch.chdir(tmp_path)
    clips = Path("clips")
    await run(split(videos, "scenes", clips=clips), FakeModel())
    assert (await run(split(videos, "10s", clips=clips), FakeModel())).num_old == 2
    (clips / "long.0003.mp4").unlink()
    pruned = await run(split(videos, "10s", clips=clips, run=settings(prune=True)), FakeModel())
    assert (pruned.num_gone, pruned.num_pruned) == (0, 2)
    stems = {path.name.removesuffix(path.suffix) for path in clips.iterdir() if path.is_file()}
    assert stems == {"long.0001"}


async def test_clips_in_a_source_are_no_source(videos: Path) -> None:
    for _ in range(2):
        outcome = await run(split(videos, "scenes", clips=videos / "clips"), FakeModel())
        assert outcome.counts.num_found == 5


def test_names_of_parts() -> None:
    part = Item("a/b.c.mp4/0012", b"", "video", None, {}, Part(12, 1.0, 2.0))
    assert (part.medium_name, part.file_name, part.stem, part.folder) == ("a/b.c.mp4", "a/b.c.0012.mp4", "b.c", "a")


SLOW_STEPS = [pytest.param(step, marks=pytest.mark.slow) for step in range(5, 110, 9)]


@needs_fork
@pytest.mark.parametrize("step", [*range(2, 110, 27), *SLOW_STEPS])
@pytest.mark.parametrize("with_clips", [False, True])
def test_kills_leave_each_part_once(videos: Path, tmp_path: Path, step: int, with_clips: bool) -> None:
    clips = tmp_path / "clips" if with_clips else None
    specs = [f"jsonl:{tmp_path / 'all.jsonl'}"] + ([f"webdataset:{tmp_path / 'tars'}"] if with_clips else [])
    one = split(videos, "scenes", outputs=("sidecar", *specs), clips=clips)

    def go() -> int:
        model = FakeModel()
        assert asyncio.run(carry_out(one, model.captioner())).exit_code == 0
        return len(model.asked)

    killed_at(step, go, torn_bytes=step % 2 * 5)
    go()
    where = videos if clips is None else clips
    files = {path.stem: path.read_text() for path in where.rglob("*.txt")}
    parts = {f"long.{n:04}" for n in (1, 2, 3)} | ({"short.0001"} if with_clips else {"short", "still"})
    assert set(files) == parts
    for spec in specs:
        rows = rows_of(spec)
        assert sorted(row["name"] for row in rows) == [
            *(f"long.mp4/{n:04}" for n in (1, 2, 3)),
            "more/short.mp4/0001" if with_clips else "more/short.mp4",
            "still.png",
        ]
    assert go() == 0
    assert [path for path in tmp_path.rglob("*") if ".qwen35mm-" in path.name or path.name == "backups"] == []
