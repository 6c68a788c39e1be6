"""`qwen35mm review`, without its port: what it shows, by how that is named, and what it refuses."""

from __future__ import annotations

import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen35mm.cli.review import ReviewOptions, _training_command
from qwen35mm.settings import ModelOptions
from tests.captioning.conftest import folder, media_in_process
from tests.captioning.fake_model import FakeModel
from tests.captioning.runs import job, run
from tests.cli.conftest import Run

__all__ = ["folder", "media_in_process"]


@pytest.fixture
def looked(qwen35mm: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Starts the command; what the page is told at first, and the captions that it shows."""

    def show(*arguments: object) -> tuple[dict[str, Any], list[str]]:
        answers: list[Any] = []

        def serve(app: Any, *, line: Callable[[str], str], **_: object) -> None:
            found = re.search(r"/t/([\w-]+)/", line("http://127.0.0.1:7861"))
            assert found is not None
            headers = {"authorization": f"Bearer {found[1]}", "x-qwen35mm": "1"}
            with TestClient(app, "http://127.0.0.1", headers=headers) as client:
                looked = client.post("/api/look").json()
                items = client.post("/api/items", json={"numbers": looked["numbers"]}).json()["items"]
                looked["training"] = client.post("/api/training").json()
                answers.append((looked, [item["text"] for item in items]))

        monkeypatch.setattr("qwen35mm.http.run.run", serve)
        done = qwen35mm("review", *arguments)
        assert done.returncode == 0, done.stderr
        return answers[0]

    return show


@pytest.fixture
def shown(looked: Callable[..., tuple[dict[str, Any], list[str]]]) -> Callable[..., tuple[str, list[str]]]:
    """Starts the command; the page's title and the captions that it shows."""

    def show(*arguments: object) -> tuple[str, list[str]]:
        first, texts = looked(*arguments)
        return first["title"], texts

    return show


def test_the_page_has_the_command_that_trains_on_its_captions(
    folder: Path, looked: Callable[..., tuple[dict[str, Any], list[str]]]
) -> None:
    """What it names is what `tune` reads: the folder, its text files, and the model that is asked."""
    first, _ = looked(folder, "--output", "sidecar:.caption", "--model", "Qwen/Qwen3.5-0.8B", "--system", "Be brief.")
    _, command, source, *words = shlex.split(first["training"]["command"])
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (command, Path(source)) == ("tune", folder)
    assert options.pop("--out") == f"{folder}-adapter"
    assert options == {
        "--model": "Qwen/Qwen3.5-0.8B",
        "--output": "sidecar:.caption",
        "--system": "Be brief.",
    }


@pytest.mark.parametrize(
    ("named", "out"), [(".", "{here}-adapter"), ("v1.5", "v1.5-adapter"), ("a/v1.5", "a/v1.5-adapter")]
)
def test_an_adapter_lies_beside_its_captions(
    named: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / named).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words = _training_command(Path(named), ModelOptions(), ReviewOptions())
    assert words[words.index("--out") + 1] == out.format(here=tmp_path)


@pytest.mark.usefixtures("media_in_process")
async def test_captions_are_shown_from_where_they_are_named(
    folder: Path, shown: Callable[..., tuple[str, list[str]]]
) -> None:
    lines, rows = folder.parent / "all.jsonl", folder.parent / "set"
    outputs = ("sidecar", f"jsonl:{lines}", f"dataset:{rows}")
    await run(job(folder, outputs=outputs), FakeModel(answer=lambda _: "A picture."))
    texts = ["A picture."] * 6
    assert shown(folder) == ("media", texts)
    assert shown(lines) == ("all.jsonl", texts)
    assert shown(folder, "--output", f"jsonl:{lines}") == ("all.jsonl", texts)
    assert shown(folder, "--output", f"dataset:{rows}") == ("set", texts)
    assert shown(lines, "--state-dir", folder / ".qwen35mm") == ("all.jsonl", texts)
    # From a tar, which no record has a path of.
    tar, far = folder.parent / "tars" / "0.tar", folder.parent / "far.jsonl"
    tar.parent.mkdir()
    with tarfile.open(tar, "w") as file:
        file.add(folder / "0.png", "0.png")
    await run(job(tar, outputs=(f"jsonl:{far}",)), FakeModel(answer=lambda _: "A picture."))
    assert shown(tar, "--output", f"jsonl:{far}") == ("far.jsonl", texts[:1])


def test_what_cant_be_reviewed_is_refused_in_words(qwen35mm: Run, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    for arguments, words in (
        ([tmp_path, "--output", "parquet:rows"], "in text files, JSONL and dataset folders"),
        ([tmp_path / "other.jsonl"], "No manifest of `qwen35mm caption` knows other.jsonl"),
        ([tmp_path, "--output", f"jsonl:{tmp_path / 'none.jsonl'}"], "none.jsonl can't be read: No such file"),
        ([tmp_path / "nothing"], "There is no folder"),
    ):
        done = qwen35mm("review", *arguments)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
