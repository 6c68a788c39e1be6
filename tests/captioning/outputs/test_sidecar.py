"""Text files beside media: which name, which mode, whose text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import Mode, OutputSettings, Sidecars, Wants
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError, OutputError
from tests.captioning.outputs.helpers import HARD_NAMES, kept, moved, picture, put, record, records_of, run


def texts(folder: Path, suffix: str = ".txt") -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob(f"*{suffix}")}


def one(folder: Path, text: str = "ours", prompt: str = "?") -> Record:
    return record(put(folder, "a.jpg", 1), text, prompt)


def test_names_never_collide(tmp_path: Path) -> None:
    names = ["a.jpg", "A.JPG", "a.png", "b.png", "a.webp", "A.jpg.TXT", "\u00e9.jpg", "e\u0301.png", "cats/a.jpg"]
    records = records_of(tmp_path, names)
    run(tmp_path, records, "sidecar")
    found = sorted(path.name for path in tmp_path.glob("*.txt"))
    assert len(found) == len({name.casefold() for name in found}) == 8
    assert {"a.txt", "A.JPG.txt", "a.png.txt", "b.txt", "a.webp.txt", "\u00e9.txt", "e\u0301.png.txt"} <= set(found)
    assert (tmp_path / "cats" / "a.txt").read_text() == records[-1].caption.text + "\n"
    assert run(tmp_path, list(reversed(records)), "sidecar") == [Wants.DONE] * len(names), "names stay in later runs"


def test_a_medium_that_is_called_text_is_never_replaced(tmp_path: Path) -> None:
    records = records_of(tmp_path, ["a.jpg", "a.txt", "b.txt"])
    run(tmp_path, records, "sidecar", mode="overwrite")
    assert (tmp_path / "a.txt").read_bytes() == picture(1)
    assert (tmp_path / "b.txt").read_bytes() == picture(2)
    assert {path.name for path in tmp_path.glob("*.t*t")} - {"a.txt", "b.txt"} == {
        "a.jpg.txt",
        "a.txt.txt",
        "b.txt.txt",
    }


@pytest.mark.parametrize("suffix", [".txt", ".caption", ".a.long.suffix"])
def test_names_of_every_kind(tmp_path: Path, suffix: str) -> None:
    long = "x" * 251
    names = [*HARD_NAMES, f"{long}.jpg", f"{long}.png", f"{'y' * 255}", f"{'y' * 254}"]
    records = records_of(tmp_path, names)
    run(tmp_path, records, f"sidecar:{suffix}")
    written = texts(tmp_path, suffix)
    assert sorted(written.values()) == sorted(each.caption.text + "\n" for each in records)
    assert all(len(os.fsencode(Path(name).name)) <= 255 for name in written)


def test_a_renamed_medium_takes_its_name(tmp_path: Path) -> None:
    """What is gone gives its name back; its text file is taken over."""
    first = record(put(tmp_path, "a.jpg", 1), "one")
    run(tmp_path, [first], "sidecar")
    assert run(tmp_path, [moved(first, tmp_path, "a.png")], "sidecar") == [Wants.DONE]
    assert texts(tmp_path) == {"a.txt": "one\n"}


def test_items_of_containers_need_a_folder(tmp_path: Path) -> None:
    inside = record(Item("../../train.parquet/0/../1.png", picture(1), "image"), "inside")
    with pytest.raises(CaptioningError, match="folder"):
        run(tmp_path, [inside], "sidecar")
    captions = tmp_path / "captions"
    run(tmp_path, [inside], "sidecar", captions=captions)
    assert list(texts(tmp_path).values()) == ["inside\n"]
    assert len(texts(captions)) == 1, "no name leads out of the folder"


def test_two_commands_share_a_folder(tmp_path: Path) -> None:
    """Each names its items below its own source, and so may give one name to two media."""
    captions = tmp_path / "captions"
    photo, clip = (
        record(put(tmp_path / name, "001.png", number), name) for number, name in enumerate(("photo", "clip"))
    )
    for each in (photo, clip):
        run(captions, [each], "sidecar", captions=captions)
    assert sorted(texts(captions).values()) == ["clip\n", "photo\n"]
    for each in (photo, clip):
        assert run(captions, [each], "sidecar", captions=captions) == [Wants.DONE]
    (tmp_path / "photo").rename(tmp_path / "moved")
    moved = record(put(tmp_path / "moved", "001.png", 0), "photo")
    assert run(captions, [moved], "sidecar", captions=captions) == [Wants.DONE], "its old name is free again"


def test_a_folder_mirrors_the_names(tmp_path: Path) -> None:
    records = records_of(tmp_path / "media", HARD_NAMES)
    run(tmp_path, records, "sidecar", captions=tmp_path / "captions")
    assert len(texts(tmp_path / "captions")) == len(HARD_NAMES)
    assert texts(tmp_path / "media") == {}
    assert (tmp_path / "captions" / "cats" / "b.tar.txt").exists()


@pytest.mark.parametrize(
    ("mode", "first", "triggered", "last"),
    [
        ("append", "mine\nA tree.\n", "ohwx, mine\nA tree.\n", "ohwx, mine\nAn oak.\nTags.\n"),
        ("prepend", "A tree.\nmine\n", "ohwx, A tree.\nmine\n", "ohwx, Tags.\nAn oak.\nmine\n"),
    ],
)
def test_a_trigger_word_that_comes_later_repeats_no_caption(
    tmp_path: Path, mode: Mode, first: str, triggered: str, last: str
) -> None:
    """The answer to a question stands there once, whatever was set anew."""
    path = tmp_path / "a.txt"
    path.write_text("mine")
    for text, trigger, expected in [("A tree.", "", first), ("ohwx, A tree.", "ohwx", triggered)] * 2:
        made = replace(one(tmp_path, text), trigger=trigger)
        assert run(tmp_path, [made] * 2, "sidecar", mode=mode) == [Wants.CAPTION, Wants.DONE]
        assert path.read_text() == expected
    # Another question is another caption; a better answer is not.
    run(tmp_path, [one(tmp_path, "Tags.", "tags?")], "sidecar", mode=mode)
    run(tmp_path, [replace(one(tmp_path, "ohwx, An oak."), trigger="ohwx")], "sidecar", mode=mode)
    assert path.read_text() == last


def test_an_answer_that_a_person_changed_gets_only_the_trigger_word(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("mine")
    run(tmp_path, [one(tmp_path, "A tree.")], "sidecar", mode="append")
    path.write_text("mine\nA tall tree.")
    for _ in range(2):
        run(tmp_path, [replace(one(tmp_path, "ohwx, A tree."), trigger="ohwx")], "sidecar", mode="append")
        assert path.read_text() == "ohwx, mine\nA tall tree.\n"
    run(tmp_path, [replace(one(tmp_path, "sks, A tree."), trigger="sks")], "sidecar", mode="append")
    assert path.read_text() == "sks, ohwx, mine\nA tall tree.\n"


# What stands there first; what the second run (another prompt) leaves in each mode.
@pytest.mark.parametrize(
    ("mode", "before", "after_first", "after_second"),
    [
        ("skip", None, "one\n", "two\n"),
        ("skip", "", "one\n", "two\n"),
        ("skip", " \r\n", "one\n", "two\n"),
        ("skip", "mine", "mine", "mine"),
        ("skip", *["BMW on a street"] * 3),  # it begins like a picture
        ("overwrite", None, "one\n", "two\n"),
        ("overwrite", "mine", "one\n", "two\n"),
        ("append", None, "one\n", "one\ntwo\n"),
        ("append", "", "one\n", "one\ntwo\n"),
        ("append", "mine", "mine\none\n", "mine\none\ntwo\n"),
        ("append", "mine\r\n", "mine\none\n", "mine\none\ntwo\n"),
        ("prepend", "mine\n", "one\nmine\n", "two\none\nmine\n"),
    ],
)
def test_modes(tmp_path: Path, mode: Mode, before: str | None, after_first: str, after_second: str) -> None:
    path = tmp_path / "a.txt"
    first, second = one(tmp_path, "one"), one(tmp_path, "two", "another?")
    if before is not None:
        path.write_bytes(before.encode())
    for _ in range(2):
        run(tmp_path, [first], "sidecar", mode=mode)
        assert path.read_bytes() == after_first.encode()
    for _ in range(2):
        run(tmp_path, [second], "sidecar", mode=mode)
        assert path.read_bytes() == after_second.encode()


@pytest.mark.parametrize(
    ("mode", "after"),
    [("skip", "edited"), ("overwrite", "two\n"), ("append", "edited\ntwo\n"), ("prepend", "two\nedited\n")],
)
def test_what_a_person_changed_is_the_persons(tmp_path: Path, mode: Mode, after: str) -> None:
    path = tmp_path / "a.txt"
    first, second = one(tmp_path, "one"), one(tmp_path, "two", "another?")
    run(tmp_path, [first], "sidecar", mode=mode)
    for edited in ("", "edited"):
        path.write_text(edited)
        if mode != "overwrite":
            assert run(tmp_path, [first], "sidecar", mode=mode) == [Wants.KEPT]
            assert path.read_text() == edited
    run(tmp_path, [second], "sidecar", mode=mode)
    assert path.read_text() == after
    if mode != "overwrite":
        run(tmp_path, [first], "sidecar", mode=mode)
        assert path.read_text() == after, "a caption is added once, whatever a person did between"


def test_skipping_never_replaces_a_text_that_was_added_to(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("mine")
    run(tmp_path, [one(tmp_path, "one")], "sidecar", mode="append")
    assert run(tmp_path, [one(tmp_path, "two")], "sidecar") == [Wants.KEPT]
    assert path.read_text() == "mine\none\n"


@pytest.mark.parametrize("mode", ["overwrite", "append", "prepend"])
def test_the_original_is_the_persons_text(tmp_path: Path, manifest: Manifest, mode: Mode) -> None:
    """Our own text is never fed back, so the prompt stays the same in every run."""
    path = tmp_path / "a.txt"
    path.write_text("mine, all mine\n")
    sidecars = Sidecars(manifest, ".txt", OutputSettings(mode))
    item = one(tmp_path).item
    for text in ("one", "two"):
        assert sidecars.original(item) == "mine, all mine"
        made = one(tmp_path, text, f"{text}?")
        manifest.finish(made.key, made.caption)
        sidecars.write(made)
    assert sidecars.original(item) == "mine, all mine"
    path.write_text(path.read_text() + "edited")
    assert "edited" in (sidecars.original(item) or "")
    assert "one" not in (sidecars.original(item) or "")
    path.unlink()
    assert sidecars.original(item) is None


def test_a_sidecar_that_vanished_is_written_again(tmp_path: Path) -> None:
    mine = one(tmp_path)
    run(tmp_path, [mine], "sidecar")
    (tmp_path / "a.txt").unlink()
    assert run(tmp_path, [mine], "sidecar") == [Wants.CAPTION]
    assert texts(tmp_path) == {"a.txt": "ours\n"}


@pytest.mark.parametrize("mode", ["skip", "overwrite", "append"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, mode: Mode) -> None:
    records = records_of(tmp_path, ["a.jpg", "b.jpg", "c.jpg"])
    (tmp_path / "a.txt").mkdir()
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "nowhere")
    assert run(tmp_path, records, "sidecar", mode=mode) == [Wants.KEPT] * 3


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "real.txt").write_text("mine")
    (tmp_path / "a.txt").symlink_to(tmp_path / "texts" / "real.txt")
    run(tmp_path, [one(tmp_path)], "sidecar", mode="append")
    assert (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "texts" / "real.txt").read_text() == "mine\nours\n"


def test_a_text_in_another_encoding_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("grün".encode("latin-1"))
    with pytest.raises(CaptioningError, match="UTF-8") as error:
        run(tmp_path, [one(tmp_path)], "sidecar", mode="append")
    assert not isinstance(error.value, OutputError)
    assert (tmp_path / "a.txt").read_bytes() == "grün".encode("latin-1")


def test_one_locked_folder_fails_its_items_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = one(tmp_path)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("qwen35mm.captioning.manifest.files.create", refuse)
    with pytest.raises(CaptioningError, match="can't be written") as error:
        run(tmp_path, [made], "sidecar")
    assert not isinstance(error.value, OutputError)


def test_a_text_that_somebody_wrote_or_changed_is_kept_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts_kept() -> list[str]:
        return [path.read_text() for path in kept(tmp_path)]

    text = tmp_path / "a.txt"
    run(tmp_path, [one(tmp_path)], "sidecar")
    text.write_text("edited")
    os.utime(text, (0, 0))
    for prompt in ("?", "else?"):  # the same work again, and another
        assert run(tmp_path, [one(tmp_path, prompt=prompt)], "sidecar") == [Wants.KEPT]
    assert (text.read_text(), texts_kept()) == ("edited", [])

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    run(tmp_path, [one(tmp_path)], "sidecar", mode="overwrite")
    assert (text.read_text(), texts_kept()) == ("ours\n", ["edited"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".qwen35mm", "a.jpg", "a.txt"], "nothing for trainers"
    # Ours, which nobody changed, leaves nothing.
    run(tmp_path, [one(tmp_path, "new")], "sidecar", mode="overwrite")
    monkeypatch.setattr(os, "link", refuse)
    text.write_text("edited again")
    run(tmp_path, [one(tmp_path)], "sidecar", mode="overwrite")
    assert texts_kept() == ["edited", "edited again"]


def test_an_edit_of_what_was_overwritten_stays_when_the_run_resumes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("mine")
    run(tmp_path, [one(tmp_path)], "sidecar", mode="overwrite")
    text.write_text("mine again")
    for _ in range(2):
        assert run(tmp_path, [one(tmp_path)], "sidecar", mode="overwrite") == [Wants.KEPT]
    assert text.read_text() == "mine again"
    assert [path.read_text() for path in kept(tmp_path)] == ["mine"]
    assert run(tmp_path, [one(tmp_path, "new")], "sidecar", mode="overwrite") == [Wants.CAPTION]
    assert (text.read_text(), len(kept(tmp_path))) == ("new\n", 2)


def test_what_was_added_to_a_persons_text_is_kept_when_both_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    run(tmp_path, [one(tmp_path)], "sidecar", mode="append")
    run(tmp_path, [one(tmp_path, "new")], "sidecar", mode="overwrite")
    (backup,) = kept(tmp_path)
    assert (backup.read_text(), (tmp_path / "a.txt").read_text()) == ("mine\nours\n", "new\n")


def test_a_name_that_is_as_long_as_can_be_has_a_backup_too(tmp_path: Path) -> None:
    made = record(put(tmp_path, f"{'x' * 251}.png", 1), "ours")
    (tmp_path / f"{'x' * 251}.txt").write_text("mine")
    run(tmp_path, [made], "sidecar", mode="overwrite")
    assert [path.read_text() for path in (*kept(tmp_path), tmp_path / f"{'x' * 251}.txt")] == ["mine", "ours\n"]


def test_the_still_and_the_clip_of_a_live_photo_have_texts_of_their_own(tmp_path: Path, manifest: Manifest) -> None:
    still = record(put(tmp_path, "IMG_1.HEIC", 1), "still")
    item = put(tmp_path, "IMG_1.MOV", 2)
    clip = record(Item(item.name, item.source, "video", item.path), "clip")
    sidecars = Sidecars(manifest, ".txt", OutputSettings(video_suffix=".video.txt"))
    for each in (still, clip):
        manifest.finish(each.key, each.caption)
        sidecars.write(each)
        assert sidecars.wants(each.item, each.key) is Wants.DONE
    assert texts(tmp_path) == {"IMG_1.txt": "still\n", "IMG_1.video.txt": "clip\n"}
    (tmp_path / "IMG_1.MOV").unlink()
    sidecars.prune(sidecars.gone())
    assert texts(tmp_path) == {"IMG_1.txt": "still\n"}
