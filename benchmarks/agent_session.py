"""An agent's session: seconds to the first token and tokens read, a turn, of ours and llama-server.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/random-0.8B /tmp/random-bf16.gguf
    llama-quantize /tmp/random-bf16.gguf /tmp/random-q8_0.gguf q8_0
    python -m benchmarks.agent_session --model /tmp/random-0.8B --weights int8 \\
        --peer llama.cpp --llama-server build/bin/llama-server --gguf /tmp/random-q8_0.gguf

Both serve one slot over HTTP. The session has a system prompt with tools and a task; then each turn brings the model's
call and its result, of 300 to 4,000 tokens, and every tenth a person's message. On the way:

- interrupted: the client hangs up while its prompt is read, and sends the same again.
- edited: the client goes back some turns, with another result there.
- other agent: a second agent with its own system prompt asks, and the first goes on.
- restart: the server's process ends and starts again, with what it keeps on disk.

Random weights write no calls, so all replies are scripted. Each request generates one token, which `logit_bias` forces
to be `<tool_call>`: the scripted call, which follows in the next prompt, begins with the same token. So the next prompt
begins with exactly what a server has in its cache, as it would with a real model. A pause after each turn stands for
the tool's run.

"own" are the tokens that the turn adds to what the server has seen. A server that reads more has lost something.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import peers
from benchmarks.frame import Rows, Sample, parse, parser, report
from benchmarks.peers import LLAMA_CPP
from benchmarks.serving import OURS, Server
from qwen35mm.assets import asset_path
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Message
from qwen35mm.prompt import ChatTemplate, PromptBuilder
from qwen35mm.prompt.build import num_in_common
from qwen35mm.prompt.calls import OPEN
from qwen35mm.tokenizer import Tokenizer

_TURN_S = 3600.0
_INTERRUPTED_AFTER_S = 2.0
_PERSON_EVERY = 10
_RESULT_TOKENS = (300, 4000)

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One request of the session.

    Attributes:
        what: its name in the table.
        agent: whose conversation this is.
        messages: the whole conversation.
        hangs_up: whether the client leaves before the answer.
        after_restart: whether the server starts anew before it.
    """

    what: str
    agent: int
    messages: Conversation
    hangs_up: bool = False
    after_restart: bool = False


