from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import StorageError
from qwen35mm.web.serving.people import People
from qwen35mm.web.serving.tidying import keep_tidy, tidy
from tests.chat.chat_kit import PICTURE, ChatKit
from tests.chat.helpers import create
from tests.web.serving.page_client import showing


@pytest.fixture
def kit(tmp_path: Path) -> ChatKit:
    return ChatKit(tmp_path)


def age(kit: ChatKit, digest: str, seconds: float) -> None:
    then_s = time.time() - seconds
    os.utime(kit.store.media.path(digest), (then_s, then_s))


def add(kit: ChatKit) -> str:
    with PICTURE.open("rb") as file:
        return kit.store.media.add(file, max_bytes=1 << 30)[0]


@pytest.mark.parametrize(
    ("forget_after_s", "age_s", "stays"),
    [(1800.0, 5, True), (1800.0, 100, False), (None, 100, True), (None, 4000, False)],
)
def test_an_upload_is_not_deleted_before_it_is_held(
    kit: ChatKit, forget_after_s: float | None, age_s: float, stays: bool
) -> None:
    digest = add(kit)
    age(kit, digest, age_s)
    tidy(kit.store, People(shared=True), forget_after_s)
    assert (digest in kit.store.media) is stays


def test_people_who_are_gone_are_forgotten(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("qwen35mm.web.serving.people.time.monotonic", lambda: now_s)
    people = People(shared=True)
    gone, here = (people.asking(showing(key * 32)) for key in "01")
    assert gone is not None
    assert here is not None
    for person in (gone, here):
        create(kit.store, person.owner)
    picture = kit.attach(PICTURE, gone)
    age(kit, picture.digest, 100)
    now_s = 2000.0
    people.asking(showing("1" * 32))
    tidy(kit.store, people, None)
    assert len(kit.store.find(gone.owner)) == 1
    tidy(kit.store, people, 1800.0)
    assert (kit.store.find(gone.owner), len(kit.store.find(here.owner))) == ([], 1)
    assert picture.digest not in kit.store.media


def test_a_failing_disk_is_a_line_in_the_log(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> int:
        raise StorageError("The disk fails.")

    monkeypatch.setattr(kit.store.media, "collect_garbage", fail)
    with caplog.at_level(logging.WARNING, "qwen35mm.web.serving.tidying"):
        tidy(kit.store, People(shared=False), None)
    assert "The disk fails." in caplog.text


def test_it_is_done_again_and_again_until_the_end(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = threading.Semaphore(0)
    monkeypatch.setattr(kit.store.media, "collect_garbage", lambda **_: twice.release())
    before = threading.active_count()
    with keep_tidy(kit.store, People(shared=False), forget_after_s=None, interval_s=0.001):
        for _ in range(2):
            assert twice.acquire(timeout=60)
    assert threading.active_count() == before
