"""A model whose last layers lie on the processor, on another card, or in a part of their own on the same card.

The same answers, the same caches, and a graph for each part on a card.
"""

from __future__ import annotations

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.model import LoadedModel, load, weights
from qwen35mm.model.devices import DeviceMap
from tests.engine.exact import Chat, assert_same, assistant, cache_settings, picture, results, serve, user, words

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(scope="module", params=[("cpu", 1), ("cpu", 3), ("cuda", 2), ("cuda:1", 2)], ids=str)
def split(request: pytest.FixtureRequest) -> LoadedModel:
    """The demo model with its first layers on the card. By another name, the same card is a second device."""
    second, num_first = torch.device(request.param[0]), request.param[1]
    if second.index == 1 and torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    with pytest.MonkeyPatch.context() as patch:

        def place(name: str, num_bytes: int, num_layers: int, *others: object) -> DeviceMap:
            layers = (CARD,) * num_first + (second,) * (num_layers - num_first)
            return DeviceMap(CARD, layers, second, CARD, CARD)

        patch.setattr(weights, "place", place)
        return load(demo_model_path(), dtype="float32", device="cuda:0,cpu")


def engine_of(loaded: LoadedModel, *, ahead: bool = True) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: ahead)
        settings = EngineSettings(context_length=2048, slots=4)
        return Engine(loaded, settings, cache_settings(loaded, num_tokens=8192))


def test_replies_are_those_of_the_processor_alone(split: LoadedModel, demo: LoadedModel) -> None:
    second = split.model.layer_devices[-1]
    assert split.model.devices == (CARD, second)
    chat = Chat(demo)
    requests = [
        chat.request([user("hello")], params=GREEDY),
        chat.request([user(Image(picture(3)), "Describe it.")], params=GREEDY),
        chat.request([user(words("long", count=90))], params=GREEDY),
        # Many steps, of which none waits for the one before where all parts are a card's.
        chat.request([user(words("many", count=9))], params=SamplingParams(temperature=0.0, max_tokens=200)),
    ]
    expected = results(engine_of(demo), *requests)
    for ahead in (True, False):
        engine = engine_of(split, ahead=ahead)
        found = results(engine, *requests)
        assert {id_: result.token_ids for id_, result in found.items()} == {
            id_: result.token_ids for id_, result in expected.items()
        }
        for graph in engine._decoder._graphs.values():
            assert [part.captures for part in graph._parts] == [True, second.type == "cuda", True]


def test_a_warm_engine_answers_as_a_cold_one(split: LoadedModel) -> None:
    chat, warm = Chat(split), engine_of(split, ahead=False)
    first = user(Image(picture(1)), words("first", count=150))
    for messages in ([first], [first, assistant("A picture."), user(words("again", count=20))]):
        request = chat.request(messages, params=GREEDY)
        (answer,) = serve(warm, request)
        (expected,) = serve(engine_of(split, ahead=False), request)
        assert_same(answer, expected)
    assert answer.result.cache.num_cached_tokens > 0


def test_states_and_keys_of_two_devices_come_back_bit_for_bit(split: LoadedModel) -> None:
    engine = engine_of(split)
    engine.add(Chat(split).request([user(words("state", count=80))], params=GREEDY))
    while not engine._decoder.running:
        engine.step()
    cache, pools = engine._decoder.running[0].cache, engine.runtime.pools
    other = pools.new_sequence()
    saved = cache.export(), pools.states.save(cache.slot)
    other.append(saved[0])
    pools.states.load(other.slot, saved[1])
    again = other.export(), pools.states.save(other.slot)
    for before, after in zip(saved, again, strict=True):
        assert all(x.device == CPU and torch.equal(x, after[name]) for name, x in before.items())
