"""Fifty clients at once, one in five of which hangs up at a random moment: nothing is lost, each key has its share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from tests.children import ROOT, environment
from tests.server.conftest import HTTP, PATIENCE_S, sample, serving

KEYS = [f"key-{name}-of-somebody" for name in "abcde"]
NUM_CLIENTS = 50
PICTURES = [{"type": "image_url", "image_url": {"url": sample(name)}} for name in ("one-shape.png", "two-shapes.jpg")]


def asked(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """An address, and what is sent there."""
    text = " ".join(chance.choices(["red", "circle", "how many", "shapes", "what"], k=chance.randrange(1, 40)))
    tokens, stream = chance.randrange(1, 12), chance.random() < 0.7
    match chance.randrange(4):
        case 0:
            said = {"max_tokens": tokens, "model": "default", "messages": [{"role": "user", "content": text}]}
            return "/v1/messages", {**said, "stream": stream}
        case 1:
            return "/v1/responses", {"input": text, "max_output_tokens": tokens, "stream": stream}
    content = [{"type": "text", "text": text}, *chance.choices(PICTURES, k=chance.choice([0, 0, 1]))]
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "stream": stream}


async def client(
    address: str, key: str, chance: random.Random, num_requests: int, until_s: float, waits: list[float]
) -> None:
    """Asks, one request after the other; how long each answer's first byte took is added to `waits`."""
    limits = httpx.Limits(max_keepalive_connections=1)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S * 5, limits=limits) as session:
        for _ in range(num_requests):
            if time.monotonic() > until_s:
                return
            path, body = asked(chance)
            hangs_up = chance.random() < 0.2
            began = time.monotonic()

            async def ask(path: str = path, body: dict[str, Any] = body, began: float = began) -> None:
                async with session.stream("POST", path, json=body, headers={"x-api-key": key}) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    waits.append(time.monotonic() - began)
                    said = await answer.aread()
                    assert b'"error"' not in said.replace(b'"error":null', b""), said

            if hangs_up:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ask(), chance.random())
            else:
                await ask()


async def storm(address: str, num_requests: int, seconds: float) -> dict[str, list[float]]:
    """The waits of each key."""
    waits: dict[str, list[float]] = defaultdict(list)
    until_s = time.monotonic() + seconds
    clients = []
    for number in range(NUM_CLIENTS):
        key = KEYS[number % len(KEYS)]
        clients.append(client(address, key, random.Random(number), num_requests, until_s, waits[key]))
    await asyncio.gather(*clients)
    return waits


def wait_until_idle(address: str) -> None:
    """Until no request is with the engine or in line: that takes a step where somebody has hung up."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        told = HTTP.get(f"{address}/metrics", headers={"x-api-key": KEYS[0]}).text
        if "qwen35mm_requests_running 0.0" in told and "qwen35mm_requests_waiting 0.0" in told:
            return
        time.sleep(0.02)
    raise AssertionError("a place is held by nobody")


async def test_nothing_is_lost_by_fifty_clients(backend: LocalBackend) -> None:
    with serving(create_app(backend, keys=Keys(KEYS), num_places=2)) as address:
        waits = await storm(address, 1, PATIENCE_S)
        await asyncio.to_thread(wait_until_idle, address)
        assert sum(map(len, waits.values())) > NUM_CLIENTS / 2
    assert await asyncio.to_thread(backend.wait_idle, PATIENCE_S)
    assert backend.engine._engine is not None
    backend.engine._engine.check_integrity()


@pytest.mark.slow
async def test_fifty_clients_for_a_minute(tmp_path: Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.served", *KEYS],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(**kept, OMP_NUM_THREADS="1"),
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        found = re.search(rb"(http://[0-9.:]+)", process.stdout.readline())
        assert found, (tmp_path / "log").read_text()
        address = found[1].decode()
        server = psutil.Process(process.pid)
        await storm(address, 1, PATIENCE_S)  # threads begin, modules are imported
        await asyncio.to_thread(wait_until_idle, address)
        files, connections, memory = server.num_fds(), len(server.net_connections()), server.memory_info().rss
        waits = await storm(address, 10**6, 60)
        await asyncio.to_thread(wait_until_idle, address)
        # Connections that were kept end after five seconds.
        deadline = time.monotonic() + PATIENCE_S
        while server.num_fds() > files and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        after = (server.num_fds(), len(server.net_connections()), server.memory_info().rss)
        medians = {key: statistics.median(each) for key, each in waits.items()}
        print(
            {key: (len(waits[key]), round(median, 3)) for key, median in medians.items()},
            (files, connections, memory),
            after,
        )
        assert after[0] <= files
        assert after[1] <= connections
        assert min(map(len, waits.values())) > 10
        assert max(medians.values()) < 2 * min(medians.values())
        process.terminate()
        told = await asyncio.to_thread(process.communicate, timeout=5 * PATIENCE_S)
        assert told[0].endswith(b"whole\n"), (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
