"""Which samples are held out, how much each counts, and what captions and chats become."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.texts.presets import preset_question
from qwen35mm.chat.store.archive import export_zip
from qwen35mm.chat.store.records import Call
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.contract import Image
from qwen35mm.errors import ConfigError
from qwen35mm.review.folder import Folder
from qwen35mm.tuning.captions import CaptionSource, read_captions
from qwen35mm.tuning.chats import read_chats
from qwen35mm.tuning.encoding import Encoder
from qwen35mm.tuning.samples import Found, hold_out, shares
from tests.captioning.fake_model import FakeModel
from tests.captioning.runs import job, run
from tests.chat.helpers import ME, attach, create, node, reply
from tests.tuning.conftest import picture, write

SHORT = preset_question("short")


def group(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def test_a_tenth_is_held_out_and_new_samples_move_no_old_ones() -> None:
    groups = [group(number) for number in range(200)]
    held = hold_out(groups)
    assert 10 <= sum(held) <= 32
    assert hold_out(groups[50:]) == held[50:]
    # A picture with two captions is on one side.
    assert hold_out([*groups, *groups]) == [*held, *held]


@pytest.mark.parametrize("num", range(2, 12))
def test_at_least_one_and_never_all_are_held_out(num: int) -> None:
    for first in range(40):
        held = hold_out([group(first + number) for number in range(num)])
        assert 1 <= sum(held) < num


def test_one_group_alone_is_not_held_out() -> None:
    assert hold_out([group(1), group(1)]) == [False, False]


def test_edited_samples_count_more_and_all_count_one_on_average() -> None:
    assert shares([False, True, False, False], 3.0) == pytest.approx([2 / 3, 2.0, 2 / 3, 2 / 3])
    assert shares([True, True], 5.0) == [1.0, 1.0]


def read(path: Path, **options: Any) -> Found:
    return read_captions(CaptionSource(path, SHORT, **options))


def shown(found: Found) -> dict[str, tuple[str, str, bool]]:
    """The question, the answer and whether it was edited, by name."""
    return {each.name: (each.messages[-1].text, each.answer, each.edited) for each in found.samples}


def test_text_files_of_others_get_the_question_of_a_preset(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", [0, 1, 2])
    (folder / "2.txt").unlink()
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "bad.txt").write_text("Something.\n")
    found = read(folder)
    assert shown(found) == {
        "0.png": (SHORT.text, "red circle", False),
        "1.png": (SHORT.text, "green circle", False),
    }
    assert found.num_bare == 1
    assert [name for name, _ in found.skipped] == ["bad.png"]
    assert found.samples[0].group == hashlib.sha256((folder / "0.png").read_bytes()).digest()
    assert {each.messages[-1].text for each in read(folder, prompt="What?").samples} == {"What?"}
    assert read(folder, system="Be brief.").samples[0].messages[0].text == "Be brief."


async def captioned(tmp_path: Path, *outputs: str) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        picture(number)[0].save(folder / f"{number}.png")
    await run(job(folder, "Describe it.", outputs=[text.format(tmp_path) for text in outputs]), FakeModel())
    return folder


def edit(folder: Path, name: str, text: str, *, accept: bool = False) -> None:
    """As a person does on the review page."""
    reviewed = Folder(folder, suffix=".txt")
    numbers = {each["name"]: each for each in reviewed.describe(reviewed.look())}
    chosen = numbers[name]
    changed = reviewed.save(chosen["number"], text, chosen["digest"], "")
    if accept:
        reviewed.accept(chosen["number"], changed["digest"], True)
    reviewed.close()


async def test_review_says_what_was_edited_and_accepted(tmp_path: Path) -> None:
    folder = await captioned(tmp_path, "sidecar")
    edit(folder, "1.png", "Mine.", accept=True)
    found = shown(read(folder))
    assert found["1.png"] == ("Describe it.", "Mine.", True)
    assert [each[::2] for each in (found["0.png"], found["2.png"])] == [("Describe it.", False)] * 2
    assert list(shown(read(folder, accepted=True))) == ["1.png"]
    edit(folder, "1.png", "Changed.")
    with pytest.raises(ConfigError, match="accepted caption"):
        read(folder, accepted=True)


@pytest.mark.parametrize(
    ("output", "source"),
    [
        ("jsonl:{}/all.jsonl", "all.jsonl"),
        ("dataset:{}/set", "set"),
        ("parquet:{}/rows", "rows"),
        ("webdataset:{}/tars", "tars"),
    ],
)
async def test_each_output_with_media_is_a_source(output: str, source: str, tmp_path: Path) -> None:
    embeds = {"output_settings": settings_of(embed_media=True)} if output.startswith("parquet") else {}
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        picture(number)[0].save(folder / f"{number}.png")
    made = job(folder, "Describe it.", outputs=["sidecar", output.format(tmp_path)], **embeds)
    await run(made, FakeModel())
    found = read(tmp_path / source)
    texts = {(folder / f"{number}.txt").read_text().strip() for number in range(3)}
    assert {each.answer for each in found.samples} == texts
    assert {each.messages[-1].text for each in found.samples} == {"Describe it."}
    assert {each.group for each in found.samples} == {
        hashlib.sha256((folder / f"{number}.png").read_bytes()).digest() for number in range(3)
    }
    with pytest.raises(ConfigError, match="--accepted"):
        read(tmp_path / source, accepted=True)


def settings_of(**options: Any) -> Any:
    from qwen35mm.captioning.outputs import OutputSettings

    return OutputSettings(**options)


def test_the_last_line_of_a_record_counts(tmp_path: Path) -> None:
    write(tmp_path, [0, 1])
    rows = [
        {"name": "0.png", "path": str(tmp_path / "0.png"), "caption": "Old.", "prompt": "What?"},
        {"file_name": "1.png", "text": "Theirs."},
        {"name": "0.png", "path": "0.png", "caption": "New.", "prompt": "What?", "flags": ["edited"]},
        {"name": "animal", "path": "0.png", "caption": "A cat."},
        {"name": "animal", "path": "1.png", "caption": "A dog."},
        {"name": "bad flags", "path": "0.png", "caption": "Fine.", "flags": "[bad"},
        {"name": "gone.png", "path": "gone.png", "caption": "Gone."},
    ]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "torn {\n")
    found = read(path)
    assert shown(found) == {
        "0.png": ("What?", "New.", True),
        "1.png": (SHORT.text, "Theirs.", False),
        "animal": (SHORT.text, "A dog.", False),
        "bad flags": (SHORT.text, "Fine.", False),
    }
    assert len(found.samples) == 5, "other programs give one name to several media"
    assert [name for name, _ in found.skipped] == ["all.jsonl, line 8", "gone.png"]


def test_nothing_to_learn_from_is_said(tmp_path: Path) -> None:
    write(tmp_path / "photos", [0])
    (tmp_path / "photos" / "0.txt").unlink()
    with pytest.raises(ConfigError, match="nothing to learn from in 'photos'"):
        read(tmp_path / "photos")


def exported(tmp_path: Path) -> Path:
    """A chat with two replies, one of them edited, a branch that isn't shown, and a stopped reply."""
    store = ConversationStore(tmp_path / "store")
    data = io.BytesIO()
    picture(0)[0].save(data, "PNG")
    made = create(store, ME, title="Shapes", settings={"system": "Be brief."})
    first = node(text="What is this?", attachments=(attach(store, data.getvalue(), "a.png"),))
    hidden = reply(first.id, "A square.")
    answer = reply(first.id, "A circle.", reasoning="It is round.")
    second = node(answer.id, "Its colour?")
    edited = reply(second.id, "Red.", reasoning="Hm.", status="stopped", edited=True)
    third = node(edited.id, "And its size?")
    # Text with a call would be a sample without the call.
    calling = reply(third.id, "I look.", calls=(Call("c", "look"),))
    told = node(calling.id, role="tool", text="4", call="c")
    stopped = reply(told.id, "It is", status="stopped")
    for message in (first, hidden, answer, second, edited, third, calling, told, stopped):
        store.add(ME, made.id, message)
    store.change(ME, made.id, head=stopped.id)
    path = tmp_path / "chats.zip"
    with path.open("wb") as file:
        export_zip(store, ME, [made.id], file)
    store.close()
    return path


def test_the_replies_that_are_shown_are_samples(tmp_path: Path, encoder: Encoder) -> None:
    found = read_chats(exported(tmp_path), tmp_path / "files", encoder.media)
    first, second = found.samples
    assert [message.role for message in second.messages] == ["system", "user", "assistant", "user"]
    assert (first.answer, first.reasoning, first.edited) == ("A circle.", "It is round.", False)
    # Nobody corrected the thinking of an edited reply.
    assert (second.answer, second.reasoning, second.edited) == ("Red.", "", True)
    assert first.group == second.group
    assert isinstance(first.messages[1].media[0], Image)
    # The files outlive the reading.
    assert encoder.encode(second).num_answer_tokens > 1


def test_an_archive_without_replies_is_said(tmp_path: Path, encoder: Encoder) -> None:
    (tmp_path / "chats").mkdir()
    with pytest.raises(ConfigError, match="no finished reply"):
        read_chats(tmp_path / "chats", tmp_path / "files", encoder.media)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(Exception, match="unexpected file"):
        read_chats(tmp_path / "other.zip", tmp_path / "files", encoder.media)
