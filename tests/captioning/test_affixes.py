"""Prefix, suffix and trigger word: their placeholders, their place among a person's tags, and their keys."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.outputs.base import Mode
from qwen35mm.captioning.requests import CaptionSettings, CaptionStyle, RequestBuilder
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.captioning.texts.folder_prompts import FolderPrompts
from qwen35mm.captioning.texts.presets import preset_question
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.captioning.texts.trainers import Length
from qwen35mm.captioning.texts.words import Words
from qwen35mm.contract import SamplingParams
from qwen35mm.errors import CaptioningError
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.runs import failures, job, listed, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")


def tree() -> FakeModel:
    return FakeModel(lambda _: "A tree.")


async def test_placeholders_are_filled_around_every_caption(folder: Path) -> None:
    style = CaptionStyle(
        prefix="{stem} {{x}}: ", suffix=" ({width}x{height}, {metadata.by|nobody})", trigger="{folder|top}"
    )
    done = await run(job(folder, style=style, run=settings()), model := tree())
    assert texts(folder)["0.txt"] == "top, 0 {x}: A tree. (48x32, nobody)\n"
    assert texts(folder)["more/5.txt"] == "more, 5 {x}: A tree. (48x32, nobody)\n"
    assert done.counts.defaulted == {"metadata.by": 6, "folder": 4}
    assert (await run(job(folder, style=style, run=settings()), model)).counts.num_present == 6
    assert len(model.asked) == 6


async def test_an_item_that_lacks_a_value_fails_and_says_which(folder: Path) -> None:
    await run(job(folder, style=CaptionStyle(trigger="{folder}"), run=settings()), tree())
    assert sorted(texts(folder)) == ["more/4.txt", "more/5.txt"]
    assert "is empty for 0.png. Give it a default" in str(failures(folder)[0])


@pytest.mark.parametrize("name", ["prefix", "suffix", "trigger"])
@pytest.mark.parametrize("text", ["{foldr}", "{", "a } b", "{metadata}"])
def test_unknown_braces_are_refused(name: str, text: str) -> None:
    with pytest.raises(CaptioningError, match=r"Unknown placeholder|single '[{}]'"):
        CaptionStyle(**cast("Any", {name: text}))


def test_a_trigger_word_never_needs_the_medium() -> None:
    with pytest.raises(CaptioningError, match=r"can't have \{width\}"):
        CaptionStyle(trigger="{width}")


def test_new_outputs_take_no_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("jsonl:{folder}.jsonl", "sidecar:.{stem}", "jsonl:{x.jsonl", "dataset:{x}"):
        with pytest.raises(CaptioningError, match=r"takes no placeholders|Unknown placeholder|single '\{'"):
            parse_output(wrong)
    assert parse_output("jsonl:{{x}}.jsonl").target == "{x}.jsonl"
    Path("{folder}.jsonl").touch()
    assert parse_output("jsonl:{folder}.jsonl").target == "{folder}.jsonl", "what earlier versions wrote"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("append", "ohwx, 1girl, hat, A tree.\n"), ("prepend", "ohwx, A tree. 1girl, hat\n")],
)
async def test_the_trigger_comes_before_a_persons_tags(folder: Path, mode: str, expected: str) -> None:
    (folder / "0.txt").write_text("1girl, hat")
    where = OutputSettings(mode, one_line=True, separator=", ")  # pyright: ignore[reportArgumentType]
    lines = folder.parent / "all.jsonl"
    outputs = ("sidecar", f"jsonl:{lines}")
    one = job(
        folder, style=CaptionStyle(trigger="ohwx"), output_settings=where, run=settings(prune=True), outputs=outputs
    )
    for _ in range(2):
        await run(one, tree())
        assert texts(folder)["0.txt"] == expected
        assert texts(folder)["1.txt"] == "ohwx, A tree.\n"
    assert {line["caption"] for line in listed(lines)} == {"ohwx, A tree."}
    # An edited file: the model gets the person's words alone.
    (folder / "0.txt").write_text(texts(folder)["0.txt"].replace("hat", "red hat"))
    ask = job(folder, "Mine: {sidecar|none}", output_settings=where, run=settings(limit=1))
    await run(ask, model := tree())
    assert [asked.question.strip(" ,") for asked in model.asked] == ["Mine: 1girl, red hat"]
    # The words of a person outlive the medium.
    (folder / "0.png").unlink()
    (folder / "1.png").unlink()
    await run(one, tree())
    assert "1.txt" not in texts(folder)
    assert "red hat" in texts(folder)["0.txt"]


async def test_pruning_leaves_tags_that_ours_came_between(folder: Path) -> None:
    (folder / "0.txt").write_text("1girl, solo, hat")
    where = OutputSettings("prepend", one_line=True, separator=", ", keep_tokens=1)
    one = job(folder, output_settings=where, run=settings(prune=True))
    await run(one, FakeModel(lambda _: "a tree"))
    assert texts(folder)["0.txt"] == "1girl, a tree, solo, hat\n"
    (folder / "0.png").unlink()
    await run(one, tree())
    assert texts(folder)["0.txt"] == "1girl, a tree, solo, hat\n"


async def test_a_byte_order_mark_stays_first(folder: Path) -> None:
    (folder / "0.txt").write_bytes("\ufeff1girl".encode())
    where = OutputSettings("append", one_line=True, separator=", ")
    await run(job(folder, style=CaptionStyle(trigger="ohwx"), output_settings=where, run=settings()), tree())
    assert (folder / "0.txt").read_bytes() == "\ufeffohwx, 1girl, A tree.\n".encode()


async def test_a_folder_has_its_own_prompt_and_trigger(folder: Path) -> None:
    (folder / "prompt.txt").write_text("All, {stem}.")
    (folder / "more" / "deep").mkdir()
    (folder / "more" / "5.png").rename(folder / "more" / "deep" / "5.png")
    (folder / "more" / "prompt.txt").write_text("More, {width} wide.")
    (folder / "more" / "trigger.txt").write_text("{folder} style\n")
    one = job(folder, style=CaptionStyle(trigger="ohwx"), run=settings(), folder_prompts=True)
    await run(one, model := tree())
    asked = sorted(each.question for each in model.asked)
    assert asked == ["All, 0.", "All, 1.", "All, 2.", "All, 3.", "More, 48 wide.", "More, 48 wide."]
    assert texts(folder)["0.txt"] == "ohwx, A tree.\n"
    assert texts(folder)["more/4.txt"] == "more style, A tree.\n"
    assert texts(folder)["more/deep/5.txt"] == "deep style, A tree.\n"
    assert (await run(one, model)).counts.num_present == 6, "nothing is done twice"
    # Another text is new work for its folder alone.
    (folder / "more" / "prompt.txt").write_text("New.")
    await run(one, model := tree())
    assert [each.question for each in model.asked] == ["New.", "New."]
    # Without the option, they are files like others.
    await run(job(folder, run=settings()), model := tree())
    assert {each.question for each in model.asked} == {"Describe it."}


def test_a_folders_files_hold_up_to_its_source_whatever_others_are_called(tmp_path: Path) -> None:
    for name in ("one/data/x.png", "two/data/x.png", "two/data/y.png", "two/data/in/z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(1).save(tmp_path / name)
    (tmp_path / "two" / "trigger.txt").write_text("above")
    (tmp_path / "two" / "data" / "in" / "trigger.txt").write_text("within")
    folders = FolderPrompts(PromptSet([Question("?")]))
    found = {}
    for item in scan([tmp_path / "one" / "data", tmp_path / "two" / "data"], ScanOptions()):
        assert isinstance(item, Item)
        part = replace(item, name=f"{item.name}/0001", part=Part(1, 0.0, 1.0))
        assert (part.folder, folders.trigger(part)) == (item.folder, folders.trigger(item))
        found[item.name] = (item.folder, folders.trigger(item) is not None)
    assert found == {
        "x.png": ("", False),
        "data/x.png": ("", False),
        "y.png": ("", False),
        "in/z.png": ("in", True),
    }


async def test_a_wrong_folder_prompt_fails_its_media_and_says_where(folder: Path) -> None:
    (folder / "more" / "prompt.txt").write_text("{foldr}")
    (folder / "0.png").rename(folder / "prompt.png")
    await run(job(folder, run=settings(), folder_prompts=True), tree())
    said = {each["name"]: str(each) for each in failures(folder)}
    assert sorted(said) == ["more/4.png", "more/5.png", "prompt.png"]
    assert "more/prompt.txt: Unknown placeholder {foldr}" in said["more/4.png"]
    assert "would be prompt.txt" in said["prompt.png"]


@pytest.mark.parametrize(
    ("prompts", "style", "key"),
    [
        (
            PromptSet([preset_question("short")]),
            CaptionStyle(),
            "bca1ab9cf2dd2693c55d496bbb9911adab0e18d759038785c7d6d9bfde53f03e",
        ),
        (
            PromptSet([Question("{metadata.title} in {folder}")], system="One."),
            CaptionStyle(prefix="photo of ", suffix=".", trigger="ohwx style", one_line=True),
            "32239f5d58fef62957588005370d89b69bc35a77422126f9ba09136819292df3",
        ),
        (
            PromptSet([preset_question("ocr")]),
            CaptionStyle(words=Words(("red",), ("image",)), length=Length(75), max_attempts=2),
            "62b4088f6165989a4db1873f8426666d45347e3c4a08c2a355d40f7a1e17597d",
        ),
    ],
)
def test_keys_are_those_of_earlier_versions(prompts: PromptSet, style: CaptionStyle, key: str) -> None:
    """Otherwise, every caption in people's manifests would be made again."""
    model = {"model": {"weights": "abc", "dtype": "torch.float32"}, "budget": {}}
    requests = RequestBuilder(prompts, CaptionSettings(SamplingParams(max_tokens=512, seed=0), style), model)
    item = Item("cats/a.jpg", b"a", "image", metadata={"title": "Mia"})
    assert requests.build(item, hashlib.sha256(b"a").digest(), None, lambda _: None).key.hex() == key


@pytest.mark.parametrize("theirs", ["1girl, hat", "tree"])
async def test_overwrite_replaces_what_the_same_caption_was_added_to(tmp_path: Path, theirs: str) -> None:
    """Once, also where our caption has all of a person's words."""
    folder = tmp_path / "media"
    folder.mkdir()
    picture(0).save(folder / "a.png")
    (folder / "a.txt").write_text(theirs)

    async def ours(mode: Mode) -> tuple[int, str]:
        one = job(folder, output_settings=OutputSettings(mode, one_line=True))
        outcome = await run(one, FakeModel(lambda _: "A tree."))
        return outcome.num_backups, (folder / "a.txt").read_text()

    assert await ours("append") == (0, f"{theirs} A tree.\n")
    assert await ours("overwrite") == (1, "A tree.\n")
    assert await ours("overwrite") == (0, "A tree.\n")
