"""The processor's abilities, with a PyTorch that lists them and with one that doesn't yet; and how many threads."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from qwen35mm.cpu import cpu_capabilities, set_num_threads, usable_cores


@pytest.mark.parametrize("has_amx", [False, True])
def test_an_older_torch_is_asked_one_by_one(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert cpu_capabilities() == {"amx_bf16": has_amx, "avx512_bf16": False}


def test_a_newer_torch_lists_more() -> None:
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this PyTorch has no list")
    assert cpu_capabilities() == dict(torch.cpu.get_capabilities())


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def pairs(number: int) -> str:
    """As Linux names a core's two hyperthreads on a machine with 64 cores."""
    return f"{number % 64},{number % 64 + 64}\n"


@pytest.mark.parametrize(
    ("allowed", "siblings", "groups", "cores"),
    [
        pytest.param({0}, str, {}, 1, id="one core"),
        pytest.param({0, 1}, str, {}, 2, id="two cores"),
        pytest.param({0, 1}, lambda number: "0-1\n", {}, 1, id="two hyperthreads of one core"),
        pytest.param(set(range(128)), pairs, {}, 64, id="64 cores, 128 hyperthreads"),
        pytest.param(set(range(60, 70)), pairs, {}, 10, id="some of them, no two of one core"),
        pytest.param({3, 67, 4}, pairs, {}, 2, id="taskset"),
        pytest.param(set(range(64)), str, {"a/b/cpu.max": "200000 100000\n"}, 2, id="a container's two of 64"),
        pytest.param(set(range(64)), str, {"a/b/cpu.max": "150000 100000\n"}, 2, id="one and a half"),
        pytest.param(set(range(64)), str, {"a/cpu.max": "1000 100000", "a/b/cpu.max": "max 100000"}, 1, id="above"),
        pytest.param({0, 1}, str, {"cpu.max": "6400000 100000"}, 2, id="more than there are"),
        pytest.param({0, 1}, str, {"cpu.max": "max 100000"}, 2, id="no limit"),
        pytest.param({0, 1}, str, {"cpu.max": "100000 0"}, 2, id="damaged"),
        pytest.param(
            set(range(8)),
            str,
            {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3,
            id="version 1",
        ),
        pytest.param(
            set(range(8)), str, {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 8, id="-1"
        ),
    ],
)
def test_cores_that_may_be_used(allowed, siblings, groups, cores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
    write(tmp_path, {f"cpus/cpu{n}/topology/thread_siblings_list": siblings(n) for n in allowed})
    write(tmp_path, {f"groups/{name}": text for name, text in groups.items()})
    write(tmp_path, {"own": "4:cpu,cpuacct:/a\n0::/a/b\n"})
    assert usable_cores(tmp_path / "cpus", tmp_path / "groups", tmp_path / "own") == cores


def test_cores_where_the_system_tells_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for counted, cores in ((8, 8), (None, 16)):
        monkeypatch.setattr(psutil, "cpu_count", lambda logical, counted=counted: counted)
        assert usable_cores(tmp_path, tmp_path, tmp_path / "own") == cores


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """PyTorch with eight threads, on a machine with as many cores as the test says."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield lambda cores: monkeypatch.setattr("qwen35mm.cpu.usable_cores", lambda: cores)
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (8, 8), (64, 8)])
def test_threads_are_as_many_as_cores_and_no_more_than_pytorch_takes(cores: int, expected: int, threads) -> None:
    threads(cores)
    assert set_num_threads(None) == torch.get_num_threads() == expected


def test_what_a_user_says_wins(threads, monkeypatch: pytest.MonkeyPatch) -> None:
    threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert set_num_threads(None) == 8
    assert set_num_threads(3) == torch.get_num_threads() == 3
