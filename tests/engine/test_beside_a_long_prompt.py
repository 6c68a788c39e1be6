"""What others notice of a long prompt on the bundled model: counted in layers, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import TextDelta
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.schedule import PREFILL_PER_DECODE
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model import Batch, LoadedModel, load
from qwen35mm.model.decoder import Qwen35Model
from tests.engine.exact import GREEDY, Chat, cache_settings, endless_replies, user, words

CHUNK = 512
CONTEXT = 8192
TOKEN_S, LAYER_S = 2.0, 1.0


@pytest.fixture(scope="module")
def demo() -> Iterator[LoadedModel]:
    loaded = load(demo_model_path(), device="cpu")
    with endless_replies(loaded):
        yield loaded


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A layer of a prompt ("l") or a token of each reply ("t"), in order."""
    ran: list[str] = []
    by_layers, run_graph = Qwen35Model.by_layers, StepGraph.run

    def layers(self: Qwen35Model, batch: Batch) -> Any:
        for hidden in by_layers(self, batch):
            ran.extend("l" if batch.is_prefill else "")
            yield hidden

    def token(self: StepGraph, answer: int) -> None:
        ran.append("t")
        run_graph(self, answer)

    monkeypatch.setattr(Qwen35Model, "by_layers", layers)
    monkeypatch.setattr(StepGraph, "run", token)
    return ran


def make_engine(demo: LoadedModel, ran: list[str], **options: Any) -> Engine:
    """By a clock on which a layer takes one second and a token two."""
    settings = EngineSettings(context_length=CONTEXT, chunk_tokens=CHUNK, slots=4, **options)
    cache = cache_settings(demo, num_tokens=2 * CONTEXT)
    return Engine(demo, settings, cache, clock=lambda: LAYER_S * ran.count("l") + TOKEN_S * ran.count("t"))


def ask(demo: LoadedModel, count: int, max_tokens: int = 2) -> Request:
    return Chat(demo).request([user(words(count, count=count))], params=replace(GREEDY, max_tokens=max_tokens))


def test_a_short_request_waits_for_one_layer(demo: LoadedModel, ran: list[str]) -> None:
    """Its first token comes after its own layers and at most one of the long prompt's."""
    engine = make_engine(demo, ran)
    engine.add(ask(demo, 4000))
    for _ in range(5):
        engine.step()
    short = ask(demo, 20)
    ran.clear()
    engine.add(short)
    while not any(o.request_id == short.id and isinstance(o.event, TextDelta) for o in engine.step()):
        assert len(engine._prefilling) > 0
    num_chunks = len(short.prompt.segments) + 1
    assert ran.count("l") <= num_chunks * len(demo.model.layers) + 1
    assert len(engine._prefilling) == 1, "the long one goes on"


def test_a_reply_keeps_a_quarter_of_the_time(demo: LoadedModel, ran: list[str]) -> None:
    engine = make_engine(demo, ran)
    engine.add(ask(demo, 20, max_tokens=100))
    while ran.count("t") < 2:
        engine.step()
    engine.add(ask(demo, 4000))
    engine.step()
    ran.clear()
    while engine._prefilling:
        engine.step()
    gaps = [len(list(group)) for what, group in groupby(ran) if what == "l"]
    assert len(gaps) > 10
    assert max(gaps) <= PREFILL_PER_DECODE * TOKEN_S / LAYER_S


def test_with_prompts_first_replies_wait_and_then_share_each_step(demo: LoadedModel, ran: list[str]) -> None:
    engine = make_engine(demo, ran, prompts_first=True, speculate="off")
    requests = [ask(demo, 20, max_tokens=10), ask(demo, 4000, max_tokens=10), ask(demo, 300, max_tokens=10)]
    engine.add(requests[0])
    while ran.count("t") < 2:
        engine.step()
    for request in requests[1:]:
        engine.add(request)
    engine.step()
    ran.clear()
    while engine._prefilling:
        engine.step()
    assert (ran.count("t"), len(engine._decoder.running)) == (0, 3)
    while engine.has_requests:
        engine.step()
    # The first token of each reply comes from its prompt.
    assert ran.count("t") == 9
