"""What each trainer reads of a folder that was captioned for it, by its own rules, retold from its code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from qwen35mm.captioning.job import Job
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.texts import trainers
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.captioning.texts.trainers import TRAINERS, Length, Trainer, shorter_texts
from tests.captioning.fake_model import FakeModel
from tests.captioning.runs import run, settings

SENTENCES = "A red bus stands at the kerb. It is empty.\n\nBehind it a tree has lost its leaves. The sky is grey."


def sd_scripts(image: Path, suffix: str) -> str:
    """kohya-ss/sd-scripts, library/train_util.py, read_caption: of the first of two files the first line."""
    base = os.path.splitext(image)[0]  # noqa: PTH122 - as it is there
    tokens = base.split("_")
    paths = [base + suffix, ("_".join(tokens[:-4]) if len(tokens) >= 5 else base) + suffix]
    for path in paths:
        if os.path.isfile(path):  # noqa: PTH113
            lines = Path(path).read_text("utf-8").splitlines(keepends=True)
            assert len(lines) > 0
            return lines[0].strip()
    raise AssertionError("no caption")


def musubi(image: Path, suffix: str) -> str:
    """kohya-ss/musubi-tuner, dataset/image_video_dataset.py: the whole file; so do diffusion-pipe and ai-toolkit."""
    return Path(os.path.splitext(image)[0] + suffix).read_text("utf-8").strip()  # noqa: PTH122


def one_trainer(image: Path, suffix: str) -> str:
    """Nerogar/OneTrainer (mgds, LoadMultipleTexts): each line is a caption of its own, of which one is drawn."""
    lines = image.with_suffix(suffix).read_text("utf-8").splitlines()
    (only,) = [line.strip() for line in lines if line.strip()]
    return only


def ai_toolkit(image: Path, suffix: str) -> str:
    """ostris/ai-toolkit, toolkit/dataloader_mixins.py, load_caption: commas divide it into tags, which are joined."""
    text = image.with_suffix(suffix).read_text("utf-8")
    return ", ".join(part.strip() for part in text.split(",") if part.strip())


READ: dict[str, Callable[[Path, str], str]] = {
    "sd-scripts": sd_scripts,
    "kohya-sdxl": sd_scripts,
    "flux": musubi,
    "wan": musubi,
    "hunyuan": musubi,
    "musubi": musubi,
    "onetrainer": one_trainer,
    "sd3": sd_scripts,
    "qwen-image": one_trainer,
    "z-image": one_trainer,
    "wan2.2": musubi,
    "hunyuan-1.5": musubi,
    "ltx": musubi,
    "ltx2": ai_toolkit,
    "ai-toolkit": ai_toolkit,
    "diffusion-pipe": musubi,
}


async def captioned(folder: Path, trainer: Trainer, reply: str, max_tokens: int | None = None) -> None:
    job = Job(
        [str(folder)],
        PromptSet([Question("Describe it.")]),
        style=CaptionStyle(trigger="ohwx", length=Length.of(trainer, max_tokens)),
        outputs=[parse_output(f"sidecar:{trainer.suffix}")],
        output_settings=OutputSettings(one_line=True, separator=trainer.separator),
        run=settings(),
    )
    assert (await run(job, FakeModel(lambda _: reply))).exit_code == 0


@pytest.mark.usefixtures("media_in_process")
@pytest.mark.parametrize("name", TRAINERS)
async def test_a_trainer_reads_the_whole_caption(folder: Path, name: str) -> None:
    trainer = TRAINERS[name]
    await captioned(folder, trainer, SENTENCES)
    for picture in folder.rglob("*.png"):
        assert READ[name](picture, trainer.suffix) == "ohwx, " + " ".join(SENTENCES.split())


@pytest.mark.usefixtures("media_in_process")
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (SENTENCES, "ohwx, A red bus stands at the kerb. It is empty."),
        (
            "a bus, red, at the kerb, a tree without leaves, grey sky, empty street",
            "ohwx, a bus, red, at the kerb, a tree without leaves",
        ),
    ],
)
async def test_what_a_trainer_would_drop_is_left_out_in_whole_sentences(
    folder: Path, reply: str, expected: str
) -> None:
    await captioned(folder, TRAINERS["sd-scripts"], reply, 15)
    assert sd_scripts(folder / "0.png", ".caption") == expected


def test_tokens_are_the_encoders_where_its_tokenizer_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    trainers._tokenizer.cache_clear()
    estimated = Length.of(TRAINERS["flux"])
    assert (estimated.max_tokens, estimated.encoder) == (512, None)
    assert estimated.count("A red bus.") == 4
    assert estimated.count("extraordinary") == 2
    assert estimated.count("一辆红色的公共汽车") >= 9
    # As the Hub's cache has it: a tokenizer with a token a word.
    words = Tokenizer(models.WordLevel({"A": 0, "red": 1, "?": 2}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "models--google--t5-v1_1-xxl"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    words.save(str(folder / "snapshots" / "abc" / "tokenizer.json"))
    trainers._tokenizer.cache_clear()
    exact = Length.of(TRAINERS["flux"], 4)
    trainers_tokens = exact.count("A extraordinary red bus")
    assert (exact.max_tokens, exact.encoder, trainers_tokens) == (4, "google/t5-v1_1-xxl", 4)
    assert exact.takes("A red bus.")
    assert not exact.takes("A red red bus.")
    trainers._tokenizer.cache_clear()


def test_captions_shorten_by_sentences_and_tags() -> None:
    assert shorter_texts("One. Two by Dr. Three. Four.") == ["One. Two by Dr. Three.", "One."]
    assert shorter_texts("a, b, c, d") == ["a, b, c", "a, b", "a"]
    assert shorter_texts("one sentence without an end") == []
