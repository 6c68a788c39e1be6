"""Media are read in processes of their own: what a file does to one is that file's failure alone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.decoding import Answer, Decoders, DecodingProcessor, asked_by, process
from qwen35mm.decoding.decoders import timeout_for
from qwen35mm.decoding.processor import check_picture_by
from qwen35mm.errors import DecoderCrashError, DecoderTimeoutError, EngineError, RequestError
from qwen35mm.pools import Asker
from qwen35mm_preprocess import MediaError, MediaFormatError, MediaLimitError, MediaLimits, MediaProcessor
from tests import hostile_decoder
from tests.children import ROOT, environment
from tests.preprocess.media_files import encode_image

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path())
PICTURE = (asset_path("samples") / "one-shape.png").read_bytes()
CLIP = (asset_path("samples") / "moves-right.mp4").read_bytes()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DecodingProcessor]]:
    """Processors whose decoders do what a medium's last bytes say."""
    monkeypatch.setattr(process, "_COMMAND", hostile_decoder.COMMAND)
    made: list[Decoders] = []

    def decoding(limits: MediaLimits | None = None, **options: Any) -> DecodingProcessor:
        made.append(Decoders(limits, **options))
        return DecodingProcessor.of(replace(PROCESSOR, limits=limits or PROCESSOR.limits), made[-1])

    yield decoding
    for each in made:
        each.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_process_that_dies_or_never_ends_takes_nobody_along(make: Callable[..., DecodingProcessor]) -> None:
    others, hostile = make(), make()
    expected = PROCESSOR.prepare(PICTURE).plan
    for what, error, words in (
        (hostile_decoder.CRASH, DecoderCrashError, "The decoder broke down over the uploaded data"),
        (hostile_decoder.NONSENSE, DecoderCrashError, "The decoder broke down over the uploaded data"),
        (hostile_decoder.STUCK, DecoderTimeoutError, "Reading the uploaded data took too long, and was ended"),
    ):
        # What was ended is replaced.
        assert hostile.prepare(PICTURE).plan == expected
        hostile.decoders._timeout_s = 0.5 if error is DecoderTimeoutError else None
        with ThreadPoolExecutor(1) as threads:
            bad = threads.submit(hostile.prepare, PICTURE + what)
            for _ in range(3):
                assert others.prepare(PICTURE).plan == expected
            with pytest.raises(error, match=words):
                bad.result()
    hostile.decoders._timeout_s = None
    assert hostile.prepare(PICTURE).plan == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds what is mapped against RLIMIT_DATA")
def test_a_process_takes_no_more_memory_than_its_media_may(make: Callable[..., DecodingProcessor]) -> None:
    media = make(MediaLimits(max_source_pixels=1_000_000, max_image_bytes=1 << 20, max_video_bytes=1 << 20))
    with pytest.raises(MediaLimitError, match="takes more memory than there is for one file"):
        media.prepare(PICTURE + hostile_decoder.BOMB)
    assert media.prepare(PICTURE).plan == PROCESSOR.prepare(PICTURE).plan


