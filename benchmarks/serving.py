"""Servers with several clients: tokens a second and time to the first token, of ours and two peers.

    python -m benchmarks.make_random --size 0.8B --digits --out /tmp/digits-0.8B
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/digits-0.8B /tmp/digits-bf16.gguf
    python -m benchmarks.serving --model /tmp/digits-0.8B --peer transformers \\
        --peer llama.cpp --llama-server build/bin/llama-server --gguf /tmp/digits-bf16.gguf

Each client has a streamed conversation of two turns: a prompt of random words, then a short question after the reply.
All clients begin together. The first token counts when the first event with text arrives. The second turn's time shows
what a server caches of a conversation. "prompt tok/s" are all clients' first prompts until the last one's first token.

`qwen35mm serve` and `llama-server` have as many slots as the largest number of clients; `transformers serve` answers
one request at a time. All get the same prompts, each once, and decode greedily. The checkpoint must be made with
`--digits`: without it most tokens have no text. transformers serves the language model only, since the whole model
needs torchvision.

With `--beside N` it measures instead what a prompt of N tokens does to others: alone, beside a short request of 50
tokens every few seconds, and beside one reply that runs all the time.

    python -m benchmarks.serving --model /tmp/digits-0.8B --weights int8 --beside 40000
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import peers
from benchmarks.frame import Rows, Sample, Spread, numbers, parse, parser, report
from benchmarks.peers import LLAMA_CPP, TRANSFORMERS
from qwen35mm.assets import asset_path
from qwen35mm.tokenizer import Tokenizer

OURS = "qwen35mm"
QUESTION_TOKENS = 16
SHORT_TOKENS = 50
# Seconds from one short request to the next.
_SHORT_EVERY_S = 5.0
# Room for the template, and for replies whose text has more tokens in the next prompt.
_ROOM = 256
_START_S = 600.0
_TURN_S = 3600.0


@dataclass(frozen=True)
class Turn:
    """What a client saw of one turn; `num_cached` is None if the server doesn't report it."""

    first_s: float
    num_prompt: int
    num_cached: int | None
    num_written: int


@dataclass
class Seen:
    """Events of a reply so far, those with text."""

    num_events: int = 0


class Server:
    """A server in its own process, ready for requests.

    Args:
        name: its name in the table.
        command: starts it; `{port}` is replaced by the port.
        model: the server's name of its model.
    """

    def __init__(self, name: str, command: Sequence[str], model: str) -> None:
        self.name, self.model = name, model
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        # A pipe without a reader would block the server.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        started = [part.replace("{port}", str(port)) for part in command]
        begun_s = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        files: Any = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(started, env=environment, **files)
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
        while time.perf_counter() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.address}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        self._output.seek(0)
        words = self._output.read().decode(errors="replace")[-2000:]
        raise SystemExit(f"{self.name} isn't ready (status {self._process.poll()}):\n{words}")


def commands(arguments: argparse.Namespace, folder: Path) -> list[tuple[str, list[str], str]]:
    """Name, command and model name of each server. `folder` is for files that a command needs."""
    most, threads = max(arguments.clients), str(torch.get_num_threads())
    length = arguments.prompt_tokens + QUESTION_TOKENS + 2 * arguments.reply_tokens + _ROOM
    if arguments.beside:
        length = arguments.beside + SHORT_TOKENS + _ROOM
    ours = [sys.executable, "-m", "qwen35mm", "serve", "--model", str(arguments.model), "--port", "{port}"]
    ours += ["--dtype", arguments.dtype, "--device", arguments.device, "--slots", str(most), "--threads", threads]
    ours += ["--weights", arguments.weights] if arguments.weights else []
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
        llama = [str(arguments.program), "--model", str(arguments.gguf[0]), "--port", "{port}", "--threads", threads]
        llama += ["--parallel", str(most), "--ctx-size", str(most * length), "--no-webui"]
        found.append((LLAMA_CPP, llama, "default"))
    return found


