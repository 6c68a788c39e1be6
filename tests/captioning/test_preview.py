"""A look before a run: what is drawn, what is asked, what it would cost, and that nothing is written."""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.job import Job
from qwen35mm.captioning.media.splits import parse_split
from qwen35mm.captioning.preview import Preview
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.sample import draw
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.captioning.where import Where
from qwen35mm.errors import CaptioningError
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.runs import job, run, settings

pytestmark = pytest.mark.usefixtures("media_in_process")

STYLES = PromptSet([Question("Tags?", name="tags"), Question("Long?", name="long")])


@contextmanager
def previewed(one: Job, num: int, model: FakeModel | None = None) -> Iterator[Preview]:
    with closing(Preview(one, num)) as preview:
        preview.look()
        asyncio.run(preview.fill((model or FakeModel(answer=lambda asked: asked.question)).captioner()))
        yield preview


def described(preview: Preview) -> dict[str, list[str]]:
    return {
        row.item.name: [answer.text if isinstance(answer, Caption) else str(answer) for answer in row.answers]
        for row in preview.rows
    }


def everything(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_each_medium_gets_each_prompt_and_nothing_is_written(folder: Path) -> None:
    (folder / "0.txt").write_text("mine")
    before = everything(folder.parent)
    model = FakeModel(answer=lambda asked: asked.question)
    with previewed(replace(job(folder), prompts=STYLES), 4, model) as preview:
        assert preview.state == "done"
        assert list(described(preview).values()) == [["Tags?", "Long?"]] * 4
        assert preview.num == {"image": preview.num["image"]}
        assert preview.num["image"].high == 6
        assert preview.num_tried == {"image": 4}
        assert all(row.seconds[0] > 0 for row in preview.rows)
    # The prompts about a medium follow each other, so that its prefill is a cache hit.
    asked = Counter((each.digest, each.question) for each in model.asked)
    assert set(asked.values()) == {1}
    assert everything(folder.parent) == before


def test_prompts_to_choose_from_are_all_asked_and_a_sidecar_can_be_named(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        path.with_suffix(".txt").write_text(f"old {path.stem}")
    with previewed(job(folder, "Is it {sidecar}?", "And {name}?"), 6) as preview:
        found = described(preview)
    assert found["0.png"] == ["Is it old 0?", "And 0.png?"]
    assert len(found) == 6


async def test_what_a_run_knows_is_asked_again_and_its_manifest_stays(folder: Path) -> None:
    await run(job(folder, "Describe it."), FakeModel())
    before = everything(folder)
    model = FakeModel()
    with closing(Preview(job(folder, "Describe it."), 2)) as preview:
        preview.look()
        await preview.fill(model.captioner())
    assert len(model.asked) == 2
    assert everything(folder) == before


def items(num: int, source: Callable[[int], Any] = lambda number: Path(f"{number}.png")) -> Iterator[Item]:
    return (Item(f"{number}.png", source(number), "image") for number in range(num))


def test_each_medium_has_the_same_chance_and_the_seed_decides() -> None:
    drawn = [frozenset(item.name for item in draw(items(10), 3, seed=seed, where=None).items) for seed in range(600)]
    counts = Counter(name for names in drawn for name in names)
    assert len(counts) == 10
    assert all(130 < num < 230 for num in counts.values()), counts
    assert [item.name for item in draw(items(10), 3, seed=5, where=None).items] == [
        item.name for item in draw(items(10), 10, seed=5, where=None).items
    ][:3]
    # Another medium moves none of them.
    order = [item.name for item in draw(items(10), 10, seed=5, where=None).items]
    assert [item.name for item in draw(items(11), 11, seed=5, where=None).items if item.name != "10.png"] == order


@pytest.mark.parametrize("where", [None, "width > 3"])
def test_media_in_containers_are_not_held_beyond_a_limit(where: str | None) -> None:
    tracemalloc.start()
    entries = items(2000, lambda number: number.to_bytes(2, "big") * 10_000)
    condition = None if where is None else Where(where)
    found = draw(entries, 3, seed=0, where=condition, most_bytes=1_000_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.num.total(), len(found.items)) == (2000, 3 if where is None else 50)
    assert most < 3_000_000


def test_a_condition_on_names_is_counted_and_one_on_sizes_is_estimated(folder: Path) -> None:
    with previewed(replace(job(folder), where=Where("stem < '3'")), 2) as preview:
        assert preview.num["image"].low == preview.num["image"].high == 3
        assert {row.item.stem for row in preview.rows} < {"0", "1", "2"}
    for number in range(40):
        picture(100 + number).resize((20 if number % 4 else 90, 20)).save(folder / f"s{number}.png")
    one = replace(job(folder), where=Where("width < 50 and stem > '5'"))
    with previewed(one, 6) as preview:
        assert all(row.item.stem.startswith("s") for row in preview.rows)
        # There are 30, among 40 that have such a name.
        assert preview.num["image"].low < 30 < preview.num["image"].high <= 40
    with previewed(replace(one, where=Where("width == 90")), 10) as preview:
        assert preview.num["image"].low <= 10 <= preview.num["image"].high
    with previewed(replace(one, where=Where("sharpness >= 0 and width == 48")), 6) as preview:
        assert len(preview.rows) == 6


def test_fewer_media_than_asked_for_are_an_error_that_says_how_many(folder: Path) -> None:
    for condition, num, words in (
        (None, 7, "got 7, and 6 images and videos pass .* Give --preview 6."),
        (None, 6, None),
        ("stem == '0'", 2, "1 image or video passes"),
        ("width > 9000", 1, "Nothing to preview"),
        ("width < 9000", 7, "Give --preview 6."),
    ):
        where = None if condition is None else Where(condition)
        if words is None:
            with previewed(replace(job(folder), where=where), num):
                continue
        with pytest.raises(CaptioningError, match=words), previewed(replace(job(folder), where=where), num):
            pass
    (empty := folder.parent / "empty").mkdir()
    with pytest.raises(CaptioningError, match="Nothing to preview"), previewed(job(empty), 1):
        pass
    with pytest.raises(CaptioningError, match="--folder-prompts"):
        Preview(replace(job(folder), folder_prompts=True), 1)


def test_what_fails_is_told_and_the_others_are_captioned(folder: Path) -> None:
    (folder / "none.png").write_bytes(b"no picture")
    (folder / "torn.png").write_bytes((folder / "0.png").read_bytes()[:60])

    def answer(asked: Asked) -> str:
        return "" if asked.question == "Long?" else "A picture."

    with previewed(replace(job(folder), prompts=STYLES), 7, FakeModel(answer)) as preview:
        assert [each.name for each in preview.sample.unreadable] == ["none.png"]
        torn = next(row for row in preview.rows if row.item.name == "torn.png")
        assert (torn.failed is not None, torn.is_over, torn.answers) == (True, True, [None, None])
        others = [row for row in preview.rows if row is not torn]
        assert all(isinstance(row.answers[1], Failed) and isinstance(row.answers[0], Caption) for row in others)
        # Not all captions are there, so nobody knows what they cost.
        assert preview.costs(None) == {}


def test_kinds_are_counted_apart_up_to_the_limit(folder: Path) -> None:
    shutil.copy(asset_path("samples") / "moves-right.mp4", folder)
    one = replace(job(folder, run=settings(limit=3, max_distance=4)), prompts=STYLES)
    with previewed(one, 7) as preview:
        assert {kind: round(num.high, 3) for kind, num in preview.num.items()} == {"image": 2.571, "video": 0.429}
        both, first = preview.costs(None), preview.costs(0)
        assert set(both) == {"image", "video"}
        assert first["image"].high <= both["image"].high
        assert preview.not_counted == ["--share-similar"]


def test_of_a_video_in_parts_one_is_shown_and_all_are_counted(tmp_path: Path) -> None:
    shutil.copy(asset_path("samples") / "moves-right.mp4", tmp_path / "clip.mp4")
    one = replace(job(tmp_path), split=parse_split("1s"))
    with previewed(one, 1) as preview:
        (row,) = preview.rows
        assert row.item.part is not None
        assert row.num_parts > 1
        (alone,) = (each for each in [row.trial()] if each is not None)
        assert preview.costs(0)["video"].low >= alone.seconds[0] * row.num_parts / 4
    assert not (tmp_path / ".qwen35mm").exists()


def test_a_medium_in_a_container_has_a_file_until_the_end(folder: Path) -> None:
    tar = folder.parent / "0.tar"
    with tarfile.open(tar, "w") as file:
        file.add(folder / "0.png", "0.png")
    with previewed(job(tar), 1) as preview:
        path = preview.file(0)
        assert path.read_bytes() == (folder / "0.png").read_bytes()
        assert path.suffix == ".png"
    assert not path.exists()
    with previewed(job(folder), 1) as preview:
        assert preview.file(0).parent in (folder, folder / "more")
