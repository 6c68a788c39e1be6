"""Servers under several clients: tokens a second, and the time to the first token, ours beside two others.

    python -m benchmarks.make_random --size 0.8B --digits --out /tmp/digits-0.8B
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/digits-0.8B /tmp/digits-bf16.gguf
    python -m benchmarks.serving --model /tmp/digits-0.8B --peer transformers \\
        --peer llama.cpp --llama-server build/bin/llama-server --gguf /tmp/digits-bf16.gguf

Each client has a conversation of two turns, streamed: a prompt of random words, and behind the reply a short question.
All clients begin at one time, and each begins its second turn when its first has ended. The first token is there when
the first event with text is. The second turn's time shows what a server keeps of a conversation.

Servers are `qwen35mm serve`, `transformers serve` and llama.cpp's `llama-server`, each in a process of its own, started
for as many requests at one time as there are clients at most (transformers answers one after the other), and asked in
turns, so that a machine that slows down does so for all. All see the same prompts, each of them once, and decode
greedily. A checkpoint made with `--digits` is needed: of others, most tokens have no text. transformers gets the
language model alone: for the whole it takes torchvision. What is known after each round stands on the standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import numbers, parser, set_threads
from qwen35mm.assets import asset_path
from qwen35mm.tokenizer import Tokenizer

OURS, TRANSFORMERS, LLAMA_CPP = "qwen35mm", "transformers", "llama.cpp"
QUESTION_TOKENS = 16
# Of a prompt's template, and where a reply's text has other tokens in the next prompt.
_ROOM = 256
_START_S = 600.0
_TURN_S = 3600.0


@dataclass(frozen=True)
class Turn:
    """What a client saw of one turn; `num_cached` is None where the server doesn't say."""

    first_s: float
    num_prompt: int
    num_cached: int | None
    num_written: int


@dataclass
class Runs:
    """What all clients of some rounds saw: seconds of each round, and turns, first ones and second ones."""

    seconds: list[float] = field(default_factory=list)
    turns: tuple[list[Turn], list[Turn]] = field(default_factory=lambda: ([], []))
    num_written: list[int] = field(default_factory=list)


class Server:
    """A server in a process of its own, ready.

    Args:
        name: what to call it.
        command: starts it on the port that `{port}` stands for.
        model: what it calls its model.
    """

    def __init__(self, name: str, command: Sequence[str], model: str, environment: dict[str, str]) -> None:
        self.name, self.model = name, model
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        # A pipe that nobody empties would stop it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        started = [part.replace("{port}", str(port)) for part in command]
        begun_s = time.perf_counter()
        self._process = subprocess.Popen(
            started,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            self._wait(begun_s + _START_S)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - begun_s

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _wait(self, deadline_s: float) -> None:
        while time.perf_counter() < deadline_s:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.address}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        self._output.seek(0)
        words = self._output.read().decode(errors="replace")[-2000:]
        raise SystemExit(f"{self.name} isn't ready (status {self._process.poll()}):\n{words}")


