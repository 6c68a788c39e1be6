"""llama.cpp as a benchmark asks it: its own llama-bench, a process each time, on one GGUF."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD
from qwen35mm.config import ModelConfig
from qwen35mm.model.weights import share_read

# What it keeps keys and values in, if nothing else is asked for, and a convolution's inputs.
KV_DTYPE, CONV_DTYPE = torch.float16, torch.float32

_POLL_S = 0.1
# A checkpoint's names of what isn't read whole for every token.
_TABLES = {"token_embd.weight": EMBEDDING, "output.weight": LM_HEAD}
# GGUF: the format's numbers of scalars, by their types' numbers; strings and arrays are told by their lengths.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class LlamaCpp:
    """llama-bench on one GGUF: it warms up by itself, on as many tokens as it measures."""

    def __init__(self, arguments: argparse.Namespace, gguf: Path) -> None:
        self._command = [str(arguments.llama_bench), "--model", str(gguf), "--threads", str(torch.get_num_threads())]
        self._num_decoded = arguments.decode_tokens

    def measure(self, length: int) -> dict[str, Any]:
        """Seconds of a prompt's prefill and of the tokens after it, peak resident memory, and what the build is."""
        prefill, prefill_bytes = self._run("--n-prompt", str(length), "--n-gen", "0")
        decode, decode_bytes = self._run("--n-prompt", "0", "--n-gen", str(self._num_decoded), "--n-depth", str(length))
        return {
            "prefill_s": prefill["avg_ns"] / 1e9,
            "decode_s": decode["avg_ns"] / 1e9,
            "peak_bytes": max(prefill_bytes, decode_bytes),
            "build": prefill["build_commit"],
        }

    def _run(self, *options: str) -> tuple[dict[str, Any], int]:
        command = [*self._command, *options, "--repetitions", "1", "--output", "json"]
        # Its own words go to a file: a pipe that nobody empties would stop it.
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL)
            peak_bytes = 0
            while process.poll() is None:
                peak_bytes = max(peak_bytes, _resident_bytes(process.pid))
                time.sleep(_POLL_S)
            output.seek(0)
            errors.seek(0)
            if process.returncode != 0:
                words = errors.read().decode(errors="replace")[-2000:]
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{words}")
            (test,) = json.load(output)
        return test, peak_bytes


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def weight_bytes(config: ModelConfig, tensors: Mapping[str, int]) -> float:
    """Bytes of weights that decoding a token reads; `tensors` as `gguf_tensors` gives them."""
    named = {_TABLES.get(name, name.replace("_exps.", ".experts.")): size for name, size in tensors.items()}
    return sum(share_read(config, name, LM_HEAD in named) * size for name, size in named.items())


def gguf_tensors(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a GGUF, by their places in the file: no type has to be known.

    Raises:
        ValueError: it is no GGUF.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF")
        _, num_tensors, num_values = _read(file, "IQQ")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_values):
            key = _text(file)
            value = _value(file, *_read(file, "I"))
            alignment = value if key == "general.alignment" else alignment
        places = []
        for _ in range(num_tensors):
            name = _text(file)
            (num_dimensions,) = _read(file, "I")
            *_, offset = _read(file, f"{num_dimensions}QIQ")
            places.append((offset, name))
        start = -(-file.tell() // alignment) * alignment
    places.sort()
    ends = [offset for offset, _ in places[1:]] + [path.stat().st_size - start]
    return {name: end - offset for (offset, name), end in zip(places, ends, strict=True)}


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    return file.read(*_read(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    """A value of the file's own facts; of arrays only where they end."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _read(file, _SCALARS[kind])[0]
    member, length = _read(file, "IQ")
    if member in _SCALARS:
        file.seek(length * struct.calcsize(f"<{_SCALARS[member]}"), os.SEEK_CUR)
    else:
        for _ in range(length):
            _value(file, member)
    return None
