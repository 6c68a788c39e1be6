"""A format of quantised checkpoints is a class, its choice in quantised.py and its name in config/model.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from tests.contributing.copies import Copy

METHODS = "qwen35mm/config/model.py"
READERS = "qwen35mm/checkpoints/quantised.py"
FORMAT = """
from typing import ClassVar

import torch

from qwen35mm.checkpoints.sources import Format, Grouped

class Eighths(Format):
    name = "eighths"
    dtypes: ClassVar = {"eighths": ("I8",)}

    def shape(self, parts):
        return parts["eighths"].shape

    def decode(self, parts, shape):
        return Grouped(parts["eighths"], torch.full((shape[0], 1), 0.125), shape[1])
"""
TRIAL = """
import torch
from pathlib import Path
from safetensors.torch import save_file
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.safetensors_files import new_buffer
from qwen35mm.config import ModelConfig
folder = Path("checkpoint")
config = ModelConfig.from_pretrained(folder)
codes = torch.arange(-4, 4, dtype=torch.int8).view(2, 4)
save_file({"a.eighths": codes, "b.weight": torch.ones(3)}, folder / "model.safetensors")
stored = read_checkpoint(folder, config.quantization)
matrix, norm = stored["a.weight"], stored["b.weight"]
assert torch.equal(torch.cat(list(matrix.rows(4, new_buffer()))), codes / 8)
print(matrix.kind, norm.kind)
"""


def test_it_is_read_after_a_class_and_two_entries(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    config = json.loads((demo_model_path() / "config.json").read_text("utf-8"))
    (tmp_path / "checkpoint").mkdir()
    quantised = config | {"quantization_config": {"quant_method": "eighths"}}
    (tmp_path / "checkpoint/config.json").write_text(json.dumps(quantised), "utf-8")
    (tmp_path / "qwen35mm/checkpoints/eighths.py").write_text(FORMAT, "utf-8")
    copy.edit(
        READERS,
        '    if method == "awq":\n',
        '    if method == "eighths":\n'
        '        return _Reader((re.compile(r"(?P<module>.+)\\.(?P<part>eighths)"),), lambda parts: Eighths())\n'
        '    if method == "awq":\n',
    )
    copy.edit(READERS, "Parts = dict[", "from qwen35mm.checkpoints.eighths import Eighths\n\nParts = dict[")
    with pytest.raises(ConfigError, match="eighths"):
        ModelConfig.from_pretrained(tmp_path / "checkpoint")
    copy.edit(METHODS, 'METHODS = ("fp8",', 'METHODS = ("eighths", "fp8",')
    done = copy.run(TRIAL)
    assert done.stdout == "eighths F32\n", done.stderr
