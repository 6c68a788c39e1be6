"""Text as it comes: thinking, tools, numbers, going on with a reply, and what a failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from qwen35mm.backends.remote.deadline import RemoteTimeouts
from qwen35mm.backends.remote.reply import Reply
from qwen35mm.contract import (
    Finished,
    GenerationRequest,
    Image,
    Message,
    Prefilled,
    Progress,
    SamplingParams,
    Text,
    TextDelta,
    ToolCall,
)
from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RequestError, RequestTimeoutError
from qwen35mm_preprocess.say import said_of
from tests.backends.events import result_of
from tests.backends.remote.asking import QUESTION, Asker, events_of, until
from tests.backends.remote.server import (
    Handler,
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
from tests.preprocess.media_files import PHOTOGRAPHS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}

BEGUN = pieces(["A ", "blue "])[:3]


def texts_of(events: list[Any]) -> list[tuple[str, str]]:
    return [(each.channel, each.text) for each in events if isinstance(each, TextDelta)]


async def test_text_comes_while_the_server_still_writes(server: ModelServer, asker: Asker) -> None:
    seen = asyncio.Event()

    def waits(handler: Handler) -> None:
        while not seen.is_set():
            handler.server.ended.wait(0.005)
        for part in pieces(["blue."])[1:]:
            handler.send_part(part)
        handler.end_stream()

    server.acts = [sends(pieces(["A "])[:2], then=waits)]
    texts: list[str] = []
    async for each in asker.backend(whole=False).stream(GenerationRequest(QUESTION)):
        texts += [each.text] if isinstance(each, TextDelta) else []
        seen.set()
    assert texts == ["A ", "blue."]


async def test_leaving_amid_the_text_hangs_up(server: ModelServer, asker: Asker) -> None:
    server.otherwise = sends(pieces(["A "])[:2], then=stalls)
    backend = asker.backend(whole=False, max_concurrent=1)
    for number in (1, 2):
        async with contextlib.aclosing(backend.stream(GenerationRequest(QUESTION))) as events:
            async for each in events:
                assert isinstance(each, TextDelta)
                break
        await until(lambda number=number: server.num_gone == number)
    assert await asyncio.to_thread(backend.wait_idle, 10)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (sends(BEGUN, then=closes), EngineError, "broke off the connection"),
        (sends(BEGUN), EngineError, "damaged answer: it ended before the reply was finished"),
        (
            sends([*pieces(["A ", "blue "])[:3], b"data: {\n\n"]),
            EngineError,
            "damaged answer: an event that isn't JSON",
        ),
        (
            sends([*BEGUN, event({"error": {"message": "CUDA", "code": 500}})]),
            EngineError,
            "failed with 500 .*CUDA",
        ),
    ],
)
async def test_after_its_first_text_a_failure_is_an_error_and_the_text_stays(
    server: ModelServer, asker: Asker, act: Any, kind: type[Qwen35mmError], message: str
) -> None:
    server.acts = [act]
    events: list[Any] = []

    async def follow() -> None:
        async for each in asker.backend(whole=False).stream(GenerationRequest(QUESTION)):
            events.append(each)

    with pytest.raises(kind, match=rf"{message}.* What it had answered until then is kept\.") as caught:
        await follow()
    assert texts_of(events) == [("answer", "A "), ("answer", "blue ")]
    assert (len(server.bodies), asker.waits_s) == (1, []), "it isn't asked again"
    # A page writes it in the person's language.
    said: Any = said_of(caught.value)
    assert said["values"]["error"]["values"]["host"] == server.host


async def test_before_its_first_text_a_failure_is_tried_again(server: ModelServer, asker: Asker) -> None:
    server.acts = [fails(503), closes, sends(pieces([])[:1]), fails(429, None, Retry_After="7")]
    events = await events_of(asker.backend(whole=False))
    assert "".join(text for _, text in texts_of(events)) == "A red square."
    assert asker.waits_s == [0.5, 1.0, 2.0, 7.0]
    server.otherwise = fails(429)
    with pytest.raises(QueueFullError, match="tried 2 times"):
        await events_of(asker.backend(whole=False, max_attempts=2))


async def test_the_silence_amid_an_answer_counts_from_the_last_look(server: ModelServer, asker: Asker) -> None:
    server.acts = [sends(BEGUN, then=stalls)]
    timeouts = RemoteTimeouts(first_s=30.0, silence_s=0.3)
    texts: list[str] = []

    async def follow() -> None:
        async for each in asker.backend(whole=False, timeouts=timeouts).stream(GenerationRequest(QUESTION)):
            texts.extend([each.text] if isinstance(each, TextDelta) else [])
            # Whoever reads may take their time.
            await asyncio.sleep(0.35)

    with pytest.raises(RequestTimeoutError, match=r"fell silent for 0\.3 s amid its answer"):
        await follow()
    assert texts == ["A ", "blue "]


@pytest.mark.parametrize(
    ("words", "thought", "answer"),
    [
        (["<think>\nIt is ", "red.\n</think>\n\n", "Red."], "It is red.", "Red."),
        (["<th", "ink>It", " is", " red.\n</th", "ink>", "Red."], "It is red.", "Red."),
        (["<think>", "a <b> </", "think", "> b </think>", "</think> c"], "a <b>", "b </think></think> c"),
        (["<think>never ends </thi"], "never ends </thi", ""),
        (["A <think> amid it"], "", "A <think> amid it"),
        (["<thin"], "", "<thin"),
    ],
)
async def test_thinking_that_is_left_in_the_text_is_split_from_it(
    server: ModelServer, asker: Asker, words: list[str], thought: str, answer: str
) -> None:
    server.acts = [answers(words)]
    events = await events_of(asker.backend(whole=False))
    result = result_of(events)
    assert (result.reasoning or "", result.text) == (thought, answer)
    for channel, text in (("reasoning", thought), ("answer", answer)):
        assert "".join(piece for name, piece in texts_of(events) if name == channel) == text


@pytest.mark.parametrize(("thought", "kept"), [(["\n\n"], None), (["\n", "\n It is", " red.\n"], "It is red.\n")])
async def test_what_a_template_writes_around_thinking_is_none(
    server: ModelServer, asker: Asker, thought: list[str], kept: str | None
) -> None:
    server.acts = [answers(["\n\n", " Red.\n"], reasoning=thought)]
    events = await events_of(asker.backend(whole=False))
    result = result_of(events)
    assert (result.reasoning, result.text) == (kept, "Red.\n")
    assert all(text for _, text in texts_of(events))


def calling(*deltas: dict[str, Any], finish_reason: str = "tool_calls") -> list[bytes]:
    return [
        event(chunk({"role": "assistant", "content": "Let me see."})),
        *(event(chunk({"tool_calls": [delta]})) for delta in deltas),
        event(chunk(finish_reason=finish_reason)),
        b"data: [DONE]\n\n",
    ]


async def test_calls_come_in_pieces_and_are_read_whole(server: ModelServer, asker: Asker) -> None:
    server.acts = [
        sends(
            calling(
                {"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}},
                {"index": 0, "function": {"arguments": '{"place": "Bo'}},
                {"index": 1, "id": "b", "function": {"name": "weather", "arguments": None}},
                {"index": 0, "function": {"arguments": 'nn"}'}},
            )
        )
    ]
    events = await events_of(asker.backend(whole=False), tools=[WEATHER])
    result = result_of(events)
    assert result.tool_calls == (ToolCall("weather", {"place": "Bonn"}, "a"), ToolCall("weather", {}, "b"))
    assert (result.text, result.finish_reason) == ("Let me see.", "stop")
    assert server.bodies[0]["tools"] == [WEATHER]


async def test_which_tools_are_called_may_be_chosen(server: ModelServer, asker: Asker) -> None:
    backend = asker.backend()
    for choice in ("auto", "none", "required", "weather"):
        await events_of(backend, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=choice == "auto")
    auto, none, required, named = server.bodies
    assert "tool_choice" not in auto
    assert "parallel_tool_calls" not in auto
    assert "tools" not in none
    assert (required["tool_choice"], required["parallel_tool_calls"]) == ("required", False)
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(RequestError, match="or a tool's name; got 'rain'"):
        await events_of(backend, tools=[WEATHER], tool_choice="rain")
    server.pages["/openapi.json"] = {"paths": {"/load_model": {}, "/v1/chat/completions": {}}}
    await backend.connect()
    with pytest.raises(RequestError, match="the model decides which tools to call"):
        await events_of(backend, tools=[WEATHER], tool_choice="required")


async def test_a_call_whose_arguments_are_no_json_stays_text(server: ModelServer, asker: Asker) -> None:
    server.acts = [sends(calling({"index": 0, "function": {"name": "weather", "arguments": '{"place": '}}))]
    result = result_of(await events_of(asker.backend(whole=False), tools=[WEATHER]))
    assert result.tool_calls == ()
    assert 'weather: {"place": ' in result.text


async def test_calls_that_the_server_leaves_in_the_text_are_read_from_it(server: ModelServer, asker: Asker) -> None:
    call = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    server.otherwise = answers(["Let me see.\n\n", call])
    *_, last = await events_of(asker.backend(whole=False), tools=[WEATHER])
    assert isinstance(last, Finished)
    assert (last.result.text, last.result.tool_calls) == ("Let me see.", (ToolCall("weather", {"days": 3}),))
    assert result_of(await events_of(asker.backend(whole=False))).tool_calls == (), "nobody gave it tools"


async def test_calls_and_their_results_go_out_with_ids(server: ModelServer, asker: Asker) -> None:
    conversation = [
        *QUESTION,
        Message("assistant", (), tool_calls=(ToolCall("weather", {"place": "Köln"}), ToolCall("weather", {}, "own"))),
        Message("tool", (Text("rain"),)),
        Message("tool", (Text("sun"),), tool_call_id="own"),
        Message("assistant", (Text("Rain."),), tool_calls=(ToolCall("weather", {}),)),
        Message("tool", (Text("snow"),)),
    ]
    await asker.ask(conversation, tools=[WEATHER])
    _, first, rain, sun, second, snow = server.bodies[0]["messages"]
    assert first["content"] is None
    assert [call["id"] for call in first["tool_calls"]] == ["call_0", "own"]
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"place": "Köln"}
    assert (rain["tool_call_id"], sun["tool_call_id"], rain["content"]) == ("call_0", "own", "rain")
    assert (second["tool_calls"][0]["id"], snow["tool_call_id"]) == ("call_2", "call_2")


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "qwen35mm"])
async def test_the_rest_of_a_reply_is_asked_for_where_the_server_knows_how(
    server: ModelServer, asker: Asker, owner: str
) -> None:
    server.told = {"owned_by": owner}
    backend = asker.backend(model=None)
    await events_of(backend, [*QUESTION, Message("assistant", (Text("A red"),))], continue_reply=True)
    assert server.bodies[0]["continue_final_message"] is True
    assert server.bodies[0]["add_generation_prompt"] is False
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "A red"}


async def test_each_program_gets_its_own_words(server: ModelServer, asker: Asker) -> None:
    params = SamplingParams(top_k=20, repetition_penalty=1.1, thinking_budget=64)
    server.told = {"owned_by": "llamacpp"}
    backend = asker.backend(model=None)
    await backend.connect()
    await events_of(backend, params=params)
    sent = server.bodies[0]
    assert (sent["repeat_penalty"], sent["thinking_budget_tokens"], sent["top_k"]) == (1.1, 64, 20)
    assert "repetition_penalty" not in sent
    assert sent["timings_per_token"] is True
    server.told = {"owned_by": "vllm"}
    backend = asker.backend(model=None)
    await backend.connect()
    with pytest.raises(RequestError, match="can't be asked for thinking_budget"):
        await events_of(backend, params=params)
    server.told, server.pages["/openapi.json"] = {}, {"paths": {"/load_model": {}, "/v1/chat/completions": {}}}
    backend = asker.backend(model=None)
    await backend.connect()
    with pytest.raises(RequestError, match=r"repetition_penalty, thinking_budget, top_k.* those settings"):
        backend.check(GenerationRequest(params=params))
    await events_of(backend, params=backend.info.generation)
    assert server.bodies[-1].keys() == {"model", "messages", "stream", "temperature", "top_p"}


def timed(number: int, **more: Any) -> dict[str, Any]:
    return {"timings": {"cache_n": 30, "prompt_n": 12, "prompt_ms": 250.0, "predicted_n": number, **more}}


async def test_the_numbers_of_llama_server(server: ModelServer, asker: Asker) -> None:
    server.acts = [
        sends(
            [
                event({**chunk(), "prompt_progress": {"total": 42, "cache": 30, "processed": 36, "time_ms": 100}}),
                event({**chunk({"content": "A "}), **timed(1)}),
                event({**chunk({"content": "cat"}), **timed(2)}),
                event({**chunk(finish_reason="stop"), **timed(3, predicted_ms=500.0)}),
                b"data: [DONE]\n\n",
            ]
        )
    ]
    events = await events_of(asker.backend(whole=False))
    assert events[0] == Progress("prefill", 36, 42)
    begun = events[1]
    assert isinstance(begun, Prefilled)
    assert (begun.num_prompt_tokens, begun.cache.num_cached_tokens, begun.cache.prefill_s) == (42, 30, 0.25)
    deltas = [each for each in events if isinstance(each, TextDelta)]
    assert [each.num_generated_tokens for each in deltas] == [1, 2]
    result = result_of(events)
    assert (result.num_prompt_tokens, result.num_generated_tokens, result.cache.decode_s) == (42, 3, 0.5)
    assert result.decode_tokens_per_s == pytest.approx(4.0)


@pytest.mark.parametrize("timings", [3, [], {"prompt_ms": "x", "predicted_n": -1}, {"prompt_ms": float("1e400")}])
def test_numbers_that_are_none(timings: Any) -> None:
    reply = Reply(0.0, {})
    data = json.dumps({**chunk({"content": "A"}, "stop"), "timings": timings, "prompt_progress": timings})
    assert texts_of([*reply.add(data), *reply.end()]) == [("answer", "A")]
    assert (reply.result().num_prompt_tokens, reply.result().cache.prefill_s) == (0, 0.0)


@pytest.mark.parametrize(
    ("status", "words", "how", "ability", "message"),
    [
        (500, "image input is not supported - hint: provide the mmproj", "images", "images", "can't see pictures"),
        (400, "At most 0 image(s) may be provided in one prompt.", "images", "images", "can't see pictures"),
        (400, '"auto" tool choice requires --enable-auto-tool-choice', "tools", "tools", "takes no tools"),
        (400, "response_format is not supported", "schema", "schemas", "can't hold an answer to a JSON schema"),
    ],
)
async def test_what_a_server_turns_out_to_lack_is_said_and_known_from_then_on(
    server: ModelServer, asker: Asker, status: int, words: str, how: str, ability: str, message: str
) -> None:
    server.acts = [fails(status, {"error": {"message": words}})]
    backend = asker.backend(whole=False)
    await backend.connect()
    assert getattr(backend.info, ability) is None
    question = [Message("user", (Image(PHOTOGRAPHS / "rocket.jpg"), Text("What?")))] if how == "images" else QUESTION
    params = SamplingParams(json_schema='{"type": "object"}') if how == "schema" else None
    asking = {"tools": [WEATHER]} if how == "tools" else {}
    with pytest.raises(RequestError, match=message):
        await events_of(backend, question, params, **asking)
    assert (len(server.bodies), getattr(backend.info, ability)) == (1, False)


async def test_a_model_without_tools_is_not_asked_with_any(server: ModelServer, asker: Asker) -> None:
    server.told = {"owned_by": "llamacpp"}
    server.pages["/props"] = {"chat_template_caps": {"supports_tools": False}}
    backend = asker.backend(model=None)
    await backend.connect()
    with pytest.raises(RequestError, match="takes no tools"):
        await events_of(backend, tools=[WEATHER])
    assert server.bodies == []


async def test_a_reply_of_nothing_but_calls_ends_well(server: ModelServer, asker: Asker) -> None:
    parts = calling({"index": 0, "function": {"name": "weather", "arguments": "{}"}}, finish_reason="stop")
    server.acts = [sends(parts[1:])]
    events = await events_of(asker.backend(whole=False), tools=[WEATHER])
    assert isinstance(events[-1], Finished)
    assert texts_of(events) == []


async def test_what_nothing_depends_on_is_left_out_where_it_is_refused(server: ModelServer, asker: Asker) -> None:
    names = ("chat_template_kwargs", "stream_options")
    server.acts = [fails(400, {"error": f"Unrecognized request argument: {name}"}) for name in names]
    backend = asker.backend(whole=False)
    await backend.connect()
    image = [Message("user", (Image(PHOTOGRAPHS / "rocket.jpg"), Text("What? \udcff")))]
    for _ in range(2):
        assert result_of(await events_of(backend, image, enable_thinking=False)).text == "A red square."
    first, _, third, fourth = server.bodies
    assert first.keys() - third.keys() == {*names}
    assert third["messages"] == first["messages"]
    assert fourth.keys() == third.keys(), "it isn't asked with them again"
    assert (asker.waits_s, backend.info.thinking) == ([], False)
    server.acts = [fails(400, {"error": "Unrecognized request argument: chat_template_kwargs"})]
    with pytest.raises(RequestError, match="doesn't know chat_template_kwargs"):
        await events_of(backend, enable_thinking=True)


async def test_a_refusal_that_repeats_itself_ends(server: ModelServer, asker: Asker) -> None:
    server.otherwise = fails(400, {"error": "Unrecognized request argument: stream_options"})
    with pytest.raises(RequestError, match=r"refused the request with 400 .*stream_options"):
        await events_of(asker.backend())
    assert len(server.bodies) == 2
