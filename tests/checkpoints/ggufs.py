"""Models in GGUF files, written by llama.cpp's own converter and answered by its own server.

The files in gguf/ are kept, because llama.cpp is not a Python package. With its sources (commit 0c1e570, as in
llama-cpp-python 0.3.36) and a build of llama-server they are made anew by

    python -m tests.checkpoints.ggufs LLAMA_CPP_SOURCES LLAMA_SERVER

Each holds the numbers of a random model that `model_of` builds; its tokenizer, template and processors are those in
gguf_source, which were the demo model's: a newer demo leaves these files as they are.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.tiny import TinySpec, config_dict, randomize

FOLDER = Path(__file__).with_name("gguf")
SOURCE = FOLDER.with_name("gguf_source")
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
    """transformers' model, in float32, with the vocabulary of `SOURCE`."""
    values = config_dict(spec)
    source = json.loads((SOURCE / "config.json").read_text())
    values |= {name: source[name] for name in source if name.endswith("_token_id")}
    values["vision_start_token_id"], values["vision_end_token_id"] = 943, 944
    values["text_config"] |= {
        "vocab_size": source["text_config"]["vocab_size"],
        "eos_token_id": source["eos_token_id"],
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
    for path in SOURCE.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)


@dataclass(frozen=True)
class RawHeader:
    """A header as its bytes are laid out, so that it can say what no writer would.

    Attributes:
        values: key, and type with value.
        tensors: name, dimensions in the file's order, type and offset.
        counts: what is added to the numbers of tensors and of values.
    """

    values: tuple[tuple[bytes, bytes], ...]
    tensors: tuple[tuple[bytes, tuple[int, ...], int, int], ...]
    counts: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls, path: Path, num_tokens: int) -> RawHeader:
        """Of a file, with a small vocabulary that has the family's control tokens at its end."""
        import gguf

        reader = gguf.GGUFReader(path)
        values = {key: (x.types, x.contents()) for key, x in reader.fields.items() if not key.startswith("GGUF.")}
        values["tokenizer.chat_template"] = (values["tokenizer.chat_template"][0], "{{ messages[0].content }}")
        values["tokenizer.ggml.merges"] = (values["tokenizer.ggml.merges"][0], ["! !"])
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            types, whole = values[key]
            values[key] = (types, [*whole[: num_tokens - 26], *whole[934:960]])
        values["tokenizer.ggml.tokens"][1][1] = "!!"
        tensors = tuple(
            (x.name.encode(), tuple(map(int, x.shape)), int(x.tensor_type), int(x.data_offset) - reader.data_offset)
            for x in reader.tensors
        )
        return cls(tuple((key.encode(), _raw(*value)) for key, value in values.items()), tensors)

    def encode(self) -> bytes:
        counts = (len(each) + more for each, more in zip((self.tensors, self.values), self.counts, strict=True))
        out = [b"GGUF", struct.pack("<IQQ", 3, *counts)]
        out += [_string(key) + value for key, value in self.values]
        for name, sizes, kind, offset in self.tensors:
            out += [_string(name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)]
        raw = b"".join(out)
        return raw + bytes(-len(raw) % 32)

    def damaged(self, chance: random.Random) -> RawHeader:
        """One thing in it is another."""
        values, tensors = list(self.values), list(self.tensors)
        at, where = chance.randrange(len(values)), chance.randrange(len(tensors))
        (key, value), (name, sizes, kind, offset) = values[at], tensors[where]
        array, string, huge = b"\t\0\0\0", b"\x08\0\0\0", struct.pack("<Q", chance.choice((1 << 24, 1 << 40, 1 << 63)))
        number = struct.pack("<I", chance.choice((4, 5))) + struct.pack(
            "<I", chance.choice((0, 1, 3, 7, 64, 2**32 - 1))
        )
        match chance.randrange(18):
            case 0:
                values[at] = (key, struct.pack("<I", chance.randrange(14)) + value[4:])
            case 1:
                values[at] = (key, chance.choice(values)[1])
            case 2:
                values[at] = (key, number)
            case 3:
                values.append(values[at] if chance.random() < 0.5 else (key, number))
            case 4:
                del values[at]
            case 5:
                values[at] = (key[:-1] + b"\xff", value)
            case 6:
                values[at] = (key, string + _string(b"\xff\xfe" * chance.randrange(4)))
            case 7:
                values[at] = (key, array + array + struct.pack("<QIQ", 1, 4, 1) + bytes(4))
            case 8:
                values[at] = (key, array + struct.pack("<I", chance.choice((0, 4, 8, 12))) + huge)
            case 9:
                values[at] = (key, string + huge)
            case 10:
                values.append((b"general.alignment", number))
            case 11:
                tensors.append(tensors[where])
            case 12:
                tensors[where] = (chance.choice((chance.choice(tensors)[0], name + b"\xff", b"")), sizes, kind, offset)
            case 13:
                size = chance.choice((0, 1, 31, 2**32, 2**63))
                tensors[where] = (
                    name,
                    chance.choice(((), (size,), (*sizes, size), sizes[::-1], (size,) * 5)),
                    kind,
                    offset,
                )
            case 14:
                tensors[where] = (name, sizes, chance.randrange(45), offset)
            case 15:
                tensors[where] = (name, sizes, kind, abs(offset + chance.choice((-64, -1, 1, 32, 2**62))))
            case 16:
                chance.shuffle(tensors)
            case _:
                counts = chance.choice(((1, 0), (-1, 0), (0, 1), (0, -1), (2**60, 0), (0, 2**60)))
                return replace(self, counts=counts)
        return replace(self, values=tuple(values), tensors=tuple(tensors))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _raw(types: list[Any], value: Any) -> bytes:
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 8: "", 10: "Q", 11: "q", 12: "d"}
    code = codes[int(types[-1])]

    def one(each: Any) -> bytes:
        return struct.pack(f"<{code}", each) if code else _string(each.encode())

    whole = one(value) if len(types) == 1 else struct.pack("<IQ", types[1], len(value)) + b"".join(map(one, value))
    return struct.pack("<I", types[0]) + whole


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
