"""Runs that leave media out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from qwen35mm.captioning.job import look_over
from qwen35mm.captioning.media.splits import parse_split
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.captioning.where import Where
from qwen35mm.errors import EngineError
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.runs import job, listed, run, settings, texts
from tests.captioning.test_parts import make_video

pytestmark = pytest.mark.usefixtures("media_in_process")


def skipped(folder: Path) -> dict[str, str]:
    return {line["name"]: line["reason"] for line in listed(folder / ".qwen35mm" / "skipped.jsonl")}


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    """Three sharp pictures of other sizes, and a flat one."""
    folder = tmp_path / "sizes"
    folder.mkdir()
    for seed, size in enumerate(((48, 32), (96, 64), (200, 40))):
        picture(seed).resize(size, Image.Resampling.NEAREST).save(folder / f"{seed}.png")
    Image.new("RGB", (96, 96), (90, 90, 90)).save(folder / "flat.png")
    return folder


async def test_what_does_not_satisfy_where_is_listed_and_not_asked(sizes: Path) -> None:
    model, where = FakeModel(), Where("width >= 64 and sharpness > 5 and aspect < 2.5")
    one = job(sizes, outputs=("sidecar", f"jsonl:{sizes}/all.jsonl"), where=where, run=settings())
    outcome = await run(one, model)
    counts = outcome.counts
    assert (outcome.exit_code, counts.num_captioned, counts.num_filtered, counts.num_failed) == (0, 1, 3, 0)
    assert (len(model.asked), list(texts(sizes))) == (1, ["1.txt"])
    found = skipped(sizes)
    assert sorted(found) == ["0.png", "2.png", "flat.png"]
    assert "width is 48" in found["0.png"]
    assert "aspect is 5.0" in found["2.png"]
    assert "sharpness is 0.0" in found["flat.png"]
    (record,) = listed(sizes / "all.jsonl")
    assert (record["sharpness"] > 5, record["letterbox"]) == (True, 0.0)


async def test_a_later_run_decodes_nothing_to_leave_it_out_again(sizes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(sizes, where=Where("sharpness > 5 and width > 10"), run=settings())
    await run(one, FakeModel())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(MediaWorkers, "prepare", refuse)
    outcome = await run(one, FakeModel())
    assert (outcome.counts.num_filtered, outcome.counts.num_present, outcome.exit_code) == (1, 3, 0)
    assert list(skipped(sizes)) == ["flat.png"]


async def test_a_stored_caption_does_not_pass_a_filter_that_came_later(sizes: Path) -> None:
    await run(job(sizes), FakeModel())
    model = FakeModel()
    late = job(sizes, outputs=(f"jsonl:{sizes}/all.jsonl",), where=Where("sharpness > 5"))
    outcome = await run(late, model)
    assert (outcome.counts.num_recalled, outcome.counts.num_filtered, model.asked) == (3, 1, [])
    # Without the filter, the rest follows, and the list is gone.
    outcome = await run(job(sizes, outputs=(f"jsonl:{sizes}/all.jsonl",)), model)
    assert (outcome.counts.num_recalled, outcome.counts.num_present) == (1, 3)
    assert skipped(sizes) == {}


async def test_a_filtered_item_does_not_use_up_the_limit(sizes: Path) -> None:
    outcome = await run(job(sizes, where=Where("name != '0.png'"), run=settings(limit=3)), FakeModel())
    assert (outcome.counts.num_captioned, outcome.counts.num_filtered, outcome.stopped) == (3, 1, None)


async def test_a_dry_run_counts_what_size_and_name_leave_out(sizes: Path) -> None:
    one = job(sizes, where=Where("width > 64 and sharpness > 5"))
    found = await look_over(one, FakeModel().captioner())
    assert (found.num_to_caption, found.num_filtered) == (3, 1)


async def test_one_of_a_group_that_looks_alike_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    for seed in range(2):
        scene = picture(seed).resize((256, 192), Image.Resampling.BICUBIC)
        scene.save(folder / f"{seed}.png")
        scene.save(folder / f"{seed}.jpg", quality=90)
        shutil.copy(folder / f"{seed}.png", folder / f"{seed}-copy.png")
    one = job(folder, run=settings(max_distance=4, skips_similar=True))
    model = FakeModel()
    outcome = await run(one, model)
    assert (outcome.counts.num_captioned, outcome.counts.num_filtered, outcome.exit_code) == (2, 4, 0)
    assert (len(model.asked), len(texts(folder))) == (2, 2)
    kept = {f"{name.removesuffix('.txt')}" for name in texts(folder)}
    assert {name[0] for name in kept} == {"0", "1"}
    assert {reason[:10] for reason in skipped(folder).values()} == {"looks like"}
    # The same ones are kept by the next run.
    again = FakeModel()
    outcome = await run(one, again)
    assert (outcome.counts.num_present, outcome.counts.num_filtered, again.asked) == (2, 4, [])
    # If the kept one is deleted, another takes its place.
    first = next(
        path
        for path in folder.iterdir()
        if path.suffix in (".png", ".jpg") and path.name[0] == "0" and path.name not in skipped(folder)
    )
    first.unlink()
    outcome = await run(one, again)
    assert (outcome.counts.num_captioned + outcome.counts.num_recalled, outcome.counts.num_filtered) == (1, 3)


async def test_several_captions_are_left_out_together(sizes: Path) -> None:
    shutil.copy(sizes / "1.png", sizes / "1-copy.png")
    prompts = PromptSet([Question("Tags.", name="tags"), Question("One sentence.", name="short")])
    one = replace(
        job(sizes, outputs=("sidecar", f"jsonl:{sizes}/all.jsonl"), where=Where("width >= 64 and sharpness > 5")),
        prompts=prompts,
        run=settings(max_distance=0, skips_similar=True),
    )
    # A caption from before isn't asked for again, and passes no filter that came later.
    await run(replace(job(sizes), prompts=PromptSet([Question("Tags.")]), run=settings(limit=2)), FakeModel())
    for path in sizes.glob("*.txt"):
        path.unlink()
    model = FakeModel()
    outcome = await run(one, model)
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.counts.num_filtered) == (0, 2, 3)
    assert len({(asked.digest, asked.question) for asked in model.asked}) == len(model.asked) <= 4
    left = {line["name"] for line in listed(sizes / "all.jsonl")}
    assert len(left) == 2
    assert set(texts(sizes)) == {name.replace(".png", kind) for name in left for kind in (".txt", ".short.txt")}
    assert skipped(sizes).keys() == {"0.png", "flat.png", "1.png", "1-copy.png"} - left
    again = FakeModel()
    outcome = await run(one, again)
    assert (outcome.counts.num_present, outcome.counts.num_filtered, again.asked) == (2, 3, [])


async def test_parts_of_videos_are_left_out_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    make_video(folder / "film.mp4", (1, 2, 1))
    make_video(folder / "short.mp4", (3,))
    alike = settings(max_distance=2, skips_similar=True)
    outputs = ("sidecar", f"jsonl:{tmp_path}/all.jsonl")
    one = job(folder, outputs=outputs, split=parse_split("scenes"), run=alike, where=Where("duration > 1"))
    outcome = await run(one, model := FakeModel())
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.counts.num_filtered) == (0, 3, 1)
    ((name, reason),) = skipped(folder).items()
    assert (name in ("film.mp4/0001", "film.mp4/0003"), "looks like" in reason) == (True, True)
    for again in range(2):
        outcome = await run(one, model)
        assert (outcome.counts.num_present, len(model.asked), len(texts(folder))) == (3, 3, 3), again


async def test_a_filtered_item_is_no_failure_any_more(sizes: Path) -> None:
    def fail(asked: Asked) -> str:
        raise EngineError("no")

    await run(job(sizes, run=settings()), FakeModel(fail))
    outcome = await run(job(sizes, where=Where("width > 9000"), run=settings()), FakeModel())
    assert (outcome.exit_code, outcome.num_failures, outcome.counts.num_filtered) == (0, 0, 4)


async def test_items_of_two_sources_with_one_name_are_compared_too(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        picture(0).save(tmp_path / name / "a.png")
    state = tmp_path / ".qwen35mm"
    found = []
    for name in ("one", "two", "one", "two"):
        each = job(tmp_path / name, state=state, run=settings(max_distance=4, skips_similar=True))
        outcome = await run(each, FakeModel())
        found.append((outcome.counts.num_captioned, outcome.counts.num_present, outcome.counts.num_filtered))
    assert found == [(1, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 1)]
