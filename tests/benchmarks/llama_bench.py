"""A stand-in for llama.cpp's llama-bench: takes its options, notes them, and prints what it printed once.

Run by `fake`'s script; `FAKE_LLAMA_BENCH` names where options are noted, `FAKE_LLAMA_BENCH_FAILS` ends it, and where
`FAKE_LLAMA_BENCH_SEEN` names a file, it goes on until there is one.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

NS_PER_PROMPT_TOKEN, NS_PER_DECODED_TOKEN = 4_000_000, 50_000_000
# Of one test, as build 0c1e570 of llama.cpp prints it with `--output json`.
TEST = {
    "build_commit": "0c1e570",
    "model_type": "qwen35 0.8B BF16",
    "type_k": "f16",
    "type_v": "f16",
    "test_time": "2026-11-22T17:58:11Z",
}


def fake(folder: Path) -> Path:
    """A program in `folder` that stands in for llama-bench."""
    path = folder / "llama-bench"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    with Path(os.environ["FAKE_LLAMA_BENCH"]).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(options) + "\n")
    print("ggml: words of its own", file=sys.stderr)
    if "FAKE_LLAMA_BENCH_FAILS" in os.environ:
        print("error: failed to load model", file=sys.stderr)
        sys.exit(1)
    while "FAKE_LLAMA_BENCH_SEEN" in os.environ and not Path(os.environ["FAKE_LLAMA_BENCH_SEEN"]).exists():
        time.sleep(0.01)
    num_prompt, num_decoded = int(options["--n-prompt"]), int(options["--n-gen"])
    total_ns = num_prompt * NS_PER_PROMPT_TOKEN + num_decoded * NS_PER_DECODED_TOKEN
    sizes = {"n_prompt": num_prompt, "n_gen": num_decoded, "n_threads": int(options["--threads"])}
    times = {"avg_ns": total_ns, "stddev_ns": 0, "samples_ns": [total_ns]}
    print(json.dumps([{**TEST, **sizes, **times, "n_depth": int(options.get("--n-depth", 0))}], indent=2))


if __name__ == "__main__":
    main()