def language_model(checkpoint: Path, folder: Path) -> Path:
    """Makes a folder with only the language model: links to the checkpoint's files, and its part of the config."""
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
    """The clients' messages: random words, the same for every server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tokenizer = Tokenizer.from_pretrained(Path(arguments.model))
        self._words = asset_path("evaluation.txt").read_text("utf-8").split()
        self._num_tokens = (arguments.prompt_tokens, QUESTION_TOKENS)

    def words(self, *name: int) -> str:
        """The text of this name. The name's last number is the turn, 0 or 1, which decides the length."""
        return self.text(self._num_tokens[name[-1]], *name)

    def text(self, count: int, *name: int) -> str:
        """The text of this name, of about `count` tokens."""
        chosen = random.Random(str(name)).choices(self._words, k=count)
        return self._tokenizer.decode(self._tokenizer.encode_plain(" ".join(chosen))[:count]).strip("\ufffd ")


async def ask(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen | None = None) -> tuple[str, Turn]:
    """Reads one streamed reply; `seen` counts its events while they come."""
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
                if text and seen is not None:
                    seen.num_events += 1
                texts.append(text)
    if math.isnan(first_s):
        raise SystemExit("a reply had no text: was the checkpoint made with --digits?")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return "".join(texts).strip(), Turn(first_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


def asked(reply_tokens: int) -> dict[str, Any]:
    """A request's body without its messages."""
    options = {"temperature": 0, "max_tokens": reply_tokens, "stream": True, "stream_options": {"include_usage": True}}
    return {**options, "chat_template_kwargs": {"enable_thinking": False}}


async def converse(server: Server, script: Script, reply_tokens: int, *name: int) -> list[Turn]:
    """Runs the two turns of one client."""
    messages, turns = [], []
    options = asked(reply_tokens)
    async with httpx.AsyncClient(base_url=server.address, timeout=_TURN_S) as client:
        for turn in range(2):
            messages.append({"role": "user", "content": script.words(*name, turn)})
            text, seen = await ask(client, {"model": server.model, "messages": messages, **options})
            messages.append({"role": "assistant", "content": text})
            turns.append(seen)
    return turns


async def one_round(
    server: Server, script: Script, reply_tokens: int, num_clients: int, number: int
) -> tuple[float, list[list[Turn]]]:
    """Runs all clients together: tokens a second, and each client's turns."""
    begun_s = time.perf_counter()
    clients = [converse(server, script, reply_tokens, num_clients, number, each) for each in range(num_clients)]
    found = await asyncio.gather(*clients)
    seconds = time.perf_counter() - begun_s
    print(f"{server.name}, {num_clients} clients, round {number}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return sum(turn.num_written for turns in found for turn in turns) / seconds, found


def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> Rows:
    """Runs rounds on each server in turn. The first round is a warm-up and isn't counted."""
    script, rows = Script(arguments), []
    for server in servers:
        asyncio.run(one_round(server, script, arguments.reply_tokens, 1, 0))
    for num_clients in arguments.clients:
        rounds = range(1, math.ceil(arguments.conversations / num_clients) + 1)
        runs = {server.name: [] for server in servers}
        for number in rounds:
            for server in servers:
                found = asyncio.run(one_round(server, script, arguments.reply_tokens, num_clients, number))
                runs[server.name].append(found)
        rows += [row_of(server, num_clients, runs[server.name]) for server in servers]
    return rows


def row_of(server: Server, num_clients: int, runs: list[tuple[float, list[list[Turn]]]]) -> Sample:
    row: Sample = {"server": server.name, "clients": num_clients, "tok/s": Spread.of(rate for rate, _ in runs)}
    for number, name in enumerate(("first turn", "second turn")):
        turns = [client[number] for _, clients in runs for client in clients]
        cached = [turn.num_cached for turn in turns if turn.num_cached is not None]
        seconds = [turn.first_s for turn in turns]
        row |= {f"{name}: first token, s": percentile(seconds, 0.5), f"{name}: 95 %": percentile(seconds, 0.95)}
        row[f"{name}: worst"] = max(seconds)
        row[f"{name}: prompt"] = percentile([turn.num_prompt for turn in turns], 0.5)
        row[f"{name}: cached"] = percentile(cached, 0.5) if cached else None
    firsts = [[client[0] for client in clients] for _, clients in runs]
    row["prompt tok/s"] = Spread.of(
        sum(turn.num_prompt for turn in turns) / max(turn.first_s for turn in turns) for turns in firsts
    )
    return {**row, "load, s": server.load_s}


async def beside(server: Server, script: Script, arguments: argparse.Namespace) -> Sample:
    """What a long prompt and others cost each other on one server."""
    async with httpx.AsyncClient(base_url=server.address, timeout=_TURN_S) as client:

        async def first_token(count: int, *name: int, reply: int = 1, seen: Seen | None = None) -> float:
            messages = [{"role": "user", "content": script.text(count, *name)}]
            body = {"model": server.model, "messages": messages, **asked(reply)}
            return (await ask(client, body, seen))[1].first_s

        async def long(number: int) -> float:
            """The long prompt's first token."""
            seconds = await first_token(arguments.beside, number)
            print(f"{server.name}, long prompt {number}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return seconds

        await first_token(SHORT_TOKENS, 0)
        short_alone_s = await first_token(SHORT_TOKENS, 1)
        alone_s = await long(10)
        running, shorts = asyncio.ensure_future(long(11)), []
        while not (await asyncio.wait([running], timeout=_SHORT_EVERY_S))[0]:
            shorts.append(await first_token(SHORT_TOKENS, 2, len(shorts)))
        with_shorts_s, seen = await running, Seen()
        if not shorts:
            raise SystemExit(f"the long prompt took {with_shorts_s:.1f} s, too short for others beside it")
        reply = asyncio.ensure_future(first_token(SHORT_TOKENS, 3, reply=arguments.beside, seen=seen))
        await asyncio.sleep(_SHORT_EVERY_S)
        before, before_s = seen.num_events, time.perf_counter()
        with_reply_s = await long(12)
        beside_rate = (seen.num_events - before) / (time.perf_counter() - before_s)
        reply.cancel()
        await asyncio.gather(reply, return_exceptions=True)
    row: Sample = {"server": server.name, "short alone, s": short_alone_s, "long alone, s": alone_s}
    row |= {"short beside, s": percentile(shorts, 0.5), "largest": max(shorts), "shorts": len(shorts)}
    row |= {"long with shorts, s": with_shorts_s, "later, %": 100 * (with_shorts_s / alone_s - 1)}
    row |= {"reply beside, tok/s": beside_rate, "reply alone, tok/s": before / (_SHORT_EVERY_S - short_alone_s)}
    return {**row, "long with reply, s": with_reply_s, "load, s": server.load_s}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of the values at or below it."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def main() -> None:
    options = parser(__doc__, repeats=None)
    peers.add_options(options, "llama-server")
    options.add_argument("--ray", type=int, metavar="N", help="ours with N engines on a local Ray cluster as well")
    options.add_argument("--clients", type=numbers, default=[1, 4, 16], help="at one time, as 1,4,16")
    options.add_argument(
        "--beside", type=int, default=0, metavar="N", help="measure others beside a prompt of N tokens"
    )
    options.add_argument("--weights", help="our format, as int8")
    options.add_argument("--prompt-tokens", type=int, default=512, help="of a conversation's first message")
    options.add_argument("--reply-tokens", type=int, default=32)
    options.add_argument("--conversations", type=int, default=6, help="least for each server and number of clients")
    arguments = parse(options)
    peers.check_options(options, arguments, "llama-server")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for each in commands(arguments, Path(folder)):
            servers.append(Server(*each))
            stack.callback(servers[-1].close)
        if arguments.beside:
            script = Script(arguments)
            tables = {"Beside a long prompt": [asyncio.run(beside(each, script, arguments)) for each in servers]}
        else:
            tables = {"Conversations of two turns": measure(servers, arguments)}
    report("serving", arguments, tables)


if __name__ == "__main__":
    main()
