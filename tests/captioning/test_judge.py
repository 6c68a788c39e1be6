"""Sentences of captions, judged by the model that sees the medium: what is asked, what comes of it, and when."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.captioning import outputs
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.job import carry_out, look_over
from qwen35mm.captioning.judge import score_of, sentences_of
from qwen35mm.captioning.media.workers import Prepared
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest, CaptionSettings, CaptionStyle
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.presets import PRESETS
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.contract import Event, Finished, Result, SamplingParams, TokenLogprob
from qwen35mm.errors import CaptioningError, EngineError, OutputError, RefusedError
from qwen35mm.model import load
from qwen35mm.settings import ModelOptions
from tests.backends.remote.server import USAGE, answers, chunk, event, running_server, sends
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.runs import job, listed, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")

CAPTION = "A dog sleeps. It wears a hat."
SENTENCES = ["A dog sleeps.", "It wears a hat."]
DOG_WITHOUT_HAT = [{"sentence": SENTENCES[0], "score": 0.9}, {"sentence": SENTENCES[1], "score": 0.2}]


def doubts_the_hat(asked: Asked) -> float:
    return 0.2 if "a hat" in asked.question else 0.9


def a_model(answer: str = CAPTION) -> FakeModel:
    return FakeModel(lambda asked: answer, chance_of_yes=doubts_the_hat)


def judged_in(model: FakeModel) -> list[str]:
    return [asked.question for asked in model.asked if asked.params.logprobs is not None]


def only_one(folder: Path) -> None:
    for path in sorted(folder.rglob("*.png"))[1:]:
        path.unlink()


JUDGING = settings(judge_below=0.5)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("A dog. It sleeps!", ["A dog.", "It sleeps!"]),
        (
            "Dr. J. Smith, approx. 1.85 m, is here. Why? To eat, e.g. fish.",
            ["Dr. J. Smith, approx. 1.85 m, is here.", "Why?", "To eat, e.g. fish."],
        ),
        ('It says "Stop." A man, who is No. 10, reads it.', ['It says "Stop."', "A man, who is No. 10, reads it."]),
        ("Is that a no. 5 of them agree.", ["Is that a no. 5 of them agree."]),
        ("At 6 p.m. the U.S. flag waves… Then it rains.", ["At 6 p.m. the U.S. flag waves…", "Then it rains."]),
        (
            "Am 3. Mai sieht man z. B. ca. 3,5 Liter Wasser. Es ist das 19. Jahrhundert, d.h. alt. Ende.",
            ["Am 3. Mai sieht man z. B. ca. 3,5 Liter Wasser.", "Es ist das 19. Jahrhundert, d.h. alt.", "Ende."],
        ),
        ("Da steht „Halt.“ Nr. 5 winkt Dr. Groß.", ["Da steht „Halt.“", "Nr. 5 winkt Dr. Groß."]),
        ("一只猫在睡觉。它是3.5岁！你好吗？好", ["一只猫在睡觉。", "它是3.5岁！", "你好吗？", "好"]),
        ("「止まれ。」と書いてある。犬がいる。", ["「止まれ。」と書いてある。", "犬がいる。"]),
        ("- A dog.\n\n2. A cat\n# Colours\n***\n-5 degrees", ["A dog.", "A cat", "Colours", "-5 degrees"]),
        ("00:03-00:07 A boy throws a ball.", ["00:03-00:07 A boy throws a ball."]),
        ("", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert sentences_of(text) == sentences


def told(text: str, *tokens: tuple[str, float]) -> Result:
    top = tuple(TokenLogprob(word, math.log(chance), ()) for word, chance in tokens)
    logprobs = (replace(top[0], top=top),) if top else None
    return Result(text, None, "stop", (), (), 1, 1, None, None, logprobs=logprobs)


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (told("Yes", ("Yes", 0.5), (" yes", 0.1), ("No", 0.2), ("Maybe", 0.2)), 0.75),
        (told("The", ("The", 0.9), ("no", 0.05)), 0.0),
        (told("A", ("A", 0.99), ("Yes", 0.001)), None),
        (told("是的", ("是的", 0.3), ("不是", 0.1)), 0.75),
        (told("Yes."), 1.0),
        (told(" **No**, it isn't"), 0.0),
        (told("Nothing is there"), None),
        (told(""), None),
    ],
)
def test_a_score_is_the_probability_of_yes_against_no(result: Result, score: float | None) -> None:
    assert score_of(result) == score


async def test_what_the_model_doubts_is_flagged_and_the_caption_stays(folder: Path) -> None:
    lines = folder.parent / "all.jsonl"
    one = job(folder, outputs=("sidecar", f"jsonl:{lines}"), run=JUDGING)
    outcome = await run(one, model := a_model())
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.flagged) == (0, 6, {"doubted": 6})
    assert set(texts(folder).values()) == {f"{CAPTION}\n"}
    assert [(line["judged"], line["flags"]) for line in listed(lines)] == [(DOG_WITHOUT_HAT, ["doubted"])] * 6
    assert len(judged_in(model)) == 12
    assert sum(SENTENCES[1] in question for question in judged_in(model)) == 6
    outcome = await run(one, again := a_model())
    assert (outcome.counts.num_present, again.asked) == (6, [])


async def test_captions_that_are_there_are_judged_and_not_made_again(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines, rows, tars = (folder.parent / name for name in ("all.jsonl", "rows", "tars"))
    specs = ("sidecar", f"jsonl:{lines}", f"parquet:{rows}", f"webdataset:{tars}")
    await run(job(folder, outputs=specs), a_model())
    assert not any("judged" in line for line in listed(lines))
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.txt")}
    one = job(folder, outputs=specs, run=settings(judge_below=0.5, max_distance=1))
    assert (await look_over(one, FakeModel().captioner())).num_to_judge == 6
    outcome = await run(one, model := a_model())
    assert (outcome.exit_code, outcome.counts.num_judged, outcome.counts.num_captioned) == (0, 6, 0)
    assert outcome.flagged == {"doubted": 6}
    assert len(judged_in(model)) == len(model.asked) == 12
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.txt")} == times, "the texts are the same"
    table = [row for path in rows.glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    for made in (listed(lines), table):
        assert sorted(each["name"] for each in made) == sorted({each["name"] for each in made})
        assert [(each["caption"], each["judged"], each["flags"]) for each in made] == [
            (CAPTION, DOG_WITHOUT_HAT, ["doubted"])
        ] * 6
    for later in (one, job(folder, outputs=specs)):
        outcome = await run(later, again := a_model())
        assert (outcome.counts.num_present, again.asked) == (6, []), "who judges no more leaves what was judged"


async def test_all_parquet_files_have_the_same_columns(folder: Path) -> None:
    """`load_dataset` takes no others together; and who never judges has the columns that there were."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = folder.parent / "rows"

    def columns() -> list[bool]:
        return ["judged" in parquet.read_schema(path).names for path in rows.glob("*.parquet")]

    plain = job(folder, outputs=(f"parquet:{rows}",), output_settings=OutputSettings(records_per_shard=4))
    await run(plain, a_model())
    assert columns() == [False, False]
    outcome = await run(replace(plain, run=settings(judge_below=0.5, limit=1)), a_model())
    assert (outcome.counts.num_judged, all(columns())) == (1, True)
    table = [row for path in rows.glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert sorted(row["judged"] is None for row in table) == [False] + [True] * 5
    assert sorted(row["name"] for row in table) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*.png")
    )
    picture(99).save(folder / "new.png")
    await run(plain, a_model())
    assert all(columns())


