"""Media are read in processes of their own: what a file does to one is that file's failure alone."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.remote.media import encode_medium
from qwen35mm.captioning.items import FileSlice, Item
from qwen35mm.captioning.media.workers import CHANGED, Failed, Inspected, MediaWorkers, Prepared, inspect, prepare
from qwen35mm.contract import EncodedMedium, Image
from qwen35mm.decoding import process
from qwen35mm_preprocess import MediaError, MediaProcessor, PreparedMedia
from tests import hostile_decoder
from tests.captioning.fake_model import picture
from tests.children import environment

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path())


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[MediaWorkers]:
    monkeypatch.setattr(process, "_COMMAND", hostile_decoder.COMMAND)
    made = MediaWorkers(PROCESSOR, 1, timeout_s=60.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two() -> Iterator[MediaWorkers]:
    made = MediaWorkers(PROCESSOR, 2)
    yield made
    made.close()


def item(folder: Path, name: str = "a.png", seed: int = 0) -> Item:
    path = folder / name
    picture(seed).save(path)
    return Item(name, path, "image", path)


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


async def look(made: MediaWorkers, each: Item) -> Inspected | Failed:
    return await made.inspect(each, with_digest=True, with_plan=False)


def kind_of(read: Inspected | Prepared | Failed) -> str | None:
    """Why reading failed; None where it didn't."""
    return read.kind if isinstance(read, Failed) else None


async def test_a_look_and_a_decoding(two: MediaWorkers, tmp_path: Path) -> None:
    each = item(tmp_path)
    assert each.path is not None
    seen = await two.inspect(each, with_digest=True, with_plan=True)
    assert isinstance(seen, Inspected)
    assert (seen.digest, seen.plan) == (digest(each.path), PROCESSOR.plan(each.path))
    assert seen.status is not None
    decoded = await two.prepare(each, digest(each.path), "pixels", with_similarity=True)
    assert isinstance(decoded, Prepared)
    assert isinstance(decoded.medium, PreparedMedia)
    expected = PROCESSOR.prepare(each.path)
    assert np.array_equal(decoded.medium.pixel_values, expected.pixel_values)
    assert decoded.medium.plan == expected.plan
    assert decoded.similarity is not None


async def test_a_medium_for_a_server(two: MediaWorkers, tmp_path: Path) -> None:
    each = item(tmp_path)
    assert each.path is not None
    encoded = await two.prepare(each, digest(each.path), "frames")
    expected = encode_medium(Image(each.path), PROCESSOR, "frames")
    assert isinstance(encoded, Prepared)
    assert isinstance(encoded.medium, EncodedMedium)
    assert (encoded.medium.parts, encoded.medium.plan, encoded.medium.warnings) == (expected.parts, expected.plan, ())
    assert await two.prepare(each, bytes(32), "frames") == CHANGED


def test_a_process_that_reads_media_loads_no_model() -> None:
    code = (
        "import sys, qwen35mm.captioning.media.workers, qwen35mm.backends.remote.media; "
        "print({'torch', 'httpx', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "set()\n"


async def test_bytes_and_slices_of_files(two: MediaWorkers, tmp_path: Path) -> None:
    data = (asset_path("samples") / "one-shape.png").read_bytes()
    (tmp_path / "box").write_bytes(b"before" + data + b"after")
    for source in (data, FileSlice(tmp_path / "box", 6, len(data))):
        seen = await two.inspect(Item("x", source, "image"), with_digest=True, with_plan=True)
        assert isinstance(seen, Inspected)
        assert seen.digest is not None
        assert (seen.digest, seen.status) == (hashlib.sha256(data).digest(), None)
        decoded = await two.prepare(Item("x", source, "image"), seen.digest, "pixels")
        assert isinstance(decoded, Prepared)
        assert decoded.medium.plan == PROCESSOR.prepare(data).plan


async def test_a_file_that_changed_or_went_is_its_own_failure(two: MediaWorkers, tmp_path: Path) -> None:
    each = item(tmp_path)
    assert each.path is not None
    before = digest(each.path)
    item(tmp_path, seed=1)
    assert await two.prepare(each, before, "pixels") == CHANGED
    each.path.unlink()
    for reading in (look(two, each), two.prepare(each, before, "pixels")):
        assert kind_of(await reading) == "unreadable"
    shutil.copy(asset_path("samples") / "moves-right.mp4", tmp_path / "cut.mp4")
    with (tmp_path / "cut.mp4").open("r+b") as file:
        file.truncate(900)
    cut = await two.inspect(Item("cut.mp4", tmp_path / "cut.mp4", "video"), with_digest=True, with_plan=True)
    assert kind_of(cut) == "damaged"


async def test_a_process_that_dies_or_never_ends_takes_nobody_along(
    hostile: MediaWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a.png", "-crash-.png", "-stuck-.png", "b.png", "c.png")
    first, crashing, stuck, *others = [item(tmp_path, each, seed) for seed, each in enumerate(names)]
    assert isinstance(await look(hostile, first), Inspected)
    assert kind_of(await look(hostile, crashing)) == "crash"
    assert isinstance(await look(hostile, first), Inspected)
    with monkeypatch.context() as patch:
        patch.setattr(hostile._decoders, "_timeout_s", 0.3)
        assert kind_of(await look(hostile, stuck)) == "timeout"
    for seen in await asyncio.gather(*(look(hostile, each) for each in others)):
        assert isinstance(seen, Inspected)


def test_a_file_is_opened_once_by_what_decodes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is hashed is what is decoded, and its messages have the file's name."""
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: opened.append(self) or real(self, *args, **kwargs))
    each = item(tmp_path)
    content = digest(tmp_path / "a.png")
    opened.clear()
    assert isinstance(prepare(each, PROCESSOR, digest=content, form="pixels", with_similarity=True), Prepared)
    assert opened == [tmp_path / "a.png"]
    opened.clear()
    inspect(each, PROCESSOR, with_digest=True, with_plan=True)
    assert opened == [tmp_path / "a.png"]
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(MediaError, match=r"'a\.png'"):
        prepare(each, PROCESSOR, digest=digest(tmp_path / "a.png"), form="pixels", with_similarity=False)


async def test_closing_ends_the_processes(tmp_path: Path) -> None:
    made = MediaWorkers(PROCESSOR, 2)
    before = {child.pid for child in psutil.Process().children()}
    await asyncio.gather(*(look(made, item(tmp_path, f"{n}.png", n)) for n in range(6)))
    started = [child for child in psutil.Process().children() if child.pid not in before]
    assert 1 <= len(started) <= 2
    made.close()
    assert not any(child.is_running() for child in started)


async def test_where_no_process_can_be_started_each_item_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_COMMAND", (str(tmp_path / "no such program"),))
    made = MediaWorkers(PROCESSOR, 1)
    assert kind_of(await look(made, item(tmp_path))) == "worker"
    made.close()
