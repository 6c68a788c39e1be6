"""A download's progress in words, by a clock of the test's own."""

from __future__ import annotations

import pytest

from qwen35mm.web.serving.progress import DownloadProgress
from qwen35mm_preprocess.say import english

MIB = 1 << 20
TOTAL = 4096 * MIB


class Told:
    """A download of 4 GiB, `MIB` bytes a step."""

    def __init__(self, start: int = 0) -> None:
        self.now, self.done = 0.0, start
        self.progress = DownloadProgress(lambda: self.now)
        self.progress.report(self.done, TOTAL)

    def run(self, seconds: int, mib_per_s: int) -> None:
        for _ in range(8 * seconds):
            self.now += 1 / 8
            self.done += mib_per_s * MIB // 8
            self.progress.report(self.done, TOTAL)

    @property
    def words(self) -> str:
        return english(self.progress.describe()["detail"])


def test_nothing_is_said_before_the_size_is_known() -> None:
    assert DownloadProgress(lambda: 0.0).describe() == {"detail": "", "share": None}


def test_the_speed_is_that_of_bytes_that_came_now_and_lately() -> None:
    """What an earlier download brought counts as here, and as no speed."""
    told = Told(start=2048 * MIB)
    assert told.words == "2.0 GiB of 4.0 GiB"
    assert told.progress.describe()["share"] == 0.5
    told.run(20, mib_per_s=10)
    assert told.words == "2.2 GiB of 4.0 GiB · 10 MiB/s · 3 minutes left"
    told.run(20, mib_per_s=1)
    assert told.words.endswith(" · 1.0 MiB/s · 30 minutes left")


def test_a_break_is_said_and_the_speed_after_it_is_the_new_one() -> None:
    told = Told()
    told.run(10, mib_per_s=10)
    told.now += 60
    assert told.words == "100 MiB of 4.0 GiB · waiting for the network"
    told.run(12, mib_per_s=50)
    assert told.words.endswith(" · 50 MiB/s · 1 minute left")


@pytest.mark.parametrize(
    ("mib_per_s", "left"),
    [(400, "less than a minute left"), (60, "1 minute left"), (30, "2 minutes left"), (1, "68 minutes left")],
)
def test_the_time_left(mib_per_s: int, left: str) -> None:
    told = Told(start=24 * MIB)
    told.run(2, mib_per_s)
    assert told.words.endswith(f" · {left}")


def test_a_slow_download_takes_hours() -> None:
    told = Told()
    for _ in range(4):
        told.now += 1
        told.done += MIB // 4
        told.progress.report(told.done, TOTAL)
    assert told.words.endswith(" · 256 KiB/s · 5 hours left")
