"""Makes a GGUF of a checkpoint, the random and the bundled one too, by llama.cpp's own converter.

    python -m pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/random-0.8B /tmp/random-0.8B-bf16.gguf

The converter tells a tokenizer by a checksum of what it does with one text, and ends where that isn't in its list; such
a tokenizer is taken for one that splits text as Qwen's do, which it does. Other formats, 4 bits above all, are made of
the GGUF by llama.cpp's `llama-quantize`: docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

CONVERTER = "convert_hf_to_gguf.py"
# Where the source package of llama-cpp-python has it.
VENDORED = Path("vendor", "llama.cpp")
# llama.cpp's name for how Qwen3.5's tokenizer splits a text.
SPLITTING = "qwen35"


def find_converter(source: Path) -> Path:
    """llama.cpp's folder, given itself or an unpacked llama-cpp-python.

    Raises:
        FileNotFoundError: there is no converter in either place.
    """
    for folder in (source, source / VENDORED):
        if (folder / CONVERTER).is_file():
            return folder.resolve()
    raise FileNotFoundError(f"{source} is no llama.cpp and has none in {VENDORED}: no {CONVERTER} there")


def convert(folder: Path, checkpoint: Path, out: Path, outtype: str, *, is_tower: bool = False) -> None:
    """Runs the converter of llama.cpp's `folder` in this process, with a name for tokenizers that it doesn't know.

    Args:
        is_tower: the vision tower is converted, which is a file of its own, and not the text model.
    """
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    text_model = importlib.import_module("conversion.base").TextModel
    known = text_model.get_vocab_base_pre

    def splitting(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return SPLITTING

    text_model.get_vocab_base_pre = splitting
    # Without the head that guesses a second token: nobody uses it here, and random checkpoints have none.
    part = "--mmproj" if is_tower else "--no-mtp"
    sys.argv = [CONVERTER, str(checkpoint), "--outfile", str(out), "--outtype", outtype, part]
    runpy.run_path(str(folder / CONVERTER), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="an unpacked source package of llama-cpp-python, or llama.cpp itself")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--outtype", choices=["bf16", "f16", "f32", "q8_0"], default="bf16")
    parser.add_argument("--mmproj", action="store_true", help="the vision tower in place of the text model")
    arguments = parser.parse_args()
    if not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"{arguments.checkpoint} is no checkpoint: it has no config.json")
    try:
        folder = find_converter(arguments.source)
    except FileNotFoundError as error:
        parser.error(str(error))
    where = arguments.checkpoint.resolve(), arguments.out.resolve()
    convert(folder, *where, arguments.outtype, is_tower=arguments.mmproj)


if __name__ == "__main__":
    main()
