"""Random bad requests over real sockets: each is refused in words, and others are answered all the while.

A seed makes the same requests again: `QWEN35MM_FUZZ_SEED=7 pytest -m '' tests/security/test_bad_requests.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.fronts import MIB, NAMES, PATIENCE_S, Name, started
from tests.security.fuzz import Bad, Target, raw, structured
from tests.security.targets import target_of

SEED = int(os.environ.get("QWEN35MM_FUZZ_SEED", "1"))
AT_ONCE = 12
# After this a connection on which nothing comes is given up: what was sent may be half a request.
SILENCE_S = 0.25
MAX_GROWTH = 200 * MIB
MAX_READ_BYTES = 64 * 2**10
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# Promised in docs/api.md for a page whose model is changed, or is a server's.
_PROMISED = {"chat": (501, 503)}


async def exchange(port: int, bad: Bad) -> bytes:
    """Sends it; what came back until the server ended the connection, or nothing more came."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return b""
    got = bytearray()
    try:
        for piece in bad.pieces:
            writer.write(piece)
            if len(bad.pieces) > 1:
                await asyncio.sleep(0)
        if bad.hangs_up:
            await asyncio.sleep(0)
            writer.transport.abort()
            return b""
        if bad.ends_writing:
            with contextlib.suppress(OSError):
                writer.write_eof()
        while len(got) < MAX_READ_BYTES:
            patience_s = PATIENCE_S if bad.is_whole and not got else SILENCE_S
            piece = await asyncio.wait_for(reader.read(2**16), patience_s)
            if not piece:
                break
            got += piece
    except ConnectionError:
        pass
    except asyncio.TimeoutError:
        assert got or not bad.is_whole, f"no answer within {PATIENCE_S:.0f} s to {bad.shown()}"
    finally:
        writer.transport.abort()
    return bytes(got)


def check(name: Name, bad: Bad, got: bytes) -> None:
    """No answer tells of a bug."""
    for found in _STATUS.finditer(got):
        status = int(found[1])
        if status < 500:
            continue
        words = got.partition(b"\r\n\r\n")[2]
        allowed = status in _PROMISED.get(name, ()) and b'"message"' in words
        assert allowed, f"{name} with seed {SEED} answered {got[:2000]!r} to {bad.shown()}"
    assert b"Traceback (most" not in got, bad.shown()


async def attack(target: Target, make: Callable[[Target, random.Random], Bad], numbers: range) -> Counter[str]:
    """Sends so many; the answers by their status."""
    found: Counter[str] = Counter()
    waiting = iter(numbers)
    kind, name = make.__name__, target.front.name

    async def send_some() -> None:
        for number in waiting:
            bad = make(target, random.Random(f"{SEED} {name} {kind} {number}"))
            got = await exchange(target.front.port, bad)
            check(name, bad, got)
            status = _STATUS.match(got)
            found[status[1].decode() if status else "none"] += 1

    await asyncio.gather(*(send_some() for _ in range(AT_ONCE)))
    return found


async def ask_honestly(target: Target, client: httpx.AsyncClient) -> None:
    """The small requests of another client."""
    front = target.front
    tiny: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    asked = {
        "serve": [("GET", "/health", None), ("GET", "/v1/models", None), ("POST", "/v1/chat/completions", tiny)],
        "chat": [
            ("POST", "/qwen35mm/api/start", {}),
            ("GET", "/v1/models", None),
            ("POST", "/v1/chat/completions", tiny),
        ],
        "review": [("POST", "/api/look", {}), ("POST", "/api/items", {"numbers": [0]})],
    }
    for method, path, body in asked[front.name]:
        answer = await client.request(method, path, json=body)
        assert answer.status_code == 200, (path, answer.text[:500])


async def stay_honest(target: Target, ended: asyncio.Event) -> list[float]:
    """Asks all the while; how long each round took. A busy machine is no failure, but no answer within `PATIENCE_S`."""
    waits: list[float] = []
    async with httpx.AsyncClient(
        base_url=target.front.address, headers=target.front.headers, timeout=PATIENCE_S
    ) as client:
        while not ended.is_set():
            began = time.monotonic()
            await ask_honestly(target, client)
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
    return waits


SIZES = [
    pytest.param(150, 75, id="some"),
    pytest.param(3_000, 1_000, marks=pytest.mark.slow, id="many"),
]


@pytest.mark.parametrize(("num_raw", "num_structured"), SIZES)
@pytest.mark.parametrize("name", NAMES)
async def test_bad_requests_are_refused_and_others_are_answered(
    name: Name, num_raw: int, num_structured: int, tmp_path: Path
) -> None:
    with started(name, tmp_path / name) as front:
        target = target_of(front)
        # Threads begin, what is imported late is, and caches begin to fill.
        warm_up = max(30, num_structured // 5)
        await attack(target, raw, range(warm_up))
        await attack(target, structured, range(warm_up))
        before = front.rss()
        ended = asyncio.Event()
        honest = asyncio.ensure_future(stay_honest(target, ended))
        began_s = time.monotonic()
        try:
            answers = await attack(target, raw, range(warm_up, warm_up + num_raw))
            told = await attack(target, structured, range(warm_up, warm_up + num_structured))
        except AssertionError as error:
            raise AssertionError(f"{error}\nand it wrote {''.join(front.said[-60:])}") from None
        finally:
            ended.set()
        waits = await honest
        after = front.rss()
        report = {
            "front": name,
            "seed": SEED,
            "raw": dict(sorted(answers.items())),
            "structured": dict(sorted(told.items())),
            "seconds": round(time.monotonic() - began_s, 1),
            "honest": len(waits),
            "longest_s": round(max(waits), 2),
            "growth_mib": round((after - before) / MIB),
        }
        print(json.dumps(report))
        front.check()
        assert after - before < MAX_GROWTH, report
        # Nonsense isn't all refused at the door: some of it reaches the routes.
        assert answers["400"] > 0
        assert told["200"] > 0
