"""A type of keys and values is one entry in kv_formats.py, and what lacks it says so."""

from __future__ import annotations

from pathlib import Path

from tests.contributing.copies import Copy, needs_library

FORMATS = "kernels/qwen35mm_kernels/kv_formats.py"
LAST = '        KVFormat("tq3", 9,'
ENTRY = '        KVFormat("tq5", 10, _BYTES, bits=8, codes=torch.float8_e4m3fn, largest=448.0),\n'
TRIAL = """
import torch
from qwen35mm.cache.kv_types import kv_formats_of
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.strided import kv_rows
k, v = kv_formats_of("k=tq5,v=int8", torch.bfloat16)
x = torch.randn(3, 64)
assert (k.dequantise(k.quantise(x), torch.float32) - x).abs().max() < 0.3
print("kept", k.on_cards, find_library() is not None, flush=True)
kv_rows(torch.zeros(2, 1, k.row_width(64), dtype=torch.uint8), k)
print("read")
"""


def add(copy: Copy) -> None:
    text = (copy.folder / FORMATS).read_text("utf-8")
    line = next(line for line in text.splitlines(keepends=True) if line.startswith(LAST))
    copy.edit(FORMATS, line, line + ENTRY)


def test_it_is_named_and_kept_by_torch_after_one_entry_and_not_on_cards(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    assert "got 'k=tq5,v=int8'" in copy.run(TRIAL).stderr
    add(copy)
    done = copy.run(TRIAL)
    assert done.stdout.splitlines() == ["kept False False", "read"], done.stderr


@needs_library
def test_a_compiled_library_that_does_not_know_it_is_refused(tmp_path: Path) -> None:
    copy = Copy(tmp_path, compiled=True)
    add(copy)
    done = copy.run(TRIAL)
    assert done.stdout == "kept False True\n"
    assert "knows other formats of keys and values" in done.stderr
