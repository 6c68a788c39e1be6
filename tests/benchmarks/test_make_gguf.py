"""make_gguf runs the converter that it is given, on tokenizers too that this one doesn't know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.make_gguf import CONVERTER, VENDORED, find_converter
from qwen35mm.assets import demo_model_path
from tests.children import ROOT, environment

# What make_gguf relies on of the real one: where its classes are, what they raise, and the options of its program.
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "its own"
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
"""
PROGRAM = """
import argparse
from pathlib import Path
import gguf
from conversion.base import TextModel

class Model(TextModel):
    pass

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile", type=Path)
parser.add_argument("--outtype")
parser.add_argument("--no-mtp", action="store_true")
options = parser.parse_args()
if __name__ == "__main__":
    names = [Model().get_vocab_base_pre(tokenizer) for tokenizer in ("known", "random")]
    values = [gguf.NAME, options.model, options.outtype, str(options.no_mtp), *names]
    options.outfile.write_text("\\n".join(values))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source package of llama-cpp-python, as far as make_gguf looks at it."""
    folder = tmp_path / "llama_cpp_python-0.0.1" / VENDORED
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "__init__.py").touch()
    (folder / "conversion" / "base.py").write_text(BASE)
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text("NAME = 'of the package'")
    (folder / CONVERTER).write_text(PROGRAM)
    return tmp_path / "llama_cpp_python-0.0.1"


def make_gguf(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.make_gguf", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def test_the_converter_gets_its_options_and_a_name_for_the_tokenizer(source: Path, tmp_path: Path) -> None:
    # Paths are those of the folder that it is called in.
    done = make_gguf(source.name, demo_model_path(), "out.gguf", "--outtype", "f16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "out.gguf").read_text().splitlines()
    assert found == ["of the package", str(demo_model_path().resolve()), "f16", "True", "its own", "qwen35"]


def test_llama_cpp_itself_is_found_too(source: Path) -> None:
    assert find_converter(source) == find_converter(source / VENDORED) == (source / VENDORED).resolve()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", str(demo_model_path())], "nowhere is no llama.cpp"),
        (["source", "nowhere"], "nowhere is no checkpoint"),
    ],
)
def test_what_is_missing_is_named(source: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    first, second = arguments
    done = make_gguf(source if first == "source" else first, second, tmp_path / "out.gguf")
    assert done.returncode == 2
    assert message in done.stderr
