"""Makes a GGUF from any checkpoint, also a random one or the bundled one, with llama.cpp's own converter.

    python -m pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/random-0.8B /tmp/random-0.8B-bf16.gguf

The converter identifies tokenizers by a checksum and refuses unknown ones. This command tells it that they split text
as Qwen's does. llama.cpp's `llama-quantize` makes other formats, such as 4 bits, from the GGUF.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

CONVERTER = "convert_hf_to_gguf.py"
# Its place in the source package of llama-cpp-python.
VENDORED = Path("vendor", "llama.cpp")
# llama.cpp's name for how Qwen3.5's tokenizer splits text.
SPLITTING = "qwen35"


def convert(folder: Path, checkpoint: Path, out: Path, outtype: str, *parts: str) -> None:
    """Runs the converter of llama.cpp's `folder` in this process.

    Args:
        parts: the converter's options about what of the model it converts.
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
    sys.argv = [CONVERTER, str(checkpoint), "--outfile", str(out), "--outtype", outtype, *parts]
    runpy.run_path(str(folder / CONVERTER), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="an unpacked source package of llama-cpp-python, or llama.cpp itself")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--outtype", choices=["bf16", "f16", "f32", "q8_0"], default="bf16")
    parser.add_argument("--mmproj", action="store_true", help="the vision tower in place of the text model")
    parser.add_argument("--mtp", action="store_true", help="with the layer that drafts tokens, which most files omit")
    arguments = parser.parse_args()
    if not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"{arguments.checkpoint} is no checkpoint: it has no config.json")
    folders = (arguments.source.resolve(), arguments.source.resolve() / VENDORED)
    folder = next((each for each in folders if (each / CONVERTER).is_file()), None)
    if folder is None:
        parser.error(f"{arguments.source} has no {CONVERTER}, nor in {VENDORED}")
    where = arguments.checkpoint.resolve(), arguments.out.resolve()
    without_layer = [] if arguments.mtp else ["--no-mtp"]
    convert(folder, *where, arguments.outtype, *(["--mmproj"] if arguments.mmproj else without_layer))


if __name__ == "__main__":
    main()