def commands(arguments: argparse.Namespace, folder: Path) -> list[tuple[str, list[str], str]]:
    """Name, command and the model's name of each server; files that a command needs are written to the folder."""
    most, threads = max(arguments.clients), str(torch.get_num_threads())
    length = arguments.prompt_tokens + QUESTION_TOKENS + 2 * arguments.reply_tokens + _ROOM
    ours = [sys.executable, "-m", "qwen35mm", "serve", "--model", str(arguments.model), "--port", "{port}"]
    ours += ["--dtype", arguments.dtype, "--device", arguments.device, "--slots", str(most), "--threads", threads]
    ours += ["--context-length", str(length), "--no-disk-cache", "--no-store"]
    found = [(OURS, ours, "default")]
    if arguments.ray:
        per = str(max(1, torch.get_num_threads() // arguments.ray))
        options = ["--ray", "local", "--replicas", str(arguments.ray), "--cpus-per-replica", per, "--threads", per]
        found.append((f"{OURS} --replicas {arguments.ray}", [*ours, *options], "default"))
    if TRANSFORMERS in arguments.peer:
        text = str(language_model(Path(arguments.model), folder))
        theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", text, "--port", "{port}"]
        found.append((TRANSFORMERS, [*theirs, "--device", arguments.device, "--dtype", arguments.dtype], text))
    if LLAMA_CPP in arguments.peer:
        llama = [str(arguments.llama_server), "--model", str(arguments.gguf), "--port", "{port}", "--threads", threads]
        llama += ["--parallel", str(most), "--ctx-size", str(most * length), "--no-webui"]
        found.append((LLAMA_CPP, llama, "default"))
    return found


def language_model(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint's language model as one of its own: links to its files, and its part of the config."""
    out = folder / "language-model"
    out.mkdir()
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    text = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    (out / "config.json").write_text(json.dumps(text), "utf-8")
    for path in checkpoint.iterdir():
        if path.name != "config.json" and "processor" not in path.name:
            (out / path.name).symlink_to(path.resolve())
    return out


class Script:
    """What clients say: random words, the same for every server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tokenizer = Tokenizer.from_pretrained(Path(arguments.model))
        self._words = asset_path("evaluation.txt").read_text("utf-8").split()
        self._num_tokens = (arguments.prompt_tokens, QUESTION_TOKENS)

    def words(self, *name: int) -> str:
        """Text of about as many tokens as the turn has that the name ends with, 0 or 1."""
        chosen = random.Random(str(name)).choices(self._words, k=self._num_tokens[name[-1]])
        tokens = self._tokenizer.encode_plain(" ".join(chosen))[: self._num_tokens[name[-1]]]
        return self._tokenizer.decode(tokens).strip("\ufffd ")


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, Turn]:
    """One streamed reply."""
    begun_s = time.perf_counter()
    first_s, texts, usage = math.nan, [], {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"a server answered {answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise SystemExit(f"a server's stream ended with {data['error']}")
            usage = data.get("usage") or usage
            for choice in data["choices"]:
                text = choice["delta"].get("content") or ""
                if text.strip() and math.isnan(first_s):
                    first_s = time.perf_counter() - begun_s
                texts.append(text)
    if math.isnan(first_s):
        raise SystemExit("a reply had no text: was the checkpoint made with --digits?")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return "".join(texts).strip(), Turn(first_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


async def converse(server: Server, script: Script, reply_tokens: int, *name: int) -> list[Turn]:
    """The two turns of one client."""
    messages, turns = [], []
    options = {"temperature": 0, "max_tokens": reply_tokens, "stream": True, "stream_options": {"include_usage": True}}
    options["chat_template_kwargs"] = {"enable_thinking": False}
    async with httpx.AsyncClient(base_url=server.address, timeout=_TURN_S) as client:
        for turn in range(2):
            messages.append({"role": "user", "content": script.words(*name, turn)})
            text, seen = await ask(client, {"model": server.model, "messages": messages, **options})
            messages.append({"role": "assistant", "content": text})
            turns.append(seen)
    return turns


async def measure(server: Server, script: Script, reply_tokens: int, num_clients: int, number: int, runs: Runs) -> None:
    """One round: all clients at one time."""
    begun_s = time.perf_counter()
    clients = [converse(server, script, reply_tokens, num_clients, number, each) for each in range(num_clients)]
    found = await asyncio.gather(*clients)
    runs.seconds.append(time.perf_counter() - begun_s)
    runs.num_written.append(sum(turn.num_written for turns in found for turn in turns))
    for turns in found:
        for kept, turn in zip(runs.turns, turns, strict=True):
            kept.append(turn)


def one_round(
    servers: Sequence[Server],
    script: Script,
    arguments: argparse.Namespace,
    num_clients: int,
    number: int,
    runs: Mapping[str, Runs] | None = None,
) -> None:
    """A round of each server after the other; what was seen is added to its runs."""
    for server in servers:
        kept = Runs() if runs is None else runs[server.name]
        asyncio.run(measure(server, script, arguments.reply_tokens, num_clients, number, kept))
        text = f"{server.name}, {num_clients} clients, round {number}: {kept.seconds[-1]:.1f} s"
        print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so many of them don't exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def result_of(server: Server, num_clients: int, runs: Runs) -> dict[str, Any]:
    """What a row of the table tells."""
    rates = [written / seconds for written, seconds in zip(runs.num_written, runs.seconds, strict=True)]
    result: dict[str, Any] = {"server": server.name, "clients": num_clients, "tokens_per_s": Spread.of(rates)}
    for name, turns in zip(("first", "second"), runs.turns, strict=True):
        seconds = [turn.first_s for turn in turns]
        cached = [turn.num_cached for turn in turns if turn.num_cached is not None]
        result[name] = {
            "median_s": percentile(seconds, 0.5),
            "p95_s": percentile(seconds, 0.95),
            "num_prompt_tokens": percentile([turn.num_prompt for turn in turns], 0.5),
            "num_cached_tokens": percentile(cached, 0.5) if cached else None,
        }
    return {**result, "load_s": server.load_s}


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--peer", choices=[TRANSFORMERS, LLAMA_CPP], action="append", default=[], help="measure this server as well"
    )
    options.add_argument("--llama-server", type=Path, metavar="BIN", help="llama.cpp's server")
    options.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp")
    options.add_argument("--ray", type=int, metavar="N", help="ours with N engines on a local Ray cluster as well")
    options.add_argument("--clients", type=numbers, default=[1, 4, 16], help="at one time, as 1,4,16")
    options.add_argument("--prompt-tokens", type=int, default=512, help="of a conversation's first message")
    options.add_argument("--reply-tokens", type=int, default=32)
    options.add_argument(
        "--conversations", type=int, default=6, help="of each server at least, for each number of clients"
    )
    arguments = options.parse_args(argv)
    if (LLAMA_CPP in arguments.peer) != bool(arguments.gguf and arguments.llama_server):
        options.error("--peer llama.cpp, --llama-server and --gguf go together")
    for path in (arguments.gguf, arguments.llama_server):
        if path is not None and not path.is_file():
            options.error(f"{path} is no file")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info, script = machine(), Script(arguments)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers: list[Server] = []
        environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        for name, command, model in commands(arguments, Path(folder)):
            servers.append(Server(name, command, model, environment))
            stack.callback(servers[-1].close)
        one_round(servers, script, arguments, 1, 0)  # warms up
        for num_clients in arguments.clients:
            runs = {server.name: Runs() for server in servers}
            for number in range(1, math.ceil(arguments.conversations / num_clients) + 1):
                one_round(servers, script, arguments, num_clients, number, runs)
            results += [result_of(server, num_clients, runs[server.name]) for server in servers]
    print(
        f"{arguments.model}, {arguments.dtype} on {arguments.device}; conversations of two turns, "
        f"replies of {arguments.reply_tokens} tokens; median and 95%, in seconds"
    )
    print_machine(info)
    print_report(results)
    print_json("serving", arguments, machine=info, results=results)


def print_report(results: list[dict[str, Any]]) -> None:
    header = ["server", "clients", "all together, tok/s", "first token", "95%", "prompt"]
    header += ["second turn's first token", "95%", "prompt, of it cached"]
    rows = []
    for result in results:
        first, second = result["first"], result["second"]
        cached = "?" if second["num_cached_tokens"] is None else second["num_cached_tokens"]
        rows.append(
            [
                result["server"],
                result["clients"],
                result["tokens_per_s"].text(),
                f"{first['median_s']:.2f}",
                f"{first['p95_s']:.2f}",
                first["num_prompt_tokens"],
                f"{second['median_s']:.2f}",
                f"{second['p95_s']:.2f}",
                f"{second['num_prompt_tokens']}, {cached}",
            ]
        )
    print_table(header, rows)


if __name__ == "__main__":
    main()
