"""`qwen35mm caption --preview`, as a person runs it: the table, the commands that it leads to, and what is refused."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.cli import caption_preview
from tests.captioning.conftest import folder, media_in_process
from tests.captioning.fake_model import Asked, FakeModel
from tests.cli.conftest import Run

__all__ = ["folder", "media_in_process"]
pytestmark = pytest.mark.usefixtures("media_in_process")


def answer(asked: Asked) -> str:
    return "one, two, three" if "tags" in asked.question else "A picture of noise."


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """The model of the command line, wherever it would be."""
    fake = FakeModel(answer)

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Captioner]:
        yield fake.captioner()

    # The package has the command under the module's name.
    monkeypatch.setattr(sys.modules["qwen35mm.cli.caption"], "open_captioner", opened)
    return fake


def test_a_table_shows_each_prompt_and_the_commands_can_be_run(
    qwen35mm: Run, folder: Path, model: FakeModel, tmp_path: Path
) -> None:
    (folder / "none.png").write_bytes(b"no picture")
    (own := tmp_path / "own.txt").write_text("Is it 'noise'?")
    (several := tmp_path / "several.txt").write_text("First?\n---\nweight: 2\nSecond\nline?")
    options = ["--backend", "http://127.0.0.1:9", "--for", "kohya-sdxl", "--no-clean", "--include", "*.png"]
    preview = ["--preview", "3", "--no-open"]
    done = qwen35mm("caption", folder, *options, *preview, "--preset", "tags,short", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert len(model.asked) == 6
    for words in ("one, two, three", "A picture of noise.", "A run of 6 images, estimated from 3 images", "5 of 225"):
        assert words in " ".join(done.stdout.split()), done.stdout
    assert "all in one pass" in done.stdout
    assert "1 can't be read, such as none.png." in done.stdout
    shared = ["qwen35mm", "caption", str(folder), "--include", "*.png", "--seed", "3", "--no-clean"]
    shared += ["--for", "kohya-sdxl", "--backend", "http://127.0.0.1:9"]
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  qwen35mm ")]
    assert [sorted(command) for command in commands] == [
        sorted([*shared, "--preset", each]) for each in ("tags", "short", "tags,short")
    ]
    assert list(folder.rglob("*.txt")) == []
    # The command is the run that it says.
    model.asked.clear()
    done = qwen35mm(*commands[0][1:])
    assert done.returncode == 3, done.stderr
    assert {path.read_text() for path in folder.rglob("*.txt")} == {"one, two, three\n"}

    # Prompts without names: all are shown, and a run takes one of them for each medium.
    prompts = ["--prompt-file", own, "--prompt-file", several, "--prompt", "Third?"]
    done = qwen35mm("caption", folder, "--no-open", *prompts, "--preview=1")
    commands = [shlex.split(line) for line in done.stdout.split("Run one of these:\n")[1].split("\n  qwen35mm ")]
    assert [each[-2:] for each in commands] == [
        ["--prompt", "Third?"],
        ["--prompt-file", str(own)],
        ["--prompt", "First?"],
        ["--prompt", "Second\nline?"],
    ]


def test_each_adapter_answers_beside_the_model_alone(qwen35mm: Run, folder: Path, model: FakeModel) -> None:
    model.answer = lambda asked: f"A picture by {asked.adapter}."
    chosen = ("--lora", "poet=a/poems=0.5", "--lora", "./b", "--lora", "./b=2")
    done = qwen35mm("caption", folder, "--preset", "short", *chosen, "--preview", 1, "--no-open")
    assert done.returncode == 0, done.stderr
    assert [asked.adapter for asked in model.asked] == [None, "adapter-1", "adapter-2", "adapter-3"]
    shown = " ".join(done.stdout.split())
    for words in ("by adapter-3.", "short, poet", "short, b", "short, b=2"):
        assert words in shown, shown
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  qwen35mm")]
    assert [words[3:-2] for words in commands] == [[], *(["--lora", lora] for lora in ("a/poems=0.5", "b", "b=2.0"))]


def test_ctrl_c_ends_the_page_and_says_what_there_is(
    qwen35mm: Run, folder: Path, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    printed = caption_preview._print

    def press(*arguments: Any, **named: Any) -> None:
        printed(*arguments, **named)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    with monkeypatch.context() as during:
        during.setattr(caption_preview, "_print", press)
        done = qwen35mm("caption", folder, "--preview", "2", "--preset", "short")
    assert done.returncode == 0, done.stderr
    assert (len(model.asked), len(opened)) == (2, 1)
    assert "The page stays until Ctrl-C." in done.stderr
    assert "qwen35mm shows the preview on http://127.0.0.1:" in done.stdout
    # The page has the captions.
    assert "A picture of noise." not in done.stdout

    def pressed() -> bool:
        if len(model.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            model.asked.append(model.asked[0])
        return len(model.asked) > 3

    model.waits = pressed
    model.asked.clear()
    done = qwen35mm("caption", folder, "--preview", "3", "--preset", "short,tags", "--slots", "1", "--no-open")
    assert done.returncode == 130, done.stderr
    assert done.stdout.count("A picture of noise.") == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(opened[0])


def test_what_cant_be_previewed_is_refused_in_words(qwen35mm: Run, folder: Path, model: FakeModel) -> None:
    (jobs := folder.parent / "jobs.toml").write_text(f'[[job]]\nsources = "{folder}"\n')
    (empty := folder.parent / "empty").mkdir()
    for source, options, code, words in (
        (folder, ["--preview", "0"], 2, "--preview"),
        (folder, ["--preview", "7"], 1, "Give --preview 6."),
        (empty, ["--preview", "1"], 1, "Nothing to preview"),
        (folder, ["--preview", "1", "--where", "stem == 'x'"], 1, "Nothing to preview"),
        (folder, ["--preview", "1", "--dry-run"], 1, "give one of them"),
        (folder, ["--preview", "1", "--folder-prompts"], 1, "leave one of them out"),
        (folder, ["--preview", "1", "--preset", "tags,none"], 1, "There is no preset"),
        (jobs, ["--preview", "1"], 1, "not a file of jobs"),
        (folder, ["--preview", "1", "--take-back"], 2, "give one of them"),
        (folder, [], 2, "--no-open is for --preview"),
    ):
        done = qwen35mm("caption", source, "--no-open", *options)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert model.asked == []


def test_a_preview_in_which_nothing_is_captioned_says_so(qwen35mm: Run, folder: Path, model: FakeModel) -> None:
    model.answer = lambda _: ""
    done = qwen35mm("caption", folder, "--no-open", "--preview", "2", "--preset", "short,tags")
    assert done.returncode == 4, done.stderr
    assert "The model answered nothing." in " ".join(done.stdout.split())
    assert "The time of images isn't known" in done.stdout