class Script:
    """The requests of a session, the same for every server. Needs no weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = Path(arguments.model)
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self._builder = PromptBuilder(
            self.tokenizer, ChatTemplate.from_pretrained(folder), ModelConfig.from_pretrained(folder)
        )
        self._words = asset_path("evaluation.txt").read_text("utf-8").split()
        self._arguments = arguments
        self.tools = [self._tool(name) for name in ("read_file", "edit_file", "run_command", "search", "list_files")]

    def steps(self) -> Iterator[Step]:
        """The requests in order."""
        turns = self._arguments.turns
        first, other = self._beginning(0), self._beginning(1)
        yield Step("cold", 0, first)
        for number in range(2, turns + 1):
            first = self._with_result(first, number)
            what, restarts = "turn", False
            if number == max(turns // 4, 2):
                yield Step("interrupted", 0, first, hangs_up=True)
                what = "asked again"
            if number == turns // 2:
                yield Step("other agent", 1, other)
                what = "after the other agent"
            if number == turns * 5 // 8:
                other = self._with_result(other, number)
                yield Step("other agent again", 1, other)
                what = "after the other agent"
            if number == turns * 3 // 4:
                what, restarts = "restart", True
            if number == turns * 7 // 8:
                what, first = "edited", self._edited(first, number)
            yield Step(what, 0, list(first), after_restart=restarts)

    def ids(self, messages: Conversation) -> Any:
        """The prompt's token ids."""
        read = [Message.from_dict(message) for message in messages]
        return self._builder.prompt(read, [], enable_thinking=False, tools=self.tools).token_ids

    def _beginning(self, agent: int) -> Conversation:
        system = self._text(f"system {agent}", self._arguments.system_tokens)
        return [{"role": "system", "content": system}, {"role": "user", "content": self._text(f"task {agent}", 200)}]

    def _with_result(self, messages: Conversation, number: int) -> Conversation:
        """The conversation with the model's call, its result, and sometimes a person's message."""
        call_id, path = f"call_{number}", self._text(f"path {number}", 8)
        function = {"name": "read_file", "arguments": json.dumps({"text": path})}
        call = {"id": call_id, "type": "function", "function": function}
        size = random.Random(f"size {number}").randint(*_RESULT_TOKENS)
        result = self._text(f"result {number} {len(messages)}", size * self._arguments.result_percent // 100)
        added: Conversation = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        added.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if number % _PERSON_EVERY == 0:
            added.append({"role": "assistant", "content": self._text(f"answer {number}", 60)})
            added.append({"role": "user", "content": self._text(f"wish {number}", 100)})
        return [*messages, *added]

    def _edited(self, messages: Conversation, number: int) -> Conversation:
        """The conversation up to a result some turns ago, with another result in its place."""
        results = [at for at, message in enumerate(messages) if message["role"] == "tool"]
        at = results[max(len(results) - 3, 0)]
        return [*messages[:at], {**messages[at], "content": self._text(f"edited {number}", 400)}]

    def _tool(self, name: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        function = {"name": name, "description": self._text(name, 60), "parameters": parameters}
        return {"type": "function", "function": function}

    def _text(self, name: str, num_tokens: int) -> str:
        chosen = random.Random(name).choices(self._words, k=num_tokens)
        return self.tokenizer.decode(self.tokenizer.encode_plain(" ".join(chosen))[:num_tokens]).strip("\ufffd ")


def body_of(step: Step, script: Script) -> dict[str, Any]:
    """A request's body. Its one token is the beginning of the call that the next prompt has."""
    bias = {str(script.tokenizer.control_ids[OPEN]): 100}
    body = {"model": "default", "messages": step.messages, "tools": script.tools, "temperature": 0, "max_tokens": 1}
    return body | {"logit_bias": bias, "chat_template_kwargs": {"enable_thinking": False}}


class Client:
    """Asks one server, which it starts and may start again."""

    def __init__(self, name: str, command: Sequence[str], script: Script, stack: ExitStack) -> None:
        self._name, self._command, self._stack = name, command, stack
        self._script = script
        self._server = self._start()

    def _start(self) -> Server:
        server = Server(self._name, self._command, "default")
        self._stack.callback(server.close)
        return server

    def ask(self, step: Step) -> tuple[float, int] | None:
        """Seconds to the first token, and tokens that were read; None if the client hung up."""
        if step.after_restart:
            self._server.close()
            self._server = self._start()
        body = body_of(step, self._script)
        begun_s = time.perf_counter()
        timeout_s = _INTERRUPTED_AFTER_S if step.hangs_up else _TURN_S
        try:
            answer = httpx.post(f"{self._server.address}/v1/chat/completions", json=body, timeout=timeout_s)
        except httpx.ReadTimeout:
            if not step.hangs_up:
                raise
            return None
        if answer.status_code != 200:
            raise SystemExit(f"{self._name} answered {answer.status_code}: {answer.text[:500]}")
        return time.perf_counter() - begun_s, answer.json()["timings"]["prompt_n"]


def measure(script: Script, clients: dict[str, Client], pause_s: float) -> Rows:
    """Asks every server the same, one request after the other. A row is a request."""
    rows: Rows = []
    seen: list[Any] = []
    for number, step in enumerate(script.steps(), start=1):
        ids = script.ids(step.messages)
        own = len(ids) - max((num_in_common(ids, each) for each in seen), default=0)
        row: Sample = {"request": number, "what": step.what, "prompt": len(ids), "own": own}
        for name, client in clients.items():
            found = client.ask(step)
            row |= {f"{name}: read": None, f"{name}: s": None}
            if found is not None:
                row |= {f"{name}: read": found[1], f"{name}: s": found[0]}
            print(f"{name}, {step.what}: {found}", file=sys.stderr, flush=True)
            time.sleep(pause_s)
        if LLAMA_CPP in clients and not step.hangs_up:
            row["times sooner"] = row[f"{LLAMA_CPP}: s"] / row[f"{OURS}: s"]
        if not step.hangs_up:
            seen.append(ids)
        rows.append(row)
    return rows


def commands(arguments: argparse.Namespace, length: int, folder: str) -> dict[str, list[str]]:
    threads = str(torch.get_num_threads())
    ours = [sys.executable, "-m", "qwen35mm", "serve", "--model", str(arguments.model), "--port", "{port}"]
    ours += ["--dtype", arguments.dtype, "--weights", arguments.weights, "--device", arguments.device]
    ours += ["--slots", "1", "--threads", threads, "--context-length", str(length), "--cache-dir", folder, "--no-store"]
    found = {OURS: ours}
    if LLAMA_CPP in arguments.peer:
        llama = [str(arguments.program), "--model", str(arguments.gguf[0]), "--port", "{port}", "--threads", threads]
        found[LLAMA_CPP] = [*llama, "--parallel", "1", "--ctx-size", str(length), "--no-webui"]
    return found


def main() -> None:
    options = parser(__doc__, repeats=None)
    peers.add_options(options, "llama-server")
    options.add_argument("--weights", default="int8", help="of ours; int8 is nearest to q8_0")
    options.add_argument("--turns", type=int, default=30)
    options.add_argument("--system-tokens", type=int, default=20_000)
    options.add_argument("--result-percent", type=int, default=100, help="of the results' lengths, 300 to 4,000 tokens")
    options.add_argument("--pause", type=float, default=3.0, metavar="S", help="between two requests")
    arguments = parse(options)
    peers.check_options(options, arguments, "llama-server")
    script = Script(arguments)
    length = max(len(script.ids(step.messages)) for step in script.steps()) + 256
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name, command in commands(arguments, length, folder).items():
            clients[name] = Client(name, command, script, stack)
        with suppress(KeyboardInterrupt):
            rows = measure(script, clients, arguments.pause)
    report("agent_session", arguments, {"One session": rows})


if __name__ == "__main__":
    main()
