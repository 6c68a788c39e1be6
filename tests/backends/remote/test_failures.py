"""A server that fails, stalls, closes, and sends nonsense: what is tried again, what is said at the end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from email.utils import formatdate

import pytest

from qwen35mm.backends.remote.deadline import RemoteTimeouts
from qwen35mm.backends.remote.faults import MAX_RETRY_AFTER_S, delay_s, read_retry_after, stream_error
from qwen35mm.contract import Event, GenerationRequest, SamplingParams, TextDelta
from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RequestError, RequestTimeoutError
from tests.backends.events import result_of
from tests.backends.remote.asking import QUESTION, Asker, events_of
from tests.backends.remote.server import (
    Act,
    ModelServer,
    answers,
    chunk,
    closes,
    event,
    fails,
    pieces,
    sends,
    stalls,
)

LONG = RemoteTimeouts(first_s=30.0, silence_s=30.0)


@pytest.mark.parametrize("statuses", [(408, 409, 425), (429, 500, 502), (503, 503, 504)])
async def test_what_passes_is_tried_again(server: ModelServer, asker: Asker, statuses: tuple[int, ...]) -> None:
    server.acts = [fails(status, {"error": {"message": "not now"}}) for status in statuses]
    assert (await asker.ask()).text == "A red square."
    assert asker.waits_s == [0.5, 1.0, 2.0]
    assert len(server.bodies) == 4
    assert all(body == server.bodies[0] for body in server.bodies)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (429, QueueFullError, 'too many requests already: "not now".*tried 2 times'),
        (503, EngineError, "failed with 503 .*not now.*tried 2 times"),
        (408, RequestTimeoutError, "gave up waiting.*tried 2 times"),
    ],
)
async def test_after_the_last_attempt_the_error_says_what_the_server_said(
    server: ModelServer, asker: Asker, status: int, kind: type[Qwen35mmError], message: str
) -> None:
    server.otherwise = fails(status, {"error": {"message": "not now"}})
    with pytest.raises(kind, match=message):
        await asker.ask(max_attempts=2)
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "the context is 4096 tokens"}}, "the context is 4096 tokens"),
        ({"error": "the context is 4096 tokens"}, "the context is 4096 tokens"),
        ({"object": "error", "message": "the context is 4096 tokens", "code": 400}, "the context is 4096 tokens"),
        ({"detail": "the context is 4096 tokens"}, "the context is 4096 tokens"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too large", "input": "x"}]}, "body.n: too large"),
        (b"plain words\x1b[31m\r\nand more", "plain words [31m and more"),
        ({"error": {"message": "long " * 1000}}, "long " * 60 + "..."),
        # A parameter that is only mentioned gets no advice.
        ({"error": "The context is 4096 tokens. Reduce max_tokens"}, "The context is 4096 tokens. Reduce max_tokens"),
    ],
)
async def test_a_refusal_is_not_repeated_and_is_said_safely(
    server: ModelServer, asker: Asker, body: object, said: str
) -> None:
    server.acts = [fails(400, body)]
    with pytest.raises(RequestError) as caught:
        await asker.ask(params=SamplingParams(max_tokens=8192))
    assert str(caught.value) == f'The server at {server.host} refused the request with 400 (Bad Request): "{said}".'
    assert (len(server.bodies), asker.waits_s) == (1, [])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (fails(401, {"error": {"message": "no"}}), "Check the API key"),
        (fails(403, b"<html>no</html>"), r"403 \(Forbidden\)\. Check the API key"),
        (fails(404, {"detail": "Not Found"}), "usually ends in /v1, and the model's name"),
        (fails(413), "Send smaller or fewer media"),
        (fails(307, b"", Location="http://elsewhere/"), "points to another address"),
        (fails(200, b"<html>Log in</html>", Content_Type="text/html"), "doesn't speak OpenAI's API.*text/html"),
        (fails(200, {"choices": []}), "doesn't speak OpenAI's API.*application/json"),
        (sends([event(chunk(finish_reason="content_filter"))]), "withheld"),
        (sends([event({"error": {"message": "too long", "code": 400}})]), "400 .*too long"),
    ],
)
async def test_what_will_not_pass_is_an_error_at_once(
    server: ModelServer, asker: Asker, act: Act, message: str
) -> None:
    server.acts = [act]
    with pytest.raises(RequestError, match=message):
        await asker.ask()
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "body",
    [
        # The words of the server of transformers, then those of others.
        {"detail": "Unexpected fields in the request: {'top_k', 'min_p'}"},
        {"error": {"message": "Unknown parameter: 'top_k', 'min_p'."}},
        {"detail": [{"loc": ["body", name], "msg": "Extra inputs are not permitted"} for name in ("top_k", "min_p")]},
        {"error": {"message": "top_k and min_p are unsupported"}},
    ],
)
async def test_a_parameter_that_the_server_does_not_know_is_named(
    server: ModelServer, asker: Asker, body: object
) -> None:
    server.acts = [fails(422, body)]
    with pytest.raises(RequestError, match=r"doesn't know top_k and min_p.*at its default"):
        await asker.ask(params=SamplingParams(top_k=20, min_p=0.1))


BEGUN = pieces(["A "])[:2]
AMID = pieces(["A ", "blue "])[:3]
CUT_WITHIN_A_CHARACTER = [*BEGUN, b'data: {"choices": [{"delta": {"content": "\xc3']
ENDS_IN_A_LIST = {"choices": [{"delta": {"content": "A"}, "finish_reason": ["stop"]}]}
BROKEN: dict[str, tuple[Act, str]] = {
    "closes before an answer": (closes, "broke off the connection"),
    "closes amid the answer": (sends(AMID, then=closes), "broke off the connection"),
    "closes within a character": (sends(CUT_WITHIN_A_CHARACTER, then=closes), "broke off the connection"),
    "ends too early": (sends(AMID), "damaged answer: it ended before the reply was finished"),
    "sends no JSON": (sends([*BEGUN, b"data: {broken\n\n"]), "damaged answer: an event that isn't JSON"),
    "sends no UTF-8": (sends([b"data: \xff\xfe\n\n"]), "damaged answer: text that isn't UTF-8"),
    "sends other objects": (sends([event([1, 2])]), "damaged answer: an event that is a list"),
    "sends odd chunks": (sends([event({"choices": [{"delta": "text"}]})]), "damaged answer: a chunk of another form"),
    "sends endless lines": (sends([b"data: " + b"x" * 2**19] * 4), "damaged answer: an event of more than"),
    "ends in a list": (sends([event(ENDS_IN_A_LIST)]), "damaged answer: a finish_reason that is a list"),
    "aborts": (
        sends([*BEGUN, event(chunk(finish_reason="abort"))]),
        "damaged answer: it ended with the reason",
    ),
    "fails": (sends([*BEGUN, event({"error": {"message": "CUDA", "code": 502}})]), r'failed with 502 .*: "CUDA"'),
    "fails in a word": (sends([*BEGUN, event({"error": "CUDA"})]), r'failed with 500 .*: "CUDA"'),
}
STALLING = [
    pytest.param(stalls, "sent nothing for {first_s:g} s", id="before its headers"),
    pytest.param(sends([], then=stalls), "sent nothing for {first_s:g} s", id="after its headers"),
    pytest.param(sends(AMID, then=stalls), "fell silent for {silence_s:g} s amid", id="amid the answer"),
]


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_is_asked_for_again_and_never_doubled(
    server: ModelServer, asker: Asker, name: str
) -> None:
    act, message = BROKEN[name]
    server.acts = [act]
    assert (await asker.ask(timeouts=LONG)).text == "A red square."
    assert (len(server.bodies), len(asker.waits_s)) == (2, 1)
    server.acts = [act]
    with pytest.raises(EngineError, match=rf"{message}.*It was tried once\."):
        await asker.ask(timeouts=LONG, max_attempts=1)


@pytest.mark.parametrize(("act", "message"), STALLING)
async def test_an_answer_that_stalls_is_asked_for_again_and_never_doubled(
    server: ModelServer, asker: Asker, act: Act, message: str
) -> None:
    server.acts = [act]
    # Only the limit that is meant: else a good answer would seem to stall more often.
    timeouts = RemoteTimeouts(30.0, 30.0, 0.4) if "amid" in message else RemoteTimeouts(30.0, 0.4, 30.0)
    result = await asker.ask(timeouts=timeouts)
    # On a busy machine a good answer may seem to stall, too.
    assert (result.text, len(server.bodies) >= 2, len(asker.waits_s) >= 1) == ("A red square.", True, True)
    timeouts = replace(timeouts, **{"silence_s" if "amid" in message else "first_s": 0.1})
    server.acts = [act]
    with pytest.raises(RequestTimeoutError, match=rf"{message.format(**vars(timeouts))}.*It was tried once\."):
        await asker.ask(timeouts=timeouts, max_attempts=1)


def test_an_error_in_nothing_but_brackets_has_no_words() -> None:
    error: object = "CUDA"
    for _ in range(5000):
        error = {"error": [error]}
    fault = stream_error(error, ())
    assert (fault.status, fault.said) == (500, "")


async def test_a_count_without_measure_is_none(server: ModelServer, asker: Asker) -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 1' + b"0" * 400 + b"}}\n\n"
    parts = pieces(["A ", "red"])
    server.acts = [sends([*parts[:-2], usage, parts[-1]], pause_s=0.01)]
    result = await asker.ask()
    assert (result.text, result.num_generated_tokens, result.decode_tokens_per_s) == ("A red", 0, None)


async def test_comments_keep_a_slow_answer_alive(server: ModelServer, asker: Asker) -> None:
    first, *others = pieces(["Red."])
    slow = [first, *[b": ping\n\n", b": ping\r\n\r\n"] * 20, b"".join(others)]
    server.acts = [sends(slow, pause_s=0.025)]
    # Longer than the silence that is allowed lies between two pieces, and far less between two signs of life.
    assert (await asker.ask(timeouts=RemoteTimeouts(first_s=30.0, silence_s=0.9))).text == "Red."
    assert asker.waits_s == []


async def test_the_whole_time_ends_even_an_answer_that_never_does(server: ModelServer, asker: Asker) -> None:
    server.otherwise = sends(pieces(["la "] * 10000), pause_s=0.01)
    with pytest.raises(RequestTimeoutError, match=r"no whole answer within 0\.4 s"):
        await asker.ask(timeout_s=0.4)
    with pytest.raises(RequestTimeoutError, match=r"no whole answer within 0\.2 s"):
        await events_of(asker.backend(), timeout_s=0.2)
    # Nobody asked again; on a busy machine the time may be over before the second one was sent.
    assert len(server.bodies) <= 2


async def test_a_wait_that_the_whole_time_does_not_allow_is_not_begun(server: ModelServer, asker: Asker) -> None:
    server.otherwise = fails(503, {"error": "loading"}, Retry_After="60")
    with pytest.raises(EngineError, match=r"loading.*It was tried once"):
        await asker.ask(timeout_s=30)
    assert asker.waits_s == []


async def test_retry_after_is_obeyed_and_capped(server: ModelServer, asker: Asker) -> None:
    date = formatdate(time.time() + 40, usegmt=True)
    server.acts = [fails(429, None, Retry_After=value) for value in ("7", date, "86400", "soon")]
    await asker.ask(timeout_s=3600)
    seconds, until, capped, backoff = asker.waits_s
    assert (seconds, capped, backoff) == (7.0, MAX_RETRY_AFTER_S, 4.0)
    assert 35 < until <= 40


def test_waits_double_and_spread() -> None:
    assert [delay_s(n, 1.0) for n in (1, 2, 3, 6, 7, 1000)] == [0.5, 1, 2, 16, 30, 30]
    assert [delay_s(n, 0.0) for n in (1, 2, 7)] == [0.25, 0.5, 15]
    assert delay_s(7, 1.0, retry_after_s=3.0) == 30


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("12", 12.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:01:40 -0000", 60.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Mon, 99999999999999999999 Jan 2020 00:00:00 GMT", None),
        ("Mon, 01 Jan 2020 00:00:00 +99999999999999999999", None),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert read_retry_after(value, 40.0) == seconds


async def test_one_failure_is_not_the_others(server: ModelServer, asker: Asker) -> None:
    server.acts = [answers(["One."]), fails(400, {"error": "no"}), answers(["Three."])]
    backend = asker.backend(max_concurrent=1)
    first, second, third = await asyncio.gather(*(events_of(backend) for _ in range(3)), return_exceptions=True)
    assert isinstance(second, RequestError)
    assert [result_of(events).text for events in (first, third)] == ["One.", "Three."]  # pyright: ignore[reportArgumentType]


async def test_text_that_was_given_comes_once(server: ModelServer, asker: Asker) -> None:
    """Also if the error amid it names a parameter that could be left out."""
    error = {"message": "Unknown parameter: 'stream_options'", "code": 400}
    server.acts = [sends([*BEGUN, event({"error": error})])]
    found: list[Event] = []

    async def read() -> None:
        async for each in asker.backend(whole=False).stream(GenerationRequest(QUESTION)):
            found.append(each)

    with pytest.raises(RequestError):
        await read()
    assert ([each.text for each in found if isinstance(each, TextDelta)], len(server.bodies)) == (["A "], 1)
