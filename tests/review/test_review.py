"""Going through a folder's captions: what is shown, what is changed on the disk, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job
from qwen35mm.errors import CaptioningError, StorageError
from qwen35mm.http.sessions import PageToken
from qwen35mm.review.app import create_app
from qwen35mm.review.asking import Asker
from qwen35mm.review.changes import ChangedError, Undone
from qwen35mm.review.collection import Search
from qwen35mm.review.folder import Folder
from qwen35mm.review.training import Training
from qwen35mm_preprocess import MediaLimits
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.runs import job, run, texts
from tests.review.test_training import WORDS

pytestmark = pytest.mark.usefixtures("media_in_process")


@pytest.fixture
def reviewed(folder: Path) -> Iterator[Folder]:
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        yield reviewed


def look(reviewed: Folder) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in reviewed.describe(reviewed.look())}


def found(reviewed: Folder, **search: Any) -> list[str]:
    numbers = reviewed.find(Search(**search))["numbers"]
    return [item["name"] for item in reviewed.describe(numbers)]


async def test_a_run_leaves_what_was_edited_and_replaces_what_was_accepted_as_it_was(
    folder: Path,
    reviewed: Folder,
) -> None:
    await run(job(folder), FakeModel(answer=lambda _: "Made by a model."))
    first, second, *_ = look(reviewed).values()
    assert first["text"] == "Made by a model."
    reviewed.save(first["number"], "Written by a person.", first["digest"], "")
    reviewed.accept(second["number"], second["digest"], True)
    await run(job(folder, "Another question?"), FakeModel(answer=lambda _: "Made again."))
    assert list(texts(folder).values()) == ["Written by a person.\n", *["Made again.\n"] * 5]
    # It was another text that was accepted.
    assert [item["accepted"] for item in look(reviewed).values()] == [False] * 6


async def test_captions_are_found_where_the_captioner_wrote_them(folder: Path) -> None:
    for name in ("0.jpg", "1.gif"):
        picture(9).save(folder / name)
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        expected = {item["name"]: item["file"] for item in look(reviewed).values()}
    await run(job(folder), FakeModel())
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        assert {item["name"]: item["file"] for item in look(reviewed).values()} == expected
    assert expected["0.jpg"] == "0.txt"
    assert expected["0.png"] == "0.png.txt"
    assert set(texts(folder)) == {str(Path(name).with_name(file)) for name, file in expected.items()}


def test_nobody_elses_change_is_replaced(folder: Path, reviewed: Folder) -> None:
    path = folder / "0.txt"
    path.write_text("Theirs.")
    item = look(reviewed)["0.png"]
    path.write_text("Theirs, changed.")
    for change in (
        lambda: reviewed.save(item["number"], "Mine.", item["digest"], ""),
        lambda: reviewed.accept(item["number"], item["digest"], True),
    ):
        with pytest.raises(ChangedError):
            change()
    assert path.read_text() == "Theirs, changed."
    item = look(reviewed)["0.png"]
    reviewed.save(item["number"], "Mine.", item["digest"], "")
    path.write_text("Theirs again.")
    with pytest.raises(ChangedError):
        reviewed.undo()
    assert path.read_text() == "Theirs again."


def test_every_change_can_be_taken_back(folder: Path, reviewed: Folder) -> None:
    before = b"\xef\xbb\xbfOld, \xc3\xa9.\r\n\r\n"
    (folder / "0.txt").write_bytes(before)
    first, second, *_ = look(reviewed).values()
    number, digest = first["number"], first["digest"]
    reviewed.accept(number, digest, True)
    # What is being written is saved again and again, and is one change.
    for text in ("New", "New text", "New text."):
        digest = reviewed.save(number, text, digest, "writing")["digest"]
    assert (folder / "0.txt").read_bytes() == b"New text.\n"
    reviewed.save(second["number"], "The first caption.", "", "")
    assert (folder / "1.txt").exists()
    assert reviewed.undo() == Undone([second["number"]])
    assert not (folder / "1.txt").exists()
    assert reviewed.undo() == Undone([number])
    assert (folder / "0.txt").read_bytes() == before
    assert look(reviewed)["0.png"]["accepted"]
    assert reviewed.undo() == Undone([number])
    assert not look(reviewed)["0.png"]["accepted"]
    assert reviewed.undo() is None


def test_what_one_tab_cancels_is_its_own_edit(folder: Path, reviewed: Folder) -> None:
    (folder / "0.txt").write_text("Old.\n")
    first, second, *_ = look(reviewed).values()
    save = partial(reviewed.save, first["number"])
    digest = save("Half", first["digest"], "here")["digest"]
    reviewed.save(second["number"], "Finished.", second["digest"], "there")
    save("Half a text", digest, "here")
    assert reviewed.counts()["changes"] == 2, "still one edit, though the other tab's lies between"
    assert reviewed.undo("here") == Undone([first["number"]])
    assert (texts(folder)["0.txt"], texts(folder)["1.txt"]) == ("Old.\n", "Finished.\n")
    assert reviewed.undo("here") is None
    # An undo that is offered after a change of many takes back that change.
    digest = look(reviewed)["1.png"]["digest"]
    many = reviewed.accept_many([first["number"]], True)
    reviewed.accept(second["number"], digest, True)
    assert reviewed.undo(many.name) == Undone([first["number"]], [], True)
    assert look(reviewed)["1.png"]["accepted"]


def test_of_very_many_changes_the_last_ones_can_be_taken_back(
    folder: Path, reviewed: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.review.changes.MAX_UNDO_BYTES", 6000)
    item = look(reviewed)["0.png"]
    for number in range(20):
        item = reviewed.save(item["number"], f"{number} " * 500, item["digest"], "")
    assert 1 < reviewed.counts()["changes"] < 6
    while reviewed.undo() is not None:
        pass
    assert (folder / "0.txt").read_text().startswith("1"), "one of the later texts stays"


def test_what_was_accepted_is_remembered_also_behind_a_torn_line(folder: Path) -> None:
    for name in ("0", "1"):
        (folder / f"{name}.txt").write_text("A caption.")
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        for item in list(look(reviewed).values())[:2]:
            reviewed.accept(item["number"], item["digest"], True)
        with pytest.raises(CaptioningError, match=r"The review page \(process"):
            Folder(folder, suffix=".txt")
    path = folder / ".qwen35mm" / "review.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        reviewed.look()
        assert found(reviewed, show="accepted") == ["0.png"]
        assert reviewed.counts()["accepted"] == 1
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["0.png"]


async def test_items_are_found(folder: Path, reviewed: Folder) -> None:
    model = FakeModel(answer=lambda asked: f"A RED ball, {asked.digest[:4]}.", finish_reason="length")
    await run(job(folder), model)
    (folder / "0.txt").write_text("A Grüner Ball")
    (folder / "1.txt").unlink()
    picture(2).resize((130, 130)).save(folder / "2.jpg")
    reviewed.look()
    assert found(reviewed, words="ball grüner") == ["0.png"]
    assert found(reviewed, words="red 4") == ["more/4.png"]
    assert found(reviewed, words="-RED -ball") == ["1.png", "2.jpg"]
    assert found(reviewed, words="-4 png -red") == ["0.png", "1.png"]
    assert found(reviewed, show="empty") == ["1.png", "2.jpg"]
    assert found(reviewed, max_chars=15, min_chars=5) == ["0.png"]
    flags = reviewed.find(Search())["flags"]
    assert flags["edited"] == 1
    assert found(reviewed, flag="edited") == ["0.png"]
    (other,) = flags.keys() - {"edited"}
    assert found(reviewed, flag=other, show="open") == ["2.png", "3.png", "more/4.png", "more/5.png"]
    while reviewed.find(Search(show="similar"))["unread"]:
        pass
    assert found(reviewed, show="similar") == ["2.jpg", "2.png"]


def test_nothing_outside_the_folder_is_shown_or_written(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("A secret.")
    picture(0).save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "0.txt").symlink_to(secret)
    (folder / "1.txt").write_bytes(b"\xff\xfe")
    (folder / "2.txt").write_bytes(b"x" * (1 << 21))
    os.mkfifo(folder / "3.txt")
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        items = look(reviewed)
        said = [str(items[f"{n}.png"]["problem"]) for n in range(4)]
        words = ("link that leads out", "isn't UTF-8", "isn't a caption", "isn't a text file")
        assert [word in text for word, text in zip(words, said, strict=True)] == [True] * 4
        for n in range(4):
            with pytest.raises(StorageError):
                reviewed.save(items[f"{n}.png"]["number"], "Mine.", items[f"{n}.png"]["digest"], "")
        with pytest.raises(StorageError, match="link that leads out"):
            reviewed.medium(items["link.png"]["number"])
    assert secret.read_text() == "A secret."


def client_of(reviewed: Folder, model: FakeModel | None = None) -> TestClient:
    @asynccontextmanager
    async def opened(_job: Job) -> AsyncIterator[Captioner]:
        yield (model or FakeModel()).captioner()

    training = Training(WORDS)
    app = create_app(reviewed, Asker(lambda: job(reviewed.root), opened), training=training, token=PageToken("abc"))
    return TestClient(app, "http://127.0.0.1", headers={"authorization": "Bearer abc", "x-qwen35mm": "1"})


def test_the_page_answers_only_who_it_is_for(reviewed: Folder) -> None:
    client = client_of(reviewed)
    assert client.post("/api/look").status_code == 200
    assert client.post("/api/look", headers={"authorization": ""}).status_code == 403
    assert client.post("/api/look", headers={"host": "evil.example"}).status_code == 421
    assert client.post("/api/look", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert "default-src 'self'" in client.get("/").headers["content-security-policy"]
    for path in ("/media/99", "/media/..%2f..%2fetc%2fpasswd", "/small/-1", "/web/%2e%2e/icon.svg"):
        assert client.get(path).status_code == 404
    for body in ({"number": "0"}, {"number": 0, "text": "x"}, [], {"number": 0, "digest": "", "text": 1}):
        assert client.post("/api/save", json=body).status_code == 400


def test_exactly_what_was_shown_is_changed(folder: Path, reviewed: Folder) -> None:
    client = client_of(reviewed)
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"a, {number}")
    numbers = client.post("/api/look").json()["numbers"]

    def ask(name: str, **body: Any) -> dict[str, Any]:
        return client.post(f"/api/{name}", json=body).json()

    first = ask("plan", numbers=numbers, action="remove", tags="a")
    planned = ask("plan", numbers=numbers, action="add", tags="b", last=True)
    assert (planned["num"], planned["others"]) == (3, 0)
    assert planned["shown"][0] == {"name": "0.png", "parts": [["a, 0", "", ""], ["", "", ", b"]]}
    assert "out of date" in str(ask("carry_out", plan=first["plan"]))
    (folder / "1.txt").write_text("Theirs.")
    done = ask("carry_out", plan=planned["plan"])
    assert (done["num"], done["refused"][0][0], done["counts"]["changes"]) == (2, "1.png", 1)
    assert list(texts(folder).values()) == ["a, 0, b\n", "Theirs.", "a, 2, b\n"]
    assert "out of date" in str(ask("carry_out", plan=planned["plan"])), "never twice"
    accepted = ask("accept_many", numbers=numbers, accepted=True)
    assert (accepted["num"], accepted["counts"]["accepted"]) == (3, 3)
    undone = ask("undo")
    assert (undone["numbers"], undone["many"], undone["counts"]["accepted"]) == ([0, 1, 2], True, 0)
    assert [item["text"] for item in ask("undo")["items"]] == ["a, 0", "a, 2"]
    assert "no text to find" in str(ask("plan", numbers=numbers, action="replace"))
    for action in ("sort", "deduplicate"):
        assert ask("plan", numbers=numbers, action=action)["others"] == 1
    assert client.post("/api/plan", json={"numbers": numbers, "action": "shout"}).status_code == 400
    counted = ask("statistics", numbers=numbers, trainer="sd-scripts")
    assert (counted["captions"], counted["counts"][0], counted["tags"]) == (3, ["a", 2], True)
    assert sum(bar["num"] for bar in counted["bars"]) == 3
    assert "--for takes" in str(ask("statistics", numbers=numbers, trainer="nobody"))


def test_media_are_kept_by_the_browser_until_they_change(folder: Path, reviewed: Folder) -> None:
    client = client_of(reviewed)
    number = client.post("/api/look").json()["numbers"][0]
    (item,) = client.post("/api/items", json={"numbers": [number]}).json()["items"]
    whole = client.get(f"/media/{number}?v={item['version']}")
    assert whole.content == (folder / "0.png").read_bytes()
    assert "immutable" in whole.headers["cache-control"]
    assert client.get(f"/small/{number}?v={item['version']}").headers["content-type"] == "image/jpeg"
    part = client.get(f"/media/{number}", headers={"range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"PNG")
    assert client.get(f"/media/{number}?v=other").headers["cache-control"] == "no-store"
    reviewed.limits = MediaLimits(max_image_bytes=10, max_video_bytes=10)
    for path in ("media", "small"):
        assert "too large" in str(client_of(reviewed).get(f"/{path}/{number}").json())
    reviewed.limits = MediaLimits(max_source_pixels=10)
    assert client_of(reviewed).get(f"/small/{number}").status_code == 400


def test_the_model_is_asked_for_another_caption_when_it_is_needed(
    folder: Path,
    reviewed: Folder,
) -> None:
    (folder / "0.txt").write_text("Tags, of a picture")
    model = FakeModel(answer=lambda asked: f"Improved: {asked.question}")
    with client_of(reviewed, model) as client:
        number = client.post("/api/look").json()["numbers"][0]
        asked = {"number": number, "prompt": "Make a sentence of {sidecar}!"}
        reply = client.post("/api/ask", json=asked).json()
        assert reply == {"text": "Improved: Make a sentence of Tags, of a picture!", "flags": []}
        client.post("/api/ask", json=asked)
        assert model.asked[0].params.seed != model.asked[1].params.seed
        refused = client.post("/api/ask", json={"number": number, "prompt": "Say {nothing}"})
        assert refused.status_code == 400
        assert "Unknown placeholder" in str(refused.json())
        assert client.post("/api/ask", json={"number": number, "preset": "short"}).status_code == 200
    assert (folder / "0.txt").read_text() == "Tags, of a picture"
