"""The chat of many turns: every engine sees the same prompts, and the report says what was computed."""

from __future__ import annotations

import base64
import io
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image as PILImage

from benchmarks.engines import ServerPeer
from benchmarks.scripted_chat import ScriptedChat
from qwen35mm.assets import demo_model_path
from tests.backends.remote.server import USAGE, ModelServer, answers, chunk, event, fails, running_server, sends
from tests.benchmarks.conftest import Report

TURNS, HISTORY_TOKENS, IMAGE_SIDE = 3, 420, 64


def script(*, thinking: bool = False, turns: int = TURNS, history_tokens: int = HISTORY_TOKENS) -> ScriptedChat:
    return ScriptedChat(
        Namespace(
            model=demo_model_path(),
            device="cpu",
            turns=turns,
            history_tokens=history_tokens,
            image_side=IMAGE_SIDE,
            thinking=thinking,
        )
    )


def committed(made: ScriptedChat, turn: int, min_segment: int) -> int:
    """Tokens of turn `turn` that its history commit leaves for the next one."""
    prompts = made.builder(min_segment)
    return prompts.history(made.history(turn), [made.media.plan], enable_thinking=made.thinking).tail_start


@pytest.mark.slow
def test_all_engines_are_measured_on_the_same_prompts(run_here: Callable[..., Report]) -> None:
    options = ["--peer", "transformers", "--turns", str(TURNS), "--history-tokens", str(HISTORY_TOKENS)]
    options += ["--image-side", str(IMAGE_SIDE), "--min-segment", "32,64", "--prefill-repeats", "2"]
    data, table, output = run_here("multi_turn", *options)
    assert data["shown"] == 32
    assert data["facts"]["num_extending"] == 0

    made = script()
    for entry in data["turns"]:
        turn, engines = entry["turn"], entry["engines"]
        assert list(engines) == ["cold", "warm-32", "warm-64", "restart", "transformers"]
        num_tokens = len(made.prompt(turn).token_ids)
        for name, (sample,) in engines.items():
            assert sample["num_prompt_tokens"] == num_tokens, name
            assert sample["token_id"] == engines["cold"][0]["token_id"], name
            assert sample["ttft_s"] > 0
        expected = {"cold": 0, "warm-32": 0, "warm-64": 0, "restart": 0}
        if turn > 1:
            expected |= {f"warm-{n}": committed(made, turn - 1, n) for n in (32, 64)}
            expected["restart"] = expected["warm-32"]
            assert engines["restart"][0]["cached_from"] == {"disk": expected["restart"]}
            assert expected["restart"] > 0
        assert {name: engines[name][0]["num_cached_tokens"] for name in expected} == expected

    last = made.prompt(TURNS)
    assert [entry["min_segment"] for entry in data["prefills"]] == [None, 0, 32, 64]
    for entry in data["prefills"]:
        way = entry["min_segment"]
        assert entry["num_tokens"] == len(last.token_ids)
        assert entry["num_segments"] == (len(made.prompt(TURNS, way).segments) if way else 0)
        assert entry["num_pieces"] == entry["num_segments"] + 1
        assert entry["prefill_s"]["count"] == 2
        assert entry["token_id"] == data["turns"][-1]["engines"]["cold"][0]["token_id"]

    turns = table[:TURNS]
    assert [row[0] for row in turns] == [str(turn) for turn in range(1, TURNS + 1)]
    warm = data["turns"][-1]["engines"]["warm-32"][0]
    assert turns[-1][2:6] == [
        f"{data['turns'][-1]['engines']['cold'][0]['ttft_s']:.2f}",
        f"{warm['ttft_s']:.2f}",
        str(warm["num_cached_tokens"]),
        str(warm["num_prefilled_tokens"]),
    ]
    assert f"0 of {TURNS - 1} prompts" in "\n".join(output)


@pytest.mark.parametrize("thinking", [False, True])
def test_the_script_is_fixed_and_grows_to_its_size(thinking: bool) -> None:
    made, again = (script(thinking=thinking, turns=6, history_tokens=1200) for _ in range(2))
    assert made.turns == again.turns
    prompts = [made.prompt(turn) for turn in range(1, 7)]
    assert 1_000 < len(prompts[-1].token_ids) < 1_400
    assert all(len(a.token_ids) < len(b.token_ids) for a, b in pairwise(prompts))
    assert made.num_extending() == 0
    assert [len(message.media) for message in made.messages(3)] == [1, 0, 0, 0, 0]
    reasonings = {message.reasoning for message in made.history(2) if message.role == "assistant"}
    assert (reasonings == {None}) is not thinking
    # Thinking is left out of later prompts: both scripts make the same ones, up to the generation prompt.
    other = script(thinking=not thinking, turns=6, history_tokens=1200).prompt(6)
    shared = min(len(other.token_ids), len(prompts[-1].token_ids)) - 4
    assert other.token_ids[:shared].tolist() == prompts[-1].token_ids[:shared].tolist()


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with running_server() as server:
        yield server


def test_a_server_is_asked_the_same(server: ModelServer) -> None:
    server.acts = [answers(["a"])]
    made = script()
    sample = ServerPeer(f"{server.url}/v1", "some-model").turn(made, 2)
    told = (USAGE["prompt_tokens"], USAGE["prompt_tokens_details"]["cached_tokens"])
    assert (sample["num_prompt_tokens"], sample["num_cached_tokens"]) == told
    assert sample["ttft_s"] > 0
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"], body["stream"]) == ("some-model", 1, True)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    roles = [message.role for message in made.messages(2)]
    assert [message["role"] for message in body["messages"]] == roles
    picture, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": made.turns[0].question}
    assert body["messages"][1]["content"] == made.turns[0].reply
    data = picture["image_url"]["url"].removeprefix("data:image/png;base64,")
    sent = PILImage.open(io.BytesIO(base64.b64decode(data)))
    assert np.array_equal(np.asarray(sent), np.asarray(ScriptedChat.picture(IMAGE_SIDE)))


def test_a_server_may_tell_less(server: ModelServer) -> None:
    server.acts = [sends([event(chunk({"role": "assistant"})), b": a comment\n\n", b"data: [DONE]\n\n"])]
    sample = ServerPeer(f"{server.url}/v1", "m").turn(script(), 1)
    assert (sample["num_prompt_tokens"], sample["num_cached_tokens"]) == (None, None)
    assert sample["ttft_s"] > 0


def test_a_server_that_refuses_is_quoted(server: ModelServer) -> None:
    server.acts = [fails(400, {"error": "no such model"})]
    with pytest.raises(SystemExit, match=r"answered 400.*no such model"):
        ServerPeer(f"{server.url}/v1", "m").turn(script(), 1)
