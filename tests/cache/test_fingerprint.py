"""The root: equal for equal arithmetic, and another one for whatever could change a bit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import qwen35mm
from qwen35mm.cache.fingerprint import arithmetic, fingerprint, sources_digest

# By its full name: the package exports a function of the same name.
module = importlib.import_module("qwen35mm.cache.fingerprint")
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def test_equal_parts_have_equal_fingerprints_and_others_another():
    parts = {"a": 1, "b": [1.5, None, {"c": "x", "d": True}]}
    assert len(fingerprint(parts)) == 32
    assert fingerprint({"b": [1.5, None, {"d": True, "c": "x"}], "a": 1}) == fingerprint(parts)
    others = [{}, {**parts, "a": "1"}, {**parts, "e": None}, {**parts, "b": [None, 1.5]}, {"b": parts["b"], "A": 1}]
    assert len({fingerprint(each) for each in (parts, *others)}) == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.bfloat16, b"bytes"])
def test_what_has_no_json_form_is_refused(value):
    with pytest.raises((TypeError, ValueError)):
        fingerprint({"part": value})


def test_the_arithmetic_is_stable_and_has_json_form():
    assert fingerprint(arithmetic([CPU], BF16)) == fingerprint(json.loads(json.dumps(arithmetic([CPU], BF16))))
    assert arithmetic([CPU], BF16) != arithmetic([CPU], torch.float32)


@pytest.fixture
def changed():
    """Whether the arithmetic's fingerprint is another one than when the test began."""
    before = fingerprint(arithmetic([CPU], BF16))
    return lambda: fingerprint(arithmetic([CPU], BF16)) != before


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("torch.get_num_threads", lambda: 99),
        ("torch.get_float32_matmul_precision", lambda: "medium"),
        ("torch.cpu.get_capabilities", lambda: {"avx2": True}),
        ("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT"),
        ("torch.backends.mkldnn.is_available", lambda: False),
        ("torch.__version__", "2.99"),
        ("torch.__config__.show", lambda: "another build"),
        ("qwen35mm.cache.fingerprint.select_backend", lambda device: SimpleNamespace(__name__="another")),
        ("qwen35mm.cache.fingerprint.find_library", lambda: SimpleNamespace(name="another", digest="")),
    ],
)
def test_libraries_their_state_and_the_machine_count(changed, monkeypatch, target, value):
    monkeypatch.setattr(target, value)
    assert changed()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("MKL_CBWR", True),
        ("ONEDNN_MAX_CPU_ISA", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", True),
        ("TORCH_MKLDNN_MATMUL_MIN_DIM", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("CUBLASLT_WORKSPACE_SIZE", True),
        ("TORCH_BLAS_PREFER_CUBLASLT", True),
        ("TORCH_CUBLASLT_UNIFIED_WORKSPACE", True),
        ("PYTORCH_TUNABLEOP_ENABLED", True),
        ("TORCH_SHOW_CPP_STACKTRACES", False),
        ("HOME_OF_SOMETHING", False),
    ],
)
def test_only_the_libraries_settings_count(changed, monkeypatch, name, counts):
    monkeypatch.setenv(name, "something else")
    assert changed() is counts


def test_triton_may_be_absent(monkeypatch):
    monkeypatch.setattr(module, "_version", lambda name: None)
    assert arithmetic([CPU], BF16)["triton"] is None
    monkeypatch.undo()
    assert module._version("no-such-distribution") is None
    assert module._version("torch") is not None


@pytest.fixture
def gpu(monkeypatch):
    """The properties that every card of this machine has from now on."""
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def test_a_gpu_is_named(gpu):
    one = arithmetic([torch.device("cuda", 0)], BF16)
    assert one["devices"][0]["name"] == "Some GPU"
    assert fingerprint(one) != fingerprint(arithmetic([CPU], BF16))
    gpu.multi_processor_count = 66
    assert fingerprint(one) != fingerprint(arithmetic([torch.device("cuda", 0)], BF16))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("wheel", ["nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13"])
