"""Seconds to the first token when requests change between two models of one server.

    python -m benchmarks.switching --model DIR --other DIR [--max-memory 3GiB] [--weights int8] [--switches 6]

Both models are asked in turns, each about its own conversation, in a server with `--max-memory` and an empty cache. The
first request of each model isn't counted among its later ones: it reads and packs the weights. A row says whether
the model had to be loaded. The peak is the process's resident memory, read after each answer.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.frame import Spread, parse, parser, report
from benchmarks.startup import address_of, started
from qwen35mm.option_values import parse_size

_PATIENCE_S = 600.0
# About a page, so that a model that comes back also reads its cache.
_TEXT = "The lighthouse keeper counts the ships that pass, and writes their names down. " * 40


def first_token(address: str, model: str, messages: list[dict[str, str]]) -> tuple[float, str, int]:
    """Seconds to a reply's first token, its text, and the cached tokens of its prompt."""
    asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    began, first, text, cached = time.perf_counter(), 0.0, "", 0
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=asked, timeout=_PATIENCE_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            cached = (chunk.get("usage") or {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                found = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                first = first or (time.perf_counter() - began if found else 0.0)
                text += delta.get("content") or ""
    return first, text, cached


def main() -> None:
    options = parser(__doc__, model=False)
    options.add_argument("--model", type=Path, required=True, help="a checkpoint's folder")
    options.add_argument("--other", type=Path, required=True, help="another one")
    options.add_argument("--weights", default="auto", help="auto, bf16, int8 or int4")
    options.add_argument("--max-memory", default="3GiB", help="the server's memory")
    options.add_argument("--context-length", type=int, default=8192)
    options.add_argument("--switches", type=int, default=6, help="requests of each model after its first")
    arguments = parse(options)
    folders = {"one": arguments.model.resolve(), "two": arguments.other.resolve()}
    models = [text for name, folder in folders.items() for text in ("--model", f"{folder}={name}")]
    how = ["--weights", arguments.weights, "--max-memory", arguments.max_memory]
    how += ["--context-length", str(arguments.context_length), "--port", "0", "--no-store"]
    seconds: dict[tuple[str, str], list[float]] = {}
    peak = 0
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), "serve", *models, *how) as (process, _):
        address, server = address_of(process), psutil.Process(process.pid)
        talks = {name: [{"role": "user", "content": f"{name}: {_TEXT}"}] for name in folders}
        for number in range(arguments.switches + 1):
            for name, messages in talks.items():
                states = {x["id"]: x["status"]["value"] for x in httpx.get(f"{address}/v1/models").json()["data"]}
                told = "first" if not number else "loaded" if states[name] == "loaded" else "brought back"
                first_s, text, cached = first_token(address, name, messages)
                assert not number or cached, "a model that comes back finds its conversation"
                seconds.setdefault((name, told), []).append(first_s)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
                peak = max(peak, server.memory_info().rss)
    rows = [{"model": name, "it was": told, "s": Spread.of(each)} for (name, told), each in seconds.items()]
    limit = parse_size(arguments.max_memory)
    memory = [{"peak MiB": peak // 2**20, "--max-memory, MiB": limit // 2**20, "within": peak <= limit}]
    report("switching", arguments, {"To the first token": rows, "Memory": memory})


if __name__ == "__main__":
    main()
