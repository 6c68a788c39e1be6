"""llama.cpp as a benchmark asks it: the options of its llama-bench, what it prints, and the tensors of a GGUF."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import llama_cpp
from benchmarks.llama_cpp import LlamaCpp, gguf_tensors, weight_bytes
from benchmarks.make_random import make_config
from qwen35mm.config import ModelConfig
from tests.benchmarks.llama_bench import fake


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaCpp:
    monkeypatch.setenv("FAKE_LLAMA_BENCH", str(tmp_path / "notes"))
    return LlamaCpp(Namespace(llama_bench=fake(tmp_path), decode_tokens=8), tmp_path / "model.gguf")


def test_prefill_and_decode_are_asked_for_apart(
    bench: LlamaCpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is looked at now and then: it doesn't end before that, on a machine however busy."""

    def look(pid: int) -> int:
        num_bytes = resident_bytes(pid)
        if num_bytes > 2**20:
            (tmp_path / "seen").touch()
        return num_bytes

    resident_bytes = llama_cpp._resident_bytes
    monkeypatch.setattr(llama_cpp, "_resident_bytes", look)
    monkeypatch.setenv("FAKE_LLAMA_BENCH_SEEN", str(tmp_path / "seen"))
    sample = bench.measure(512)
    assert (sample["prefill_s"], sample["decode_s"], sample["build"]) == (512 * 4e-3, 8 * 50e-3, "0c1e570")
    assert sample["peak_bytes"] > 2**20, "a process has so much"
    common = {
        "--model": str(tmp_path / "model.gguf"),
        "--threads": str(torch.get_num_threads()),
        "--repetitions": "1",
        "--output": "json",
    }
    assert [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()] == [
        {**common, "--n-prompt": "512", "--n-gen": "0"},
        {**common, "--n-prompt": "0", "--n-gen": "8", "--n-depth": "512"},
    ]


def test_its_error_is_told(bench: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LLAMA_BENCH_FAILS", "1")
    with pytest.raises(SystemExit, match=r"ended with status 1:\n(.|\n)*failed to load model"):
        bench.measure(512)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(alignment: int | None) -> bytes:
    """A GGUF of three tensors, with a value of each kind before them."""
    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("qwen35"),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("Ж"),
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2?", 7, 2, True, False),
        text("qwen35.rope.freq_base") + struct.pack("<If", 6, 1e7),
    ]
    if alignment is not None:
        values.append(text("general.alignment") + struct.pack("<II", 4, alignment))
    step = alignment or 32
    # Not in the order in which they lie.
    tensors = [
        text("blk.0.ffn_up.weight") + struct.pack("<I2QIQ", 2, 4, 8, 30, step),
        text("token_embd.weight") + struct.pack("<I2QIQ", 2, 2, 2, 0, 0),
        text("output_norm.weight") + struct.pack("<IQIQ", 1, 4, 0, 3 * step),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + b"".join(tensors)
    return head.ljust(-(-len(head) // step) * step, b"\0") + bytes(3 * step + 16)


@pytest.mark.parametrize("alignment", [None, 64])
def test_tensors_of_a_gguf_have_their_bytes(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(alignment))
    step = alignment or 32
    found = {"token_embd.weight": step, "blk.0.ffn_up.weight": 2 * step, "output_norm.weight": 16}
    assert gguf_tensors(path) == found


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="is no GGUF"):
        gguf_tensors(path)


def test_bytes_that_a_token_reads() -> None:
    """Of an embedding table beside a head a row, and of 256 experts eight."""
    dense, sparse = (ModelConfig.from_dict(make_config(size, "bfloat16")) for size in ("9B", "35B-A3B"))
    tensors = {"token_embd.weight": 1000, "blk.0.ffn_up.weight": 20}
    assert weight_bytes(dense, tensors) == 1020
    assert weight_bytes(dense, {**tensors, "output.weight": 300}) == 320
    assert weight_bytes(sparse, {"blk.3.ffn_down_exps.weight": 3200, "blk.3.ffn_down_shexp.weight": 7}) == 107
