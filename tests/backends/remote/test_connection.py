"""How long a request may take, how often it connects, and what is left of it when the connection is closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from qwen35mm.backends.remote import backend
from qwen35mm.backends.remote.deadline import RemoteTimeouts
from qwen35mm.contract import Image, Message
from qwen35mm.errors import EngineError, RequestTimeoutError
from tests.backends.remote.asking import PATIENCE_S, Asker, events_of, until
from tests.backends.remote.server import Act, Handler, ModelServer, fails, pieces, sends, stalls


async def test_requests_after_each_other_share_a_connection(server: ModelServer, asker: Asker) -> None:
    one = asker.backend()
    for _ in range(5):
        await events_of(one)
    assert (len(server.bodies), server.num_connections) == (5, 1)


async def test_a_server_that_stays_after_it_is_done_holds_nobody_up(server: ModelServer, asker: Asker) -> None:
    server.otherwise = sends(pieces(["Red."]), then=stalls)
    one = asker.backend(max_concurrent=1)
    for _ in range(2):
        await events_of(one)


async def test_headers_do_not_give_the_first_words_more_time(server: ModelServer, asker: Asker) -> None:
    def headers_then_words(handler: Handler) -> None:
        time.sleep(0.35)
        sends(pieces(["Red."]), pause_s=0.35)(handler)

    server.acts = [headers_then_words]
    with pytest.raises(RequestTimeoutError, match=r"sent nothing for 0\.4 s"):
        await asker.ask(timeouts=RemoteTimeouts(first_s=0.4, silence_s=5.0), max_attempts=1)


async def test_the_time_allowed_holds_while_the_models_name_is_looked_up(server: ModelServer, asker: Asker) -> None:
    server.model_acts = [stalls] * 3
    one = asker.backend(model=None, max_attempts=1)
    asked = [events_of(one, timeout_s=timeout_s) for timeout_s in (0.2, 0.1)]
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, RequestTimeoutError)
    with pytest.raises(RequestTimeoutError, match=r"no whole answer within 0\.1 s"):
        await asker.ask(model=None, timeout_s=0.1)


async def test_the_time_allowed_holds_while_media_are_read(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, server: ModelServer
) -> None:
    def never_ends(*_: Any) -> Any:
        server.ended.wait(5)

    monkeypatch.setattr(backend, "encode_by", never_ends)
    question = [Message("user", (Image("a.png"),))]
    with pytest.raises(RequestTimeoutError, match=r"not read within 0\.1 s"):
        await events_of(asker.backend(), question, timeout_s=0.1)
    with pytest.raises(RequestTimeoutError, match=r"not read within 0\.1 s"):
        await events_of(asker.backend(timeout_s=0.1), question)
    server.ended.set()


@pytest.mark.parametrize("act", [stalls, sends(pieces(["A "])[:2], then=stalls)])
async def test_closing_ends_what_runs_and_what_waits_with_an_error(server: ModelServer, asker: Asker, act: Act) -> None:
    server.otherwise = act
    one = asker.backend(max_concurrent=1)
    asked = [asyncio.create_task(events_of(one)) for _ in range(2)]
    await until(lambda: len(server.bodies) == 1)
    await asyncio.sleep(0.1)
    await one.aclose()
    for error in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S):
        assert isinstance(error, EngineError)
        assert "was closed" in str(error)
    assert (len(server.bodies), asker.waits_s) == (1, [])
    with pytest.raises(EngineError, match="was closed"):
        await one.connect()


async def test_closing_between_two_attempts_ends_the_request(server: ModelServer, asker: Asker) -> None:
    server.otherwise = fails(503)

    async def close(_: float) -> None:
        await one.aclose()

    one = asker.backend(sleep=close)
    with pytest.raises(EngineError, match="was closed"):
        await events_of(one)
    assert len(server.bodies) == 1
