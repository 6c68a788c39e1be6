"""Models in GGUF files, written by llama.cpp's own converter and answered by its own server.

The files in gguf/ are kept, because llama.cpp is not a Python package. With its sources (commit 0c1e570, as in
llama-cpp-python 0.3.36) and a build of llama-server they are made anew by

    python -m tests.checkpoints.ggufs LLAMA_CPP_SOURCES LLAMA_SERVER

Each holds the numbers of a random model that `model_of` builds; its tokenizer is the demo model's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from qwen35mm.assets import demo_model_path
from tests.tiny import TinySpec, config_dict, randomize

FOLDER = Path(__file__).with_name("gguf")
# llama.cpp wants keys and values of one width, and repeats key heads for the value heads.
DENSE = TinySpec("dense", num_layers=2, interval=2, tied=False, value_heads=4, seed=11)
MOE = TinySpec("moe", num_layers=2, interval=2, value_heads=4, moe=True, seed=12)
SPECS = {"dense": DENSE, "moe": MOE}
ANSWERS = FOLDER / "answers.json"
# All in normal form C: llama.cpp doesn't bring texts into it, as the family's tokenizers do.
PROMPTS = ("Hello, who are you?", "A red circle", "Straße, naïve, 日本語, Ünïcödé and 1234 ...\n\n  two spaces")
# Which our engine never chooses.
_VISION_IDS = range(943, 948)
NUM_TOKENS = 64


def model_of(spec: TinySpec) -> Any:
    """transformers' model, in float32, with the demo's vocabulary."""
    values = config_dict(spec)
    demo = json.loads((demo_model_path() / "config.json").read_text())
    values |= {name: demo[name] for name in demo if name.endswith("_token_id")}
    values["vision_start_token_id"], values["vision_end_token_id"] = 943, 944
    values["text_config"] |= {
        "vocab_size": demo["text_config"]["vocab_size"],
        "eos_token_id": demo["eos_token_id"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    kind = Qwen3_5MoeForConditionalGeneration if spec.moe else Qwen3_5ForConditionalGeneration
    model = kind((Qwen3_5MoeConfig if spec.moe else Qwen3_5Config)(**values))
    randomize(model, spec.seed, tied=spec.tied)
    return model.eval()


def write_checkpoint(spec: TinySpec, folder: Path) -> None:
    """The model as a checkpoint's folder."""
    model_of(spec).save_pretrained(folder)
    for path in demo_model_path().iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "training_info.json"):
            shutil.copy(path, folder)


def main(sources: Path, server: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, spec in SPECS.items():
            write_checkpoint(spec, folder := Path(temporary, name))
            _convert(sources, folder, FOLDER / f"{name}.gguf", "--outtype", "f16" if spec.moe else "f32")
        _convert(sources, Path(temporary, "dense"), FOLDER / "mmproj-dense.gguf", "--mmproj", "--outtype", "f16")
    answers = _answers(server, FOLDER / "dense.gguf")
    ANSWERS.write_text(json.dumps(answers, ensure_ascii=False) + "\n", "utf-8")


def _convert(sources: Path, folder: Path, file: Path, *options: str) -> None:
    command = [sys.executable, "-m", "benchmarks.make_gguf", str(sources), str(folder), str(file), *options]
    subprocess.run(command, check=True)


def _answers(server: Path, file: Path) -> list[dict[str, Any]]:
    """What llama-server makes of the prompts: their tokens, and its likeliest next ones."""
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "-ngl", "0", "-t", "1", "--no-warmup"]
    with subprocess.Popen([server, "-m", file, "--port", "18991", *exact]) as process:
        try:
            _wait_for("http://127.0.0.1:18991/health")
            return [_answer(prompt) for prompt in PROMPTS]
        finally:
            process.terminate()


def _answer(prompt: str) -> dict[str, Any]:
    tokens = _post("tokenize", {"content": prompt, "parse_special": False})["tokens"]
    asked = {"prompt": tokens, "temperature": 0, "n_predict": NUM_TOKENS, "ignore_eos": True, "return_tokens": True}
    asked["logit_bias"] = [[token_id, False] for token_id in _VISION_IDS]
    return {"prompt": prompt, "tokens": tokens, "next": _post("completion", {**asked, "cache_prompt": False})["tokens"]}


def _post(path: str, values: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:18991/{path}", json.dumps(values).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(url)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
