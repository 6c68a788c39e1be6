"""Which reply becomes the caption, when several were asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.media.workers import Prepared
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest, CaptionSettings, CaptionStyle
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.trainers import Length
from qwen35mm.captioning.texts.words import Words
from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import NUMBERS
from qwen35mm_preprocess import MediaBudget
from tests.captioning.fake_model import Asked, FakeModel, picture

SCHEMA = JsonSchema.read('{"type": "object", "required": ["colour"]}')


async def ask(folder: Path, style: CaptionStyle, *replies: str) -> tuple[Caption | Failed, FakeModel]:
    """What becomes of a picture for which the model says one reply after the other."""
    path = folder / "picture.png"
    picture(0).save(path)
    remaining = iter(replies)
    fake = FakeModel(answer(remaining.__next__))
    captioner = fake.captioner()
    medium = captioner.processor.prepare(path)
    settings = CaptionSettings(captioner.params, style)
    request = CaptionRequest(
        Item("picture.png", path, "image"), b"digest", medium.plan, "What is it?", "", settings, b"key"
    )
    return await captioner.caption(request, Prepared(medium)), fake


async def caption(folder: Path, style: CaptionStyle, *replies: str) -> tuple[Caption, FakeModel]:
    made, fake = await ask(folder, style, *replies)
    assert isinstance(made, Caption)
    return made, fake


def answer(next_reply: Callable[[], str]) -> Callable[[Asked], str]:
    return lambda asked: next_reply()


def test_each_format_of_weights_is_another_model() -> None:
    identities = []
    for weights in ("bf16", "int8", "int4"):
        with closing(LocalBackend.load(demo_model_path(), device="cpu", weights=weights)) as backend:
            identities.append(Captioner.local(backend, None).describe()["model"])
    assert identities[0].keys() == {"weights", "dtype"}, "bfloat16 is as it was before there were others"
    assert [each.get("integers") for each in identities] == [None, "int8", "int4"]
    assert len({each["weights"] for each in identities}) == 1


async def test_the_first_reply_without_a_problem_is_taken(tmp_path: Path) -> None:
    style = CaptionStyle(words=Words(required=("red",)))
    made, fake = await caption(tmp_path, style, "A blue circle.", "A red circle.", "never asked")
    assert (made.text, made.flags, made.num_attempts) == ("A red circle.", (), 2)
    first, second = (asked.params for asked in fake.asked)
    assert first.greedy
    assert not second.greedy
    assert first.seed != second.seed


async def test_the_reply_with_the_fewest_problems_is_taken_and_flagged(tmp_path: Path) -> None:
    style = CaptionStyle(words=Words(required=("red", "circle")))
    made, _ = await caption(tmp_path, style, "A square.", "A circle.", "A dot.")
    assert made.text == "A circle."
    assert len(made.flags) == 1
    assert "red" in made.flags[0]


async def test_a_reply_that_says_something_beats_an_empty_one_with_fewer_problems(tmp_path: Path) -> None:
    style = CaptionStyle(words=Words(required=("red", "circle")), max_attempts=2)
    made, _ = await caption(tmp_path, style, " ", "A square.")
    assert made.text == "A square."


async def test_a_refusal_is_asked_again_and_never_kept(tmp_path: Path) -> None:
    refusal = "I'm sorry, but I can't help with that."
    made, _ = await caption(tmp_path, CaptionStyle(), refusal, "A red circle.")
    assert (made.text, made.flags, made.num_attempts) == ("A red circle.", (), 2)
    failed, fake = await ask(tmp_path, CaptionStyle(max_attempts=2), refusal, refusal)
    assert isinstance(failed, Failed)
    assert (failed.kind, len(fake.asked)) == ("refused", 2)
    assert refusal in failed.message


@pytest.mark.parametrize(
    "text",
    [
        "Tags: 100% cotton",
        '"NO ENTRY"',
        "```\nprint(1)\n```",
        "  indented\n\n\nlast",
        "Here is a caption: ACME",
        "row row row your boat " * 12 + "!",
        "<think>",
    ],
)
async def test_what_is_read_off_a_picture_is_not_cleaned(tmp_path: Path, text: str) -> None:
    made, _ = await caption(tmp_path, CaptionStyle(cleans=False), text)
    assert (made.text, made.flags) == (text, ())
    cut, fake = await ask(tmp_path, CaptionStyle(cleans=False), "One. Two")
    assert isinstance(cut, Caption)
    assert fake.asked


async def test_a_reply_that_satisfies_the_schema_beats_one_with_fewer_problems(tmp_path: Path) -> None:
    style = CaptionStyle(schema=SCHEMA, words=Words(required=("red", "circle")), max_attempts=2)
    made, _ = await caption(tmp_path, style, "no JSON", '{"colour": "blue"}')
    assert (made.data, len(made.flags)) == ({"colour": "blue"}, 2)


async def test_null_is_a_caption_where_the_schema_allows_it(tmp_path: Path) -> None:
    made, _ = await caption(tmp_path, CaptionStyle(schema=JsonSchema.read('{"type": "null"}')), "null")
    assert (made.text, made.data) == ("null", None)


@pytest.mark.parametrize(
    ("style", "reply", "message"),
    [(CaptionStyle(), "", "answered nothing"), (CaptionStyle(schema=SCHEMA), "{}", "'colour' is a required property")],
)
async def test_no_usable_reply_is_a_failure_that_says_why(
    tmp_path: Path, style: CaptionStyle, reply: str, message: str
) -> None:
    failed, _ = await ask(tmp_path, style, *[reply] * 3)
    assert isinstance(failed, Failed)
    assert (failed.kind, message in failed.message) == ("unmet", True)


def test_what_is_as_by_default_names_no_other_work() -> None:
    """A finished run would else begin anew with each new parameter."""
    plain = CaptionSettings(SamplingParams(max_tokens=9)).describe()
    assert plain == {"params": {"max_tokens": 9}, "thinking": False, "style": {}}
    other = CaptionSettings(
        SamplingParams(max_tokens=9, frequency_penalty=0.5),
        CaptionStyle(schema=SCHEMA, words=Words(required=("cat",)), length=Length(75)),
    ).describe()
    assert other["params"] == {"max_tokens": 9, "frequency_penalty": 0.5}
    assert other["style"] == {
        "schema": {"text": SCHEMA.text},
        "words": {"required": ("cat",), "forbidden": ()},
        "length": {"max_tokens": 75, "encoder": None},
    }


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams)])
def test_every_parameter_that_is_set_names_other_work(name: str) -> None:
    others = {
        "stop": ("a",),
        "json_schema": "{}",
        "grammar": ["a", "b"],
        "ignore_eos": True,
        "stop_token_ids": (1,),
        "logit_bias": {1: 1.0},
    }
    value = others[name] if name in others else 2 if NUMBERS[name].is_whole else 0.5
    params = SamplingParams().with_overrides(**{name: value})
    assert CaptionSettings(params).describe()["params"].keys() == {name}


def on_a_device(budget: MediaBudget, dtype: str, integers: str | None = None) -> Captioner:
    identity = {"weights": "digest", "dtype": dtype} | ({} if integers is None else {"integers": integers})
    processor = replace(FakeModel().captioner().processor, budget=budget)
    return replace(FakeModel().captioner(), identity=identity, processor=processor)


def test_a_checkpoint_is_one_model_on_every_device_but_for_what_a_person_has_set() -> None:
    small = on_a_device(MediaBudget.for_cpu(), "torch.float32", "int8")
    large = on_a_device(MediaBudget.for_gpu(), "torch.bfloat16", "fp8")
    assert large.describe() in small.on_any_device(()).others
    assert small.describe() in large.on_any_device(()).others
    assert small.describe() not in small.on_any_device(()).others
    for asked in ("dtype", "weights", "max_image_tokens", "max_video_tokens"):
        assert large.describe() not in small.on_any_device({asked}).others
    other = on_a_device(replace(MediaBudget.for_gpu(), fps=3.0), "torch.bfloat16")
    assert other.describe() not in small.on_any_device(()).others
