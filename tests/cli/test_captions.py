"""`qwen35mm captions`: what it shows, what it writes, and what it takes back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.contract import Event, Finished, FinishReason, GenerationRequest, Result, Text
from tests.captioning.conftest import folder, media_in_process
from tests.captioning.fake_model import FakeModel
from tests.captioning.runs import job, listed, run, texts
from tests.cli.conftest import Run

__all__ = ["folder", "media_in_process"]

TAGS = ("ohwx, hat, red", "ohwx, hat, hat", "ohwx, cap", "A dog sleeps, and a cat.", "ohwx, tree")


@pytest.fixture
def tagged(folder: Path) -> Path:
    """Five captions of six pictures."""
    for number, text in enumerate(TAGS[:4]):
        (folder / f"{number}.txt").write_text(f"{text}\n")
    (folder / "more" / "4.txt").write_text(TAGS[4])
    return folder


def test_a_change_is_shown_and_written_only_on_request(qwen35mm: Run, tagged: Path) -> None:
    before = texts(tagged)
    arguments = ("captions", "replace", tagged, "--find", "hat", "--with", "cap", "--words", "--show", "1")
    done = qwen35mm(*arguments)
    assert (done.returncode, done.stdout) == (0, "0.png\n- ohwx, hat, red\n+ ohwx, cap, red\n")
    assert "2 of 5 captions change; the first 1 shown." in done.stderr
    assert "Nothing was written: add --write." in done.stderr
    assert (texts(tagged), (tagged / ".qwen35mm").exists()) == (before, False)
    done = qwen35mm(*arguments, "--write")
    assert f"2 captions changed. To take it back: qwen35mm captions undo {tagged}" in done.stderr
    assert texts(tagged) == before | {"0.txt": "ohwx, cap, red\n", "1.txt": "ohwx, cap, cap\n"}
    (tagged / "1.txt").write_text("Mine.")
    done = qwen35mm("captions", "undo", tagged)
    assert done.returncode == 3
    assert "Taken back: replace 'hat' by 'cap', of " in done.stdout
    assert "1 caption changed since, and left: 1.png." in done.stderr
    assert texts(tagged) == before | {"1.txt": "Mine."}
    done = qwen35mm("captions", "undo", tagged)
    assert (done.returncode, "nothing to take back" in done.stderr) == (1, True)


def test_a_terminal_is_asked(qwen35mm: Run, tagged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(sys.modules["qwen35mm.cli.captions"], "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    for answer, text in (("n", TAGS[0]), ("y", "ohwx, red")):
        done = qwen35mm("captions", "remove", tagged, "--tags", "hat", stdin=f"{answer}\n")
        assert "Write the changes?" in done.stderr
        assert (tagged / "0.txt").read_text() == f"{text}\n"


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (
            ["add", "--tags", "night, ohwx"],
            {"0": "night, ohwx, hat, red", "3": "night, ohwx, A dog sleeps, and a cat."},
        ),
        (["add", "--tags", "night", "--last"], {"2": "ohwx, cap, night", "3": "A dog sleeps, and a cat. night"}),
        (["remove", "--tags", "hat,ohwx"], {"0": "red", "1": "", "2": "cap", "3": TAGS[3]}),
        (["sort", "--keep", "1"], {"0": "ohwx, hat, red", "3": TAGS[3]}),
        (["sort"], {"0": "hat, ohwx, red", "2": "cap, ohwx", "3": TAGS[3]}),
        (["sort", "--by-count"], {"0": "ohwx, hat, red", "1": "ohwx, hat, hat"}),
        (["deduplicate"], {"0": TAGS[0], "1": "ohwx, hat"}),
        (["remove", "--tags", "hat", "--search", "red"], {"0": "ohwx, red", "1": TAGS[1]}),
    ],
)
def test_actions(qwen35mm: Run, tagged: Path, arguments: list[str], changed: dict[str, str]) -> None:
    action, *options = arguments
    done = qwen35mm("captions", action, tagged, *options, "--write")
    assert done.returncode == 0, done.stderr
    assert {name: (tagged / f"{name}.txt").read_text().rstrip("\n") for name in changed} == changed
    assert not (tagged / "more" / "5.txt").exists()


@pytest.mark.usefixtures("media_in_process")
async def test_folders_and_records_are_one_run(qwen35mm: Run, tagged: Path) -> None:
    lines, rows = tagged.parent / "all.jsonl", tagged.parent / "set"
    await run(job(tagged, outputs=(f"jsonl:{lines}", f"dataset:{rows}")), FakeModel(answer=lambda _: "A red hat."))
    change = ("--find", "hat", "--with", "cap", "--write")
    done = qwen35mm("captions", "replace", tagged, lines, *change)
    assert "8 captions changed" in done.stderr
    assert [line["caption"] for line in listed(lines)] == ["A red cap."] * 6
    done = qwen35mm("captions", "replace", tagged, "--output", f"dataset:{rows}", *change)
    assert [row["text"] for row in listed(rows / "metadata.jsonl")] == ["A red cap."] * 6
    done = qwen35mm("captions", "undo", tagged, lines)
    assert "8 captions as before" in done.stdout
    assert texts(tagged)["0.txt"] == f"{TAGS[0]}\n"
    assert [line["caption"] for line in listed(lines)] == ["A red hat."] * 6
    done = qwen35mm("captions", "replace", lines, "--flag", "edited", *change)
    assert "0 of 0 captions" in done.stderr


def test_statistics(qwen35mm: Run, tagged: Path) -> None:
    picture = tagged.parent / "lengths.svg"
    done = qwen35mm("captions", "stats", tagged, "--for", "sd-scripts", "--lacking", "ohwx", "--svg", picture)
    assert done.returncode == 0
    for words in (
        "5 captions of 6 images and videos, 4 lists of tags.",
        "tokens for sd-scripts: 3 to ",
        "the trainer reads 75",
        "Most frequent of 5 tags\n  ohwx  4 (100%)\n  hat   2 (50%)",
        "Tags in over 95%: ohwx",
        "Without 'ohwx': 1 of 5\n  3.png",
    ):
        assert words in done.stdout, done.stdout
    assert "<svg" in picture.read_text()
    assert not (tagged / ".qwen35mm").exists()
    assert "Length in words: 2 to 6" in qwen35mm("captions", "stats", tagged).stdout
    done = qwen35mm("captions", "stats", tagged, "--search", "nothing like this")
    assert done.stdout == "0 captions of 0 images and videos, 0 lists of tags.\n"


class Translator(FakeModel):
    """Answers text alone; `translated` gives the answer to a caption."""

    def __init__(self, translated: Callable[[str], tuple[str, FinishReason]]) -> None:
        super().__init__()
        self.translated = translated
        self.seen: list[str] = []

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Event]:
        (part,) = request.messages[-1].content
        assert isinstance(part, Text)
        assert "into German" in part.text
        self.seen.append(part.text.rpartition("\n\n")[2])
        text, reason = self.translated(self.seen[-1])
        yield Finished(Result(text, None, reason, (1, 2), (1,) * 10, 10, 2, 0.01, 100.0))


@pytest.fixture
def translates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Translator], None]:
    def use(model: Translator) -> None:
        @asynccontextmanager
        async def opened(*_: Any) -> AsyncIterator[Captioner]:
            yield replace(model.captioner(), backend=cast("LocalBackend", model), num_at_once=2)

        monkeypatch.setattr(sys.modules["qwen35mm.cli.captions"], "open_captioner", opened)

    return use


def test_captions_are_translated_and_go_on_after_a_stop(
    qwen35mm: Run, tagged: Path, translates: Callable[[Translator], None]
) -> None:
    before = texts(tagged)
    model = Translator(lambda text: (f"„{text.replace('hat', 'Hut')}“" if "tree" not in text else "ohwx", "stop"))
    translates(model)
    arguments = ("captions", "translate", tagged, "--to", "German", "--keep", "ohwx")
    done = qwen35mm(*arguments, "--show", "1")
    assert (done.stdout, model.seen) == ("0.png\n- ohwx, hat, red\n+ ohwx, Hut, red\n", [TAGS[0]])
    assert "5 captions to translate." in done.stderr
    assert texts(tagged) == before

    def stops(text: str) -> tuple[str, FinishReason]:
        if "cap" in text:
            raise RuntimeError("The power is off.")
        return text.replace("hat", "Hut"), "stop"

    translates(Translator(stops))
    with pytest.raises(RuntimeError):
        qwen35mm(*arguments, "--write")
    assert texts(tagged)["0.txt"] == "ohwx, Hut, red\n"
    answers = {"ohwx, cap": ("ohwx, Mütze", "stop"), TAGS[3]: ("Ein", "length"), TAGS[4]: ("Baum", "stop")}
    model = Translator(lambda text: cast("Any", answers[text]))
    translates(model)
    done = qwen35mm(*arguments, "--write")
    assert sorted(model.seen) == sorted(TAGS[2:]), "the others are translated"
    assert done.returncode == 3
    assert "1 caption changed." in done.stderr
    assert "2 captions not changed, such as" in done.stderr
    assert texts(tagged) == before | {
        "0.txt": "ohwx, Hut, red\n",
        "1.txt": "ohwx, Hut, Hut\n",
        "2.txt": "ohwx, Mütze\n",
    }
    assert "Taken back: translate to German" in qwen35mm("captions", "undo", tagged).stdout
    assert "2 captions as before" in qwen35mm("captions", "undo", tagged).stdout
    assert texts(tagged) == before


def test_what_cant_be_done_is_refused_in_words(qwen35mm: Run, tagged: Path) -> None:
    for arguments, words in (
        (["replace", tagged, "--find", "(", "--with", "", "--regex"], "isn't a valid regular expression: missing )"),
        (["remove", tagged, "--tags", " "], "There is no tag"),
        (["stats", tagged, "--output", "parquet:rows"], "text files, JSONL and dataset folders"),
        (["stats", tagged / "nothing"], "There is no folder"),
        (["stats", tagged, "--for", "nobody"], "--for takes"),
        (["stats", tagged, "--lacking", "re:("], "isn't a valid regular expression"),
    ):
        done = qwen35mm("captions", *arguments)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