async def test_another_threshold_is_another_flag_without_the_model(folder: Path) -> None:
    lines = folder.parent / "all.jsonl"
    await run(job(folder, outputs=(f"jsonl:{lines}",), run=JUDGING), a_model())
    one = job(folder, outputs=(f"jsonl:{lines}",), run=settings(judge_below=0.1))
    outcome = await run(one, again := a_model())
    assert (outcome.counts.num_recalled, again.asked, outcome.flagged) == (6, [], {})
    assert [line["flags"] for line in listed(lines)] == [[]] * 6
    assert (await run(one, again)).counts.num_present == 6


async def test_a_judgement_that_was_kept_is_written_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that one judges or not."""
    lines = folder.parent / "all.jsonl"
    plain = job(folder, outputs=(f"jsonl:{lines}",))
    await run(plain, a_model())
    for one in (plain, job(folder, outputs=(f"jsonl:{lines}",), run=settings(judge_below=0.1))):
        with monkeypatch.context() as patch:
            patch.setattr(outputs.JsonLines, "write", lambda *_: (_ for _ in ()).throw(OutputError("Full.", 28)))
            outcome = await run(job(folder, outputs=(f"jsonl:{lines}",), run=JUDGING), a_model())
            assert isinstance(outcome.stopped, OutputError)
        num_written = sum("judged" in line for line in listed(lines))
        outcome = await run(one, again := a_model())
        assert (again.asked, outcome.exit_code) == ([], 0) if one is plain else outcome.exit_code == 0
        assert sum("judged" in line for line in listed(lines)) > num_written
    assert sum("judged" in line for line in listed(lines)) == 6


@pytest.mark.parametrize(("error", "num_again"), [(EngineError("Gone."), 12), (RefusedError("Not this one."), 0)])
async def test_a_model_that_fails_at_judging_costs_no_caption(folder: Path, error: Exception, num_again: int) -> None:
    lines = folder.parent / "all.jsonl"
    one = job(folder, outputs=("sidecar", f"jsonl:{lines}"), run=JUDGING)

    def fail(asked: Asked) -> float:
        raise error

    outcome = await run(one, FakeModel(lambda asked: CAPTION, chance_of_yes=fail))
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.flagged) == (0, 6, {"not judged": 6})
    assert [line["flags"] for line in listed(lines)] == [["not judged"]] * 6
    if num_again:
        outcome = await run(one, FakeModel(chance_of_yes=fail))
        assert (outcome.exit_code, outcome.counts.num_failed) == (4, 6), "it is said that these still lack something"
    outcome = await run(one, again := a_model())
    assert (outcome.exit_code, len(again.asked)) == (0, num_again), "what may pass is tried again"
    assert [line["flags"] for line in listed(lines)] == [["doubted"] if num_again else ["not judged"]] * 6


async def test_tags_are_judged_by_tag_and_what_is_read_off_a_picture_isnt(folder: Path) -> None:
    lines, ocr = folder.parent / "all.jsonl", PRESETS["ocr"].text
    style = CaptionStyle(trigger="ohwx", prefix="art of ", suffix=" -- by me.")
    for question in (PRESETS["tags"].text, "Name things."):
        one = job(folder, question, outputs=(f"jsonl:{lines}",), style=style, run=JUDGING)
        await run(one, a_model("red hat, dog, old house, red hat, 2 cats"))
        tags = [each["sentence"] for each in listed(lines)[0]["judged"]]
        assert tags == ["red hat", "dog", "old house", "2 cats"]
        assert listed(lines)[0]["caption"].startswith("ohwx, art of red hat")
    await run(job(folder, ocr, outputs=(f"jsonl:{lines}",), run=JUDGING), model := a_model())
    assert [(line["judged"], line["flags"]) for line in listed(lines)] == [([], [])] * 6
    assert judged_in(model) == []


def test_a_json_caption_cant_be_judged(folder: Path) -> None:
    style = CaptionStyle(schema=JsonSchema.read('{"type": "object"}'))
    with pytest.raises(CaptioningError, match="--judge"):
        job(folder, style=style, run=JUDGING).check()


@pytest.mark.parametrize(("options", "below"), [({}, None), ({"judge": True}, 0.5), ({"judge_below": 0.0}, 0.0)])
def test_a_threshold_alone_asks_for_judgements(folder: Path, options: dict[str, Any], below: float | None) -> None:
    made = CaptionOptions(**options).job([str(folder)], ModelOptions())
    assert made.run.judge_below == below


async def test_judging_that_the_program_dies_of_is_given_up(folder: Path) -> None:
    class Died(BaseException):
        pass

    def die(asked: Asked) -> float:
        raise Died

    only_one(folder)
    lines = folder.parent / "all.jsonl"
    await run(job(folder, outputs=(f"jsonl:{lines}",)), a_model())
    one = job(folder, outputs=(f"jsonl:{lines}",), run=JUDGING)
    for _ in range(6):
        with pytest.raises(Died):
            await run(one, FakeModel(chance_of_yes=die))
    for _ in range(2):
        outcome = await run(one, FakeModel(chance_of_yes=die))
        assert (outcome.exit_code, listed(lines)[0]["flags"]) == (0, ["not judged"])


@pytest.mark.parametrize("known", [False, True])
async def test_of_every_question_only_its_text_is_computed(known: bool) -> None:
    """By the real engine, whose cache has the picture from the caption on, or else from the first question on."""
    loaded = load(demo_model_path(), device="cpu")
    large = replace(loaded.image_processing, min_pixels=512 * 512, max_pixels=512 * 512)
    results: list[Result] = []
    with closing(LocalBackend(replace(loaded, image_processing=large))) as backend:
        captioner = Captioner.local(backend, None)
        stream = backend.stream

        async def watched(*arguments: Any, **how: Any) -> AsyncGenerator[Event, None]:
            async for event in stream(*arguments, **how):
                if isinstance(event, Finished):
                    results.append(event.result)
                yield event

        backend.stream = watched
        path = asset_path("samples") / "one-shape.png"
        medium = captioner.processor.prepare(path)
        item, style = Item(path.name, path, "image"), CaptionSettings(captioner.params)
        request = CaptionRequest(item, b"", medium.plan, "Describe the picture.", "", style, b"")
        caption = (
            Caption(text="It is red. It is blue.", kind="image", width=1, height=1, prompt="", model="")
            if known
            else None
        )
        made = await captioner.caption(request, Prepared(medium), caption, judges=True)
    assert isinstance(made, Caption)
    assert made.judged is not None
    first, *others = results
    num_media = first.media[0].num_tokens
    assert (num_media > 200, first.cache.num_encoded_units) == (True, 1)
    assert [each.num_generated_tokens for each in results[not known :]] == [1] * len(made.judged)
    assert len(others) == 1
    for each in others:
        assert (each.cache.num_encoded_units, each.cache.num_cached_tokens >= num_media) == (0, True)
        assert each.logprobs is not None


@pytest.mark.parametrize(("server_is", "score"), [("telling", 0.75), ("silent", 1.0), ("transformers", 0.0)])
async def test_a_server_is_asked_for_probabilities_or_else_for_the_answer(
    folder: Path, server_is: str, score: float
) -> None:
    """`transformers serve` knows none; another server may pass over that it was asked for them."""
    lines = folder.parent / "all.jsonl"
    only_one(folder)

    def answer(handler: Any) -> None:
        body = server.bodies[-1]
        is_question = "yes or no" in body["messages"][0]["content"][-1]["text"]
        assert ("logprobs" in body) == (is_question and server_is != "transformers")
        if not is_question:
            answers([CAPTION])(handler)
        elif server_is == "transformers":
            answers(["No", "."])(handler)
        else:
            assert (body["top_logprobs"], body["max_tokens"]) == (20, 1)
            top = [{"token": "Yes", "logprob": math.log(0.6)}, {"token": "No", "logprob": math.log(0.2)}]
            values = chunk({"content": "Yes"}, "stop")
            if server_is == "telling":
                values["choices"][0]["logprobs"] = {"content": [top[0] | {"top_logprobs": top}]}
            sends([event(values), event({"id": "1", "choices": [], "usage": USAGE}), b"data: [DONE]\n\n"])(handler)

    with running_server() as server:
        server.otherwise = answer
        if server_is == "transformers":
            server.pages["/openapi.json"] = {"paths": {"/load_model": {}, "/v1/chat/completions": {}}}
        backend = RemoteBackend(server.url, max_concurrent=1)
        await backend.connect()
        captioner = Captioner(
            backend=backend, name="tiny", identity={}, params=SamplingParams(), processor=backend.media, form="frames"
        )
        one = job(folder, outputs=(f"jsonl:{lines}",), run=settings(slots=1, judge_below=0.5))
        assert (await carry_out(one, captioner)).exit_code == 0
        await backend.aclose()
    assert [each["score"] for line in listed(lines) for each in line["judged"]] == [score] * 2
