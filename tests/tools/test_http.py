"""Sessions with servers over HTTP, which do what they shouldn't."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm.tools import servers as module
from qwen35mm.tools import transports
from qwen35mm.tools.answers import ToolAnswer
from qwen35mm.tools.servers import ToolServers
from tests.tools.fake_http import PATIENCE_S, Handler, fake_http, result

EVENTS = {"Content-Type": "text/event-stream"}


async def called(servers: ToolServers) -> ToolAnswer:
    (tool,) = await servers.tools(["fake"])
    return await servers.call(tool, {})


async def answer_to(data: Any, headers: dict[str, str] | None = None) -> ToolAnswer:
    """What we make of a response; `data` is made of the request."""
    with (
        fake_http(lambda handler, asked: handler.send_whole(200, data(asked), headers)) as (_, given),
        ToolServers([given]) as servers,
    ):
        return await called(servers)


def event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"


async def test_a_call_over_http_as_json_and_as_events() -> None:
    assert (await answer_to(lambda asked: result(asked, "hi"))).text == "hi"
    assert (await answer_to(lambda asked: event(result(asked, "ho\n")), EVENTS)).text == "ho\n"


async def test_a_compressed_response_is_refused() -> None:
    seen: set[str | None] = set()

    def go(handler: Handler, asked: dict[str, Any]) -> None:
        seen.update(handler.server.encodings)
        handler.send_whole(200, gzip.compress(result(asked, "packed")), {"Content-Encoding": "gzip"})

    with fake_http(go) as (_, given), ToolServers([replace(given, headers={"Accept-Encoding": "gzip"})]) as servers:
        answer = await called(servers)
    assert (answer.text, answer.has_failed) == ("Error: the tool server ended during the call.", True)
    assert seen == {"identity"}


async def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "MAX_TURN_BYTES", 50_000)
    assert (await answer_to(lambda asked: result(asked, "x" * 40_000))).text == "x" * 40_000
    for data, headers in ((lambda asked: result(asked, "x" * 60_000), None), (lambda asked: b"x" * 60_000, EVENTS)):
        assert "ended during the call" in (await answer_to(data, headers)).text


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (b"", b"", "application/json"),
        # The quote opens no string of the JSON. In that charset a comma is another byte, so the text is read as UTF-8.
        (b': "\ndata: ', b"\n\n", "text/event-stream"),
        (b"data: ", b"\n\n", "text/event-stream; charset=cp037"),
    ],
)
async def test_too_many_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, before: bytes, after: bytes, kind: str
) -> None:
    monkeypatch.setattr(transports, "MAX_TURN_VALUES", 1_000)

    def data(num: int) -> Any:
        def of(asked: dict[str, Any]) -> bytes:
            return before + result(asked, "a, b, c", num) + after

        return of

    headers = {"Content-Type": kind}
    # Commas in texts don't count.
    assert (await answer_to(data(300), headers)).text.count("a, b, c") == 300
    assert "ended during the call" in (await answer_to(data(400), headers)).text


async def test_redirects_lead_to_no_other_origin() -> None:
    with fake_http(lambda handler, asked: handler.say(asked, {})) as (other, _):

        def go(handler: Handler, asked: dict[str, Any]) -> None:
            handler.server.num_redirected += 1
            if handler.server.num_redirected == 3:
                handler.send_whole(200, result(asked, "here"))
            else:
                away = asked["params"]["arguments"].get("away")
                handler.send_whole(307, b"", {"Location": other.url if away else "/mcp"})

        with fake_http(go) as (_, given), ToolServers([given]) as servers:
            (tool,) = await servers.tools(["fake"])
            assert (await servers.call(tool, {"away": True})).has_failed
            assert (await servers.call(tool, {})).text == "here"
        assert other.heard.empty()


async def test_a_server_cant_ask_for_the_model_the_folders_or_the_persons_words() -> None:
    asks = ["sampling/createMessage", "roots/list", "elicitation/create"]
    params = {"messages": [], "maxTokens": 1, "message": "?", "requestedSchema": {"type": "object", "properties": {}}}
    answers: list[dict[str, Any]] = []

    def go(handler: Handler, asked: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for number, method in enumerate(asks):
            handler.wfile.write(event(_request(method, 70 + number, params)))
            while "error" not in (heard := handler.server.heard.get(timeout=PATIENCE_S)):
                assert "result" not in heard
            answers.append(heard)
        handler.wfile.write(event(result(asked, "none of it")))

    with fake_http(go) as (http, given), ToolServers([given]) as servers:
        (tool,) = await servers.tools(["fake"])
        assert http.hear("initialize")["params"]["capabilities"] == {}
        assert (await servers.call(tool, {})).text == "none of it"
    assert [answer["id"] for answer in answers] == [70, 71, 72]


def _request(method: str, number: int, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


def hang(handler: Handler, asked: dict[str, Any]) -> None:
    """Answers no call that is to hang."""
    if asked["params"]["arguments"].get("hangs"):
        handler.server.is_over.wait(PATIENCE_S)
    handler.send_whole(200, result(asked, "on"))


async def test_each_of_two_cancelled_calls_is_told_of_by_its_number() -> None:
    with fake_http(hang) as (http, given), ToolServers([given]) as servers:
        (tool,) = await servers.tools(["fake"])
        calls = [asyncio.ensure_future(servers.call(tool, {"hangs": number})) for number in (1, 2)]
        heard = [await asyncio.to_thread(http.hear, "tools/call") for _ in calls]
        numbers = {each["params"]["arguments"]["hangs"]: each["id"] for each in heard}
        for number in (2, 1):
            calls[number - 1].cancel()
            cancelled = await asyncio.to_thread(http.hear, "notifications/cancelled")
            assert cancelled["params"]["requestId"] == numbers[number]
        # The server answers pings, so its session goes on.
        assert (await servers.call(tool, {})).text == "on"
        assert "initialize" not in {each.get("method") for each in http.heard.queue}


async def test_a_server_without_a_goodbye_doesnt_hold_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "_END_S", PATIENCE_S)
    with fake_http(hang) as (http, given):
        http.says_goodbye = False
        servers = ToolServers([replace(given, timeout_s=3600.0)])
        await servers.tools(["fake"])
        await asyncio.wait_for(asyncio.to_thread(servers.close), PATIENCE_S / 2)
