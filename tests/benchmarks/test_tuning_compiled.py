"""Candidates compiled side by side, for cards that aren't here."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks.kernel_cases import SHAPES
from benchmarks.tune_kernels import by_shape, compile_all, compiles
from benchmarks.tuning_compile import processes
from benchmarks.tuning_spaces import SPACES, Workload
from qwen35mm_kernels.gpu.tables import Config


def compiling(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int) -> ProcessPoolExecutor:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    return processes(capability, 2)


@pytest.mark.slow
def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, good, bad = ("rms_norm", "D1024"), Config({"BLOCK_ROWS": 4}, 8, 1), Config({"BLOCK_ROWS": 3}, 8, 1)
    with compiling(monkeypatch, tmp_path, 90) as pool:
        compiled, failed = compile_all(pool, key, [good, bad], [Workload("rms_norm", SHAPES["0.8B"], (4,))], {})
    assert compiled == [good]
    ((config, reason),) = failed
    assert config == bad
    assert "doesn't compile" in str(reason)
    # What the card's own process will look for.
    assert len(list(tmp_path.rglob("_rms_norm_kernel.cubin"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_candidate_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failures = []
    with compiling(monkeypatch, tmp_path, capability) as pool, torch.inference_mode():
        for kernel, space in SPACES.items():
            if not compiles(kernel, capability):
                continue
            # The mixture has every kernel.
            shapes = by_shape(kernel, [SHAPES["35B-A3B"]], {}, "meta")
            assert shapes
            for shape, (default, workloads) in shapes.items():
                candidates = [default, *space.candidates(shape, default)]
                failures += compile_all(pool, (kernel, shape), candidates, workloads[-1:], {})[1]
    assert failures == []