def test_another_wheel_of_what_multiplies_is_other_arithmetic(wheel, monkeypatch):
    versions = {"nvidia-cublas": "13.1.0.3", "nvidia-cublas-cu12": "12.8.4.1"}
    monkeypatch.setattr(module, "_version", lambda name: versions.get(name))
    before = fingerprint(arithmetic([torch.device("cuda", 0)], BF16))
    on_cpu = fingerprint(arithmetic([CPU], BF16))
    versions[wheel] = "99.1"
    assert fingerprint(arithmetic([torch.device("cuda", 0)], BF16)) != before
    assert fingerprint(arithmetic([CPU], BF16)) == on_cpu


def test_torchs_newer_precision_settings_count_too():
    """torch refuses to read the older ones, once one of these was set."""
    before, mkldnn = fingerprint(arithmetic([CPU], BF16)), cast(Any, torch.backends.mkldnn)
    matmul = mkldnn.matmul
    own = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        assert fingerprint(arithmetic([CPU], BF16)) != before
    finally:
        matmul.fp32_precision = own
    assert fingerprint(arithmetic([CPU], BF16)) == before


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allow_bf16_reduced_precision_reduction", False),
        ("allow_bf16_reduced_precision_reduction", (False, False)),
        ("allow_fp16_reduced_precision_reduction", False),
        ("allow_fp16_accumulation", True),
    ],
)
def test_how_torch_multiplies_on_a_card_counts(name, value):
    """A pair's second half, whether sums may be split, came with torch 2.10."""
    matmul = torch.backends.cuda.matmul
    if isinstance(value, tuple) and not hasattr(matmul, f"{name}_split_k"):
        pytest.skip("this torch has no such setting")
    before, own = fingerprint(arithmetic([torch.device("cuda", 0)], BF16)), getattr(matmul, name)
    try:
        setattr(matmul, name, value)
        assert fingerprint(arithmetic([torch.device("cuda", 0)], BF16)) != before
    finally:
        setattr(matmul, name, own)
    assert fingerprint(arithmetic([torch.device("cuda", 0)], BF16)) == before


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("torch.backends.cuda.preferred_blas_library", lambda: "_BlasBackend.Cublaslt"),
        ("torch.backends.cuda.flash_sdp_enabled", lambda: False),
        ("torch._C._cuda_getCublasLtWorkspaceSize", lambda: 1024),
    ],
)
def test_which_library_multiplies_on_a_card_counts(target, value, monkeypatch):
    before = fingerprint(arithmetic([torch.device("cuda", 0)], BF16))
    monkeypatch.setattr(target, value, raising=False)
    assert fingerprint(arithmetic([torch.device("cuda", 0)], BF16)) != before


@pytest.mark.usefixtures("gpu")
def test_equal_cards_are_one_and_the_processor_is_another():
    first, second = (torch.device("cuda", index) for index in range(2))
    alone = fingerprint(arithmetic([first] * 4, BF16))
    assert fingerprint(arithmetic([first, first, second, second], BF16)) == alone
    mixed = [fingerprint(arithmetic([first] * count + [CPU] * (4 - count), BF16)) for count in range(5)]
    assert mixed[4] == alone
    assert len(set(mixed)) == 5


def test_the_sources_are_those_that_compute(monkeypatch, tmp_path):
    """A changed, a renamed and a new file are other sources; what doesn't compute isn't looked at."""
    package, kernels, preprocess = (tmp_path / name for name in ("package", "kernels", "preprocess"))
    for folder in (package / "model", package / "engine", package / "ui", kernels / "inner", preprocess):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(folder.name)
    monkeypatch.setattr(module, "_PACKAGE", package)
    monkeypatch.setattr(module.qwen35mm_kernels, "__path__", [str(kernels)])
    monkeypatch.setattr(module.qwen35mm_preprocess, "__path__", [str(preprocess)])
    seen = {sources_digest()}
    for path in (package / "model" / "a.py", package / "engine" / "a.py", kernels / "inner" / "a.py"):
        path.write_text("changed")
        seen.add(sources_digest())
    (preprocess / "a.py").rename(preprocess / "b.py")
    seen.add(sources_digest())
    for name in ("new.py", "new.cpp", "new.h"):
        (kernels / name).write_text("")
        seen.add(sources_digest())
    assert len(seen) == 8
    (package / "ui" / "a.py").write_text("changed")
    (kernels / "notes.txt").write_text("changed")
    assert sources_digest() in seen


def test_the_sources_are_found():
    assert Path(qwen35mm.__file__).parent == module._PACKAGE
    assert {*module._COMPUTING} <= {path.name for path in module._PACKAGE.iterdir()}