def test_the_memory_of_a_large_picture_is_not_the_parents(decoders: Decoders) -> None:
    """10 kB are 64 million pixels."""
    from PIL import Image

    data = encode_image(Image.new("1", (8_000, 8_000)), "PNG")

    def growth(media: MediaProcessor) -> int:
        own, most, is_done = psutil.Process(), 0, threading.Event()
        before = own.memory_info().rss

        def watch() -> None:
            nonlocal most
            while not is_done.wait(0.002):
                most = max(most, own.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        check_picture_by(media, data)
        is_done.set()
        watching.join()
        return most - before

    assert growth(DecodingProcessor.of(PROCESSOR, decoders)) < 32 << 20
    assert growth(PROCESSOR) > 128 << 20, "then this test would tell nothing"


def test_what_is_refused_is_refused_in_the_same_words(decoders: Decoders, tmp_path: Path) -> None:
    media = DecodingProcessor.of(PROCESSOR, decoders)
    (tmp_path / "a.png").write_bytes(PICTURE[:200])
    for source in (b"no medium", tmp_path / "a.png", tmp_path / "none.png", b"", "data:image/png;base64,AAAA"):
        told = []
        for each in (PROCESSOR, media):
            with pytest.raises(MediaError) as caught:
                each.prepare(source)
            told.append((type(caught.value), caught.value.args))
        assert told[0] == told[1]


def test_an_asker_who_leaves_ends_the_work(make: Callable[..., DecodingProcessor]) -> None:
    media, asker = make(), Asker()
    media.prepare(PICTURE)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(asked_by(media, asker).prepare, PICTURE + hostile_decoder.STUCK)
        while not media.decoders._state.busy:
            time.sleep(0.01)
        asker.leave()
        with pytest.raises(RequestError, match="Nobody waits"):
            stuck.result(60)
    assert media.prepare(PICTURE).plan == PROCESSOR.prepare(PICTURE).plan


def test_an_asker_or_a_clock_that_is_late_ends_nobody_elses_work(decoders: Decoders) -> None:
    media, asker = DecodingProcessor.of(PROCESSOR, decoders), Asker()
    asked_by(media, asker).prepare(PICTURE)
    (used, _) = decoders._state.idle[-1]
    done = used._work
    assert done is None
    asker.leave()
    used._end_work(process.Work(lambda: Answer(), (), "before", PROCESSOR.limits, 1.0, False), "clock")
    before = children()
    media.prepare(PICTURE)
    assert children() == before


def test_what_its_caller_raises_ends_the_work(decoders: Decoders) -> None:
    media = DecodingProcessor.of(PROCESSOR, decoders)

    def progress(done: int, total: int) -> None:
        raise MediaLimitError("too slow")

    with pytest.raises(MediaLimitError, match="too slow"):
        media.prepare(CLIP, progress=progress)
    steps: list[tuple[int, ...]] = []
    expected: list[tuple[int, ...]] = []
    PROCESSOR.prepare(CLIP, progress=lambda *step: expected.append(step))
    media.prepare(CLIP, progress=lambda *step: steps.append(step))
    assert steps == expected != []


def test_what_a_library_prints_does_not_come_between(make: Callable[..., DecodingProcessor]) -> None:
    assert make().plan(PICTURE + hostile_decoder.CHATTY) == PROCESSOR.plan(PICTURE)


def test_what_libraries_say_goes_to_the_log_with_the_files_name(
    tmp_path: Path, decoders: Decoders, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """libtiff and FFmpeg write to the standard error themselves."""
    from tests.captioning.fake_model import picture

    picture(0).resize((300, 300)).save(tmp_path / "cut.tif", compression="tiff_lzw")
    data = bytearray((tmp_path / "cut.tif").read_bytes())
    data[400:1200] = bytes(800)
    (tmp_path / "cut.tif").write_bytes(data)
    clip = bytearray(CLIP)
    at = clip.index(b"mdat") + 100
    clip[at : at + 2000] = bytes(2000)
    (tmp_path / "cut.mp4").write_bytes(clip)
    media = DecodingProcessor.of(PROCESSOR, decoders)
    with caplog.at_level(logging.INFO, "qwen35mm.decoding"):
        for name in ("cut.tif", "cut.mp4"):
            with suppress(MediaError):
                media.prepare(tmp_path / name)
    assert {record.getMessage().split(": ")[0] for record in caplog.records} == {"'cut.tif'", "'cut.mp4'"}
    assert any("LZW" in record.getMessage() for record in caplog.records)
    assert max(record.getMessage().count("\n") for record in caplog.records) == 0
    assert capfd.readouterr().err == ""


def test_processes_are_used_again() -> None:
    before = children()
    with closing(Decoders(idle_s=600, most_idle=1)) as decoders:
        media = DecodingProcessor.of(PROCESSOR, decoders)
        media.plan(PICTURE)
        first = children() - before
        media.plan(PICTURE)
        assert children() - before == first
        assert len(first) == 1
        with ThreadPoolExecutor(2) as threads:
            for plan in [threads.submit(media.plan, PICTURE) for _ in range(4)]:
                plan.result()
        assert len(children() - before) <= 1
    assert not children() - before
    with pytest.raises(EngineError, match="ending"):
        media.plan(PICTURE)


def test_processes_end_when_nobody_needs_them() -> None:
    before = children()
    with closing(Decoders(idle_s=0.05)) as decoders:
        media = DecodingProcessor.of(PROCESSOR, decoders)
        for _ in range(2):
            assert media.plan(PICTURE) == PROCESSOR.plan(PICTURE)
            limit_s = time.monotonic() + 60
            while children() - before:
                assert time.monotonic() < limit_s
                time.sleep(0.05)


def test_the_current_folder_has_no_modules_for_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a downloaded one."""
    for name in ("json", "typing", "qwen35mm"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr(sys, "path", [path or str(Path.cwd()) for path in sys.path])
    monkeypatch.chdir(tmp_path)
    with closing(Decoders()) as decoders:
        assert DecodingProcessor.of(PROCESSOR, decoders).plan(PICTURE) == PROCESSOR.plan(PICTURE)
    assert not (tmp_path / "ran").exists()


def test_what_a_parent_finds_in_the_current_folder_a_decoder_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if Path(path) != ROOT)])
    monkeypatch.chdir(ROOT)
    with closing(Decoders()) as decoders:
        assert DecodingProcessor.of(PROCESSOR, decoders).plan(PICTURE) == PROCESSOR.plan(PICTURE)


def test_closing_waits_for_no_decoder_that_is_stuck(make: Callable[..., DecodingProcessor]) -> None:
    media = make()
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(media.plan, PICTURE + hostile_decoder.STUCK)
        while not media.decoders._state.busy:
            time.sleep(0.01)
        # It would be given up after a minute: then as one that took too long.
        media.decoders.close()
        with pytest.raises(DecoderCrashError):
            stuck.result(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the parent that is killed is made by a fork")
def test_a_decoder_does_not_outlive_a_parent_that_was_killed(make: Callable[..., DecodingProcessor]) -> None:
    """Not even one that is stuck; nor one that doesn't let it see that, once its time is over."""
    begun, says_begun = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            # Its own clock would end the last one first.
            setattr(process.Process, "_end_work", lambda *_: None)  # noqa: B010
            made = {b"": make(), hostile_decoder.STUCK: make()}
            # The child's clock allows five seconds more.
            made[hostile_decoder.RUDE] = make(timeout_s=-1.0)
            for what, media in made.items():
                media.plan(PICTURE)
                if what:
                    threading.Thread(target=media.plan, args=(PICTURE + what,)).start()
            os.write(says_begun, b"1")
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(says_begun)  # else a parent that failed would be waited for
    assert os.read(begun, 1) == b"1"
    found = psutil.Process(parent).children()
    assert len(found) == 3
    time.sleep(0.5)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive
    os.close(begun)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks there")
def test_a_fork_has_decoders_of_its_own(decoders: Decoders) -> None:
    media = DecodingProcessor.of(PROCESSOR, decoders)
    media.plan(PICTURE)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, b"1" if media.plan(PICTURE).kind == "image" else b"0")
            decoders.close()
        finally:
            os._exit(0)
    assert os.read(reads, 1) == b"1"
    os.waitpid(child, 0)
    os.close(reads)
    os.close(writes)
    assert media.plan(PICTURE) == PROCESSOR.plan(PICTURE)


def test_where_no_process_can_be_started_each_medium_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_COMMAND", (str(tmp_path / "no such program"),))
    with closing(Decoders()) as decoders, pytest.raises(EngineError, match="No process could be started"):
        DecodingProcessor.of(PROCESSOR, decoders).plan(PICTURE)


def test_a_process_that_reads_media_loads_no_model_and_knows_no_keys(
    monkeypatch: pytest.MonkeyPatch, decoders: Decoders
) -> None:
    code = (
        "import sys, qwen35mm.decoding.child, qwen35mm.decoding.processor, qwen35mm.chat.media.thumbnails; "
        "print({'torch', 'httpx', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "set()\n"
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("QWEN35MM_BACKEND_KEY", "secret")
    started = process.Process()
    try:
        assert "secret" not in psutil.Process(started._child.pid).environ().values()
    finally:
        started.kill()
        started.end()


def test_the_time_of_a_medium_follows_from_its_limits() -> None:
    limits = MediaLimits(max_duration_s=4 * 3600.0)
    assert (timeout_for(0, limits), timeout_for(60 << 20, limits)) == (60, 120)
    assert timeout_for(0, limits, reads_video=True) == 600
    assert timeout_for(0, replace(limits, max_duration_s=600.0), reads_video=True) == 60
    assert timeout_for(0, limits, least_s=120) == 120


def test_what_no_process_knows_is_told(decoders: Decoders) -> None:
    """A processor that reads text alone refuses before a process is asked."""
    blind = DecodingProcessor.of(replace(PROCESSOR, blind="Text-1B"), decoders)
    with pytest.raises(MediaError, match="reads text alone"):
        blind.plan(PICTURE)
    with pytest.raises(MediaFormatError):
        DecodingProcessor.of(PROCESSOR, decoders).plan(b"text")
