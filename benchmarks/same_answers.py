"""The bundled model's greedy answers, ours beside llama.cpp's: a second oracle, for the whole way from text to text.

    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 assets/demo demo.gguf --outtype f32
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 assets/demo tower.gguf --outtype f32 --mmproj
    python -m benchmarks.same_answers --llama-server llama/bin/llama-server --gguf demo.gguf --mmproj tower.gguf

Both compute in float32, and each applies the checkpoint's own template. Pictures have sides of whole patches, so that
nobody resizes them: llama.cpp's resize is another one than the reference's. Prints what differs, and how many didn't;
ends with 1 where something differs.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.serving import Server
from qwen35mm.evaluation.cases import Case, make_cases
from qwen35mm.evaluation.skill_test import MAX_TOKENS, answer_cases
from qwen35mm.model import load

# Thinking and tools are left out: servers cut them out of a reply, each in its own way.
TEXTS = {"small talk": 6, "no media": 4, "off topic": 6, "recall 1": 5, "recall 10": 5, "recall 30": 4}
PICTURES = {"color": 4, "caption 1-3": 4, "yes no": 4, "place": 4, "count": 2, "relation": 2}
_SEED = 77
_MERGED = 32  # pixels a side of a token
_FEWEST, _MOST = 256 * 256, 512 * 512  # pixels; pictures of so many are neither enlarged nor made smaller by anybody


def whole_patches(data: bytes) -> bytes:
    """The picture as a PNG whose sides are multiples of `_MERGED`, of `_FEWEST` to `_MOST` pixels."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    area = picture.width * picture.height
    scale = (min(max(area, _FEWEST), _MOST) / area) ** 0.5
    width = height = 0
    for rounded in (round, math.ceil, math.floor):
        width, height = (_MERGED * max(1, rounded(side * scale / _MERGED)) for side in picture.size)
        if _FEWEST <= width * height <= _MOST:
            break
    out = io.BytesIO()
    picture.resize((width, height), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def with_pictures(case: Case, change: Callable[[bytes], dict[str, Any]]) -> Case:
    """The case with its pictures' parts changed; `change` takes a file."""

    def changed(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [change(part["image"]) if part["type"] == "image" else part for part in content]

    return replace(case, messages=[each | {"content": changed(each["content"])} for each in case.messages])


def as_url(data: bytes) -> dict[str, Any]:
    """A picture as OpenAI's chats take it."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True, help="the model's text part, in float32")
    parser.add_argument("--mmproj", type=Path, required=True, help="its vision tower")
    arguments = parser.parse_args()
    for path in (arguments.llama_server, arguments.gguf, arguments.mmproj):
        if not path.is_file():
            parser.error(f"{path} is no file")
    asked = {name: make_cases(name, count, "seen", _SEED) for name, count in (TEXTS | PICTURES).items()}
    fitted = partial(with_pictures, change=lambda data: {"type": "image", "image": whole_patches(data)})
    cases = [fitted(case) for each in asked.values() for case in each]
    ours = answer_cases(load(arguments.model, dtype="float32", device="cpu"), cases)
    command = [str(arguments.llama_server), "--model", str(arguments.gguf), "--mmproj", str(arguments.mmproj)]
    command += ["--port", "{port}", "--jinja", "--ctx-size", "8192", "--parallel", "1", "--no-webui"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--no-cache-prompt"]
    how = {"temperature": 0, "max_tokens": MAX_TOKENS, "chat_template_kwargs": {"enable_thinking": False}}
    same = {"texts": 0, "pictures": 0}
    with closing(Server("llama.cpp", command, "default", {})) as server:
        for case, mine in zip(cases, ours, strict=True):
            body = {"messages": with_pictures(case, as_url).messages, **how}
            reply = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=600)
            reply.raise_for_status()
            theirs = reply.json()["choices"][0]["message"]["content"]
            if theirs.strip() == mine.strip():
                same["texts" if case.skill in TEXTS else "pictures"] += 1
            else:
                print(f"{case.skill}: {mine!r} here, {theirs!r} there")
    counts = {"texts": sum(TEXTS.values()), "pictures": sum(PICTURES.values())}
    print("The same:", ", ".join(f"{same[kind]} of {count} about {kind}" for kind, count in counts.items()))
    raise SystemExit(same != counts)


if __name__ == "__main__":
    main()
