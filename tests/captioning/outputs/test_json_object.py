"""JSON files with several captions of a medium, read by the rules of diffusion-pipe and ai-toolkit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import OutputSettings, Wants, open_outputs, parse_output
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError
from tests.captioning.kills import killed_at, needs_fork, stops
from tests.captioning.outputs.helpers import caption, kept, leftovers, put, record, run

NAMES = ("a.jpg", "b.png", "cats/a.jpg", "cats/ü.png")


def diffusion_pipe(folder: Path) -> dict[str, list[str]]:
    """tdrussell/diffusion-pipe, utils/dataset.py: a file of the folder itself, by its name, has a list."""
    found = json.loads((folder / "captions.json").read_text("ascii"))
    assert all(isinstance(captions, list) for captions in found.values())
    assert {path.name for path in folder.glob("*") if path.suffix in (".jpg", ".png")} >= found.keys()
    return found


def ai_toolkit(path: Path) -> dict[str, tuple[str, str | None]]:
    """ostris/ai-toolkit, toolkit/dataloader_mixins.py: caption and short caption, by the path that is opened."""
    found = json.loads(path.read_text("ascii"))
    assert all(Path(name).is_file() for name in found)
    return {name: (value["caption"], value.get("caption_short")) for name, value in found.items()}


def several(item: Item, text: str) -> Record:
    made = record(item, text)
    return replace(made, caption=caption(text, others={"short": f"{text} short\nindeed"}))


def records_of(folder: Path, text: str = "one", names: Sequence[str] = NAMES) -> list[Record]:
    return [several(put(folder, name, NAMES.index(name)), f"{text} {NAMES.index(name)}") for name in names]


def test_each_folder_has_the_captions_of_its_files(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    assert run(tmp_path, records, "diffusion-pipe") == [Wants.CAPTION] * 4
    assert diffusion_pipe(tmp_path) == {
        f"{name}": [f"one {n}", f"one {n} short\nindeed"] for n, name in enumerate(NAMES[:2])
    }
    assert diffusion_pipe(tmp_path / "cats").keys() == {"a.jpg", "ü.png"}
    # Another caption changes its own folder's file alone.
    other = (tmp_path / "cats" / "captions.json").stat().st_mtime_ns
    assert run(tmp_path, [*records_of(tmp_path, "two", NAMES[:1]), *records[1:]], "diffusion-pipe") == [
        Wants.CAPTION,
        *[Wants.DONE] * 3,
    ]
    assert diffusion_pipe(tmp_path)["a.jpg"][0] == "two 0"
    assert (tmp_path / "cats" / "captions.json").stat().st_mtime_ns == other
    # Of a deleted file, nothing stays.
    (tmp_path / "cats" / "a.jpg").unlink()
    run(tmp_path, records[1:2], "diffusion-pipe", prune=True)
    assert diffusion_pipe(tmp_path / "cats").keys() == {"ü.png"}


def test_ai_toolkit_has_a_short_caption_beside_the_other(tmp_path: Path) -> None:
    manifest, path = Manifest.open(tmp_path / ".qwen35mm" / "manifest.sqlite"), tmp_path / "all.json"
    for styles in (("long", "short"), ("short", "long")):
        (output,) = open_outputs([parse_output(f"ai-toolkit:{path}")], manifest, OutputSettings(styles=styles))
        made = record(put(tmp_path, "a.jpg", 1), "long" if styles[0] == "long" else "short")
        made = replace(made, caption=caption(styles[0], others={styles[1]: styles[1]}))
        manifest.finish(made.key, made.caption)
        output.write(made)
        output.finish()
        output.close()
        assert ai_toolkit(path) == {str(tmp_path / "a.jpg"): ("long", "short")}
    for styles in (("tags", "long"), ("tags", "long", "short")):
        with pytest.raises(CaptioningError, match=rf"name one of them 'short', .* got {', '.join(styles)}\."):
            open_outputs([parse_output(f"ai-toolkit:{path}")], manifest, OutputSettings(styles=styles))
    with pytest.raises(CaptioningError, match=r"ends in \.json, got"):
        open_outputs([parse_output("ai-toolkit:a.jsonl")], manifest, OutputSettings())
    manifest.close()


@pytest.mark.parametrize("spec", ["diffusion-pipe", "ai-toolkit:{}/captions.json"])
def test_somebodys_file_is_not_lost(tmp_path: Path, spec: str) -> None:
    path, spec = tmp_path / "captions.json", spec.format(tmp_path)
    path.write_text('{"mine": []}')
    (one,) = records_of(tmp_path, names=NAMES[:1])
    for mode in ("skip", "append"):
        with pytest.raises(CaptioningError, match="not written by this run"):
            run(tmp_path, [one], spec, mode=mode)
    run(tmp_path, [one], spec, mode="overwrite")
    written = path.read_text()
    assert [each.read_text() for each in kept(tmp_path)] == ['{"mine": []}']
    for changed in ('{"mine": []}', ""):
        path.write_text(changed)
        assert run(tmp_path, [one], spec) == [Wants.DONE]
        assert (path.read_text(), kept(tmp_path)[-1].read_text()) == (written, changed)
    path.unlink()
    run(tmp_path, [], spec)
    assert path.read_text() == written


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    inside = record(Item("rows.parquet/0.png", put(tmp_path, "a.png", 1).path or b"", "image"), "In a container.")
    with pytest.raises(CaptioningError, match="no file of its own"):
        run(tmp_path, [inside], "diffusion-pipe")
    with pytest.raises(CaptioningError, match="An output must be one of"):
        parse_output("diffusion-pipe:folder")


@needs_fork
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_loses_and_doubles_nothing(tmp_path: Path, stride: int) -> None:
    """Also in a run over another's file: a trainer finds a whole file at any time."""
    media, begun = tmp_path / "media", tmp_path / "begun"
    old, new = records_of(media, names=NAMES[:3]), records_of(media, "two")
    run(media, old, "diffusion-pipe")
    shutil.copytree(media, begun)
    expected = None

    def go() -> list[Wants]:
        return run(media, [old[0], *new[1:]], "diffusion-pipe")

    for step, torn_bytes in stops(stride):
        shutil.rmtree(media)
        shutil.copytree(begun, media)
        was_killed = killed_at(step, go, torn_bytes=torn_bytes)
        assert diffusion_pipe(media).keys() == {"a.jpg", "b.png"}
        go()
        found = diffusion_pipe(media), diffusion_pipe(media / "cats")
        expected = expected or found
        assert (found, go(), leftovers(media), kept(media)) == (expected, [Wants.DONE] * 4, [], [])
        if not was_killed:
            break
    assert step > 10
    assert expected is not None
    assert [len(captions) for each in expected for captions in each.values()] == [2] * 4
