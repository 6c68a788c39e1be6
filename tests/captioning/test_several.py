"""Several captions of each medium in one run."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, carry_out, look_over
from qwen35mm.captioning.outputs import Mode, OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.sources.scan import ScanOptions
from qwen35mm.captioning.texts.prompts import PromptSet, Question, read_prompt_file
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.errors import CaptioningError, EngineError
from qwen35mm.model import load
from qwen35mm.settings import ModelOptions
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.kills import killed_at, needs_fork, stops
from tests.captioning.runs import failures, interrupted, listed, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")

QUESTIONS = {"tags": "List tags.", "short": "One sentence.", "long": "A paragraph."}


def answer(asked: Asked) -> str:
    word = next(name for name, question in QUESTIONS.items() if question == asked.question)
    return f"A {word} text of {asked.digest[:8]}."


def job(media: Path, *names: str, outputs: tuple[str, ...] = ("sidecar",), **options: object) -> Job:
    questions = [Question(QUESTIONS[name], name=name) for name in names or QUESTIONS]
    made = Job([str(media)], PromptSet(questions), outputs=[parse_output(text) for text in outputs])
    return replace(made, run=settings(**options))


def single(media: Path, name: str) -> Job:
    """A run with one prompt without a name."""
    return Job([str(media)], PromptSet([Question(QUESTIONS[name])]), outputs=[parse_output("sidecar")], run=settings())


@pytest.mark.asyncio
async def test_each_caption_gets_its_own_text_file(folder: Path) -> None:
    model = FakeModel(answer)
    outcome = await run(job(folder), model)
    assert outcome.exit_code == 0
    assert outcome.counts.num_captioned == 6
    assert len(model.asked) == 18
    found = texts(folder)
    assert len(found) == 18
    assert found["0.txt"].startswith("A tags text")
    assert found["0.short.txt"].startswith("A short text")
    assert found["more/4.long.txt"].startswith("A long text")


@pytest.mark.asyncio
async def test_the_questions_about_a_medium_follow_each_other(folder: Path) -> None:
    model = FakeModel(answer)
    await run(job(folder, slots=1), model)
    assert [asked.question for asked in model.asked] == [*QUESTIONS.values()] * 6
    assert all(len({asked.digest for asked in model.asked[at : at + 3]}) == 1 for at in range(0, 18, 3))


@pytest.mark.asyncio
async def test_a_second_run_asks_nothing(folder: Path) -> None:
    await run(job(folder), FakeModel(answer))
    before, model = texts(folder), FakeModel(answer)
    outcome = await run(job(folder), model)
    assert (model.asked, texts(folder), outcome.counts.num_present) == ([], before, 6)


@pytest.mark.asyncio
async def test_a_further_caption_is_all_that_a_later_run_asks_for(folder: Path) -> None:
    await run(single(folder, "tags"), FakeModel(answer))
    model = FakeModel(answer)
    await run(job(folder, "tags", "short"), model)
    assert {asked.question for asked in model.asked} == {QUESTIONS["short"]}
    assert len(model.asked) == 6
    model = FakeModel(answer)
    await run(job(folder), model)
    assert [asked.question for asked in model.asked] == [QUESTIONS["long"]] * 6
    model = FakeModel(answer)
    await run(single(folder, "tags"), model)
    assert model.asked == []


@pytest.mark.asyncio
async def test_records_have_a_field_for_each(folder: Path, tmp_path: Path) -> None:
    outputs = [f"jsonl:{tmp_path / 'all.jsonl'}", f"parquet:{tmp_path / 'rows'}", f"dataset:{tmp_path / 'set'}"]
    outputs.append(f"webdataset:{tmp_path / 'tars'}")
    await run(job(folder, outputs=tuple(outputs)), FakeModel(answer))
    lines = listed(tmp_path / "all.jsonl")
    assert len(lines) == 6
    for line in lines:
        assert line["caption"].startswith("A tags")
        assert line["caption_short"].startswith("A short")
        assert line["caption_long"].startswith("A long")
        assert line["prompt"] == QUESTIONS["tags"]
    rows = pyarrow.parquet.read_table(tmp_path / "rows").to_pylist()
    fields = ("caption", "caption_short", "caption_long")
    assert sorted([row[each] for each in fields] for row in rows) == sorted([r[each] for each in fields] for r in lines)
    first = listed(tmp_path / "set" / "metadata.jsonl")[0]
    assert (first["text"][:6], first["caption_short"][:7]) == ("A tags", "A short")
    [shard] = (tmp_path / "tars").glob("*.tar")
    assert shard.read_bytes().count(b'"caption_short"') == 6


@pytest.mark.asyncio
async def test_a_column_appears_in_shards_of_earlier_runs(folder: Path, tmp_path: Path) -> None:
    rows = (f"parquet:{tmp_path / 'rows'}",)
    await run(replace(single(folder, "tags"), outputs=[parse_output(rows[0])]), FakeModel(answer))
    await run(job(folder, "tags", "short", outputs=rows), FakeModel(answer))
    await run(job(folder, "tags", "short", outputs=rows), FakeModel(answer))
    found = pyarrow.parquet.read_table(tmp_path / "rows").to_pylist()
    assert len(found) == 6
    assert all(row["caption_short"].startswith("A short") for row in found)


@pytest.mark.asyncio
async def test_lines_are_captions_of_one_file(folder: Path) -> None:
    await run(job(folder, outputs=("lines",)), FakeModel(lambda asked: answer(asked).replace(" text", "\ntext")))
    assert len(texts(folder)) == 6
    assert [line.split()[1] for line in texts(folder)["0.txt"].splitlines()] == [*QUESTIONS]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("append", ["mine", "ohwx, A tags", "ohwx, A short"]), ("prepend", ["ohwx, A tags", "ohwx, A short", "mine"])],
)
async def test_lines_are_added_to_a_persons_lines(folder: Path, mode: Mode, expected: list[str]) -> None:
    """Each line is a caption with its own trigger word, and a further style repeats none."""
    (folder / "0.txt").write_text("mine\n")
    adding = OutputSettings(mode, one_line=True, separator=", ")
    for names in (("tags",), ("tags", "short"), ("tags", "short")):
        one = job(folder, *names, outputs=("lines",))
        await run(replace(one, style=CaptionStyle(trigger="ohwx"), output_settings=adding), FakeModel(answer))
    assert [" ".join(line.split()[:3]) for line in texts(folder)["0.txt"].splitlines()] == expected


async def test_a_file_for_each_folder_is_whole_after_an_interrupted_run(folder: Path) -> None:
    one = job(folder, outputs=("diffusion-pipe",), slots=1)
    model = FakeModel(answer, delay_s=0.01)
    assert (await interrupted(one, model, lambda run: run.counts.num_captioned > 1)).exit_code == 130
    num_asked = len(model.asked)
    for present in (num_asked // 3, 6):
        assert (await run(one, model)).counts.num_present == present
    found = [json.loads((each / "captions.json").read_text()) for each in (folder, folder / "more")]
    assert [sorted(each) for each in found] == [["0.png", "1.png", "2.png", "3.png"], ["4.png", "5.png"]]
    assert {tuple(text.split()[1] for text in texts) for each in found for texts in each.values()} == {(*QUESTIONS,)}
    assert len(model.asked) == 18


async def test_machines_write_no_file_for_a_folder_together(folder: Path) -> None:
    one = job(folder, outputs=("diffusion-pipe",))
    with pytest.raises(CaptioningError, match="machines with --shard"):
        replace(one, scan=ScanOptions(shard=(1, 2))).check()


@pytest.mark.asyncio
async def test_a_caption_that_fails_leaves_the_others(folder: Path) -> None:
    def refuse(asked: Asked) -> str:
        return "I'm sorry, but I can't help with that." if asked.question == QUESTIONS["short"] else answer(asked)

    model = FakeModel(refuse)
    outcome = await run(job(folder, outputs=("sidecar", f"jsonl:{folder.parent / 'all.jsonl'}")), model)
    assert outcome.failed == {"refused": 6}
    assert sum(name.endswith(".long.txt") for name in texts(folder)) == 6
    assert not any(name.endswith(".short.txt") for name in texts(folder))
    assert listed(folder.parent / "all.jsonl") == []
    assert all(each["message"].startswith("short: The model refused") for each in failures(folder))
    model = FakeModel(answer)
    await run(job(folder, retry_failed=True), model)
    assert {asked.question for asked in model.asked} == {QUESTIONS["short"]}
    assert len(texts(folder)) == 18
    assert failures(folder) == []


@pytest.mark.asyncio
async def test_after_an_engine_failed_the_next_questions_are_not_asked(folder: Path) -> None:
    def fail(asked: Asked) -> str:
        if asked.question == QUESTIONS["short"]:
            raise EngineError("It broke.")
        return answer(asked)

    model = FakeModel(fail)
    await run(job(folder), model)
    assert not any(asked.question == QUESTIONS["long"] for asked in model.asked)
    assert len(texts(folder)) == 6


@pytest.mark.asyncio
async def test_each_caption_is_judged(folder: Path) -> None:
    output = folder.parent / "all.jsonl"
    described = job(folder, outputs=(f"jsonl:{output}",))
    await run(described, FakeModel(answer))
    judging = replace(described, run=settings(judge_below=0.5))
    model = FakeModel(answer, chance_of_yes=lambda asked: 0.1 if "A short" in asked.question else 0.9)
    await run(judging, model)
    assert not {asked.question for asked in model.asked} & {*QUESTIONS.values()}
    for line in listed(output):
        assert [each["score"] for each in line["judged"]] == [0.9, 0.1, 0.9]
        assert line["flags"] == ["doubted"]
    model = FakeModel(answer)
    await run(judging, model)
    assert model.asked == []


@pytest.mark.asyncio
async def test_near_duplicates_share_all_captions(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    picture(1).save(folder / "a.png")
    model = FakeModel(answer)
    await run(job(folder, slots=1, max_distance=2), model)
    picture(1).save(folder / "b.bmp")
    await run(job(folder, slots=1, max_distance=2), model)
    assert len(model.asked) == 3
    found = texts(folder)
    assert {name.replace("a.", "b.", 1): text for name, text in found.items() if name.startswith("a")} == {
        name: text for name, text in found.items() if name.startswith("b")
    }
    model = FakeModel(answer)
    outcome = await run(job(folder, slots=1, max_distance=2), model)
    assert (model.asked, outcome.counts.num_present) == ([], 2)


@pytest.mark.asyncio
async def test_a_medium_whose_name_ends_like_a_caption_keeps_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    picture(1).save(folder / "a.png")
    picture(2).save(folder / "a.short.png")
    for _ in range(2):
        model = FakeModel(answer)
        await run(job(folder, "tags", "short"), model)
        found = texts(folder)
        assert len(found) == 4, found
        assert len(set(found.values())) == 4
    assert model.asked == []


@pytest.mark.asyncio
async def test_one_estimate_covers_all_captions(folder: Path) -> None:
    found = await look_over(job(folder), FakeModel(answer).captioner())
    assert (found.num_to_caption, found.num_tried, len(found.examples)) == (6, 3, 9)
    assert found.tokens_per_item == 6
    assert texts(folder) == {}


@needs_fork
@pytest.mark.parametrize("stride", [17, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_between_captions_loses_and_doubles_nothing(folder: Path, tmp_path: Path, stride: int) -> None:
    for path in [*folder.glob("[2-3].png"), *folder.glob("more/*")]:
        path.unlink()
    output = tmp_path / "all.jsonl"

    def work() -> None:
        asyncio.run(run(job(folder, outputs=("sidecar", f"jsonl:{output}"), slots=1), FakeModel(answer)))

    expected = None
    for step, torn_bytes in stops(stride):
        for path in (*folder.glob("*.txt"), *folder.glob(".qwen35mm/*"), *tmp_path.glob("all.jsonl*")):
            path.unlink()
        was_killed = killed_at(step, work, torn_bytes=torn_bytes)
        model = FakeModel(answer)
        asyncio.run(run(job(folder, outputs=("sidecar", f"jsonl:{output}"), slots=1), model))
        if was_killed:
            assert len({(asked.digest, asked.question) for asked in model.asked}) == len(model.asked)
        found = texts(folder), sorted(json.dumps(line, sort_keys=True) for line in listed(output))
        expected = expected or found
        assert found == expected, step
        assert (len(found[0]), len(found[1])) == (6, 2)
        if not was_killed:
            break


def test_names_are_all_different_and_without_weights() -> None:
    with pytest.raises(CaptioningError, match="all of them names, or none"):
        PromptSet([Question("a", name="a"), Question("b")])
    with pytest.raises(CaptioningError, match="Two prompts have the name 'a'"):
        PromptSet([Question("a", name="a"), Question("b", name="A")])
    with pytest.raises(CaptioningError, match="take no weight"):
        PromptSet([Question("a", name="a", weight=2), Question("b", name="b")])
    with pytest.raises(CaptioningError, match="part of file names"):
        Question("a", name="../a")


def test_folders_prompts_and_whole_videos_are_one_caption(folder: Path) -> None:
    with pytest.raises(CaptioningError, match="give each item one caption"):
        replace(job(folder), folder_prompts=True).check()
    with pytest.raises(CaptioningError, match="give each item one caption"):
        job(folder, whole="timeline").check()


def test_a_prompt_file_names_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("name: tags\nList tags.\n---\nName: short\nOne sentence.\nname: no header here\n")
    first, second = read_prompt_file(path)
    assert (first.name, first.text) == ("tags", "List tags.")
    assert (second.name, second.text) == ("short", "One sentence.\nname: no header here")
    path.write_text("weight: 2\nname: tags\nList tags.")
    assert [(each.weight, each.name) for each in read_prompt_file(path)] == [(2.0, "tags")]


def test_a_list_of_presets_gives_all_and_repeated_presets_one(tmp_path: Path) -> None:
    def made(**options: object) -> Job:
        return CaptionOptions(**options).job([str(tmp_path)], ModelOptions())  # type: ignore[arg-type]

    assert made(preset=["tags,short"]).prompts.styles == ("tags", "short")
    assert made(preset=["tags", "short:2"]).prompts.styles == ()
    for trainer, kind in (("onetrainer", "lines"), ("sd-scripts", "lines"), ("musubi", "sidecar")):
        assert [spec.kind for spec in made(preset=["tags,short"], trainer=trainer).outputs] == [kind]
        assert [spec.kind for spec in made(preset=["tags"], trainer=trainer).outputs] == ["sidecar"]
    assert made(preset=["tags,short"], trainer="diffusion-pipe").outputs == (parse_output("diffusion-pipe"),)
    with pytest.raises(CaptioningError, match="all of them names, or none"):
        made(preset=["tags,short"], prompt=["Mine."])


@pytest.mark.asyncio
async def test_the_engine_computes_a_picture_once(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    picture(1).resize((640, 480)).save(folder / "a.png")
    prefilled: list[tuple[int, int]] = []

    class Watched(LocalBackend):
        async def stream(self, request):  # type: ignore[no-untyped-def, override]
            async for event in super().stream(request):
                if (result := getattr(event, "result", None)) is not None:
                    prefilled.append((result.num_prompt_tokens, result.cache.num_cached_tokens))
                yield event

    with closing(Watched(load(demo_model_path()))) as backend:
        captioner = Captioner.local(backend, None)
        described = replace(job(folder, slots=1), sampling={"max_tokens": 4, "temperature": 0.0})
        await carry_out(described, captioner)
    assert len(prefilled) >= 3
    assert prefilled[0][1] == 0
    for num_tokens, num_cached in prefilled[1:]:
        assert num_cached > 0.8 * num_tokens
