"""Memory and disk stay within their budgets, however much is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Finished, Image, Message, Text
from qwen35mm.engine import Engine, Request, StepOutput
from qwen35mm.model import Batch, LoadedModel
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.vision import VisionBlock, VisionTower
from qwen35mm_preprocess import PreparedMedia
from tests.engine.exact import (
    DENSE,
    SETTINGS,
    Chat,
    cache_settings,
    chat_model,
    dialog,
    picture,
    serve,
    turns,
    user,
    words,
)

MIB = 1 << 20
SYSTEM = Message("system", (Text(words("describe the picture", count=40)),))


@pytest.fixture
def no_arithmetic(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says nothing: what is counted here doesn't depend on what it would say."""
    vocabulary, (eos_id, *_) = loaded.config.text.vocab_size, sorted(loaded.eos_ids)

    def by_layers(self: Qwen35Model, batch: Batch) -> Iterator[torch.Tensor]:
        yield batch.embeds

    def logits(self: Qwen35Model, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(hidden.shape[0], vocabulary)
        scores[:, eos_id] = 1.0
        return scores

    def embed(self: VisionTower, pixel_values: torch.Tensor, grid_thw: Any) -> Any:
        return torch.zeros(len(pixel_values), self.config.hidden_size), None

    def block(self: VisionBlock, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x

    monkeypatch.setattr(Qwen35Model, "by_layers", by_layers)
    monkeypatch.setattr(Qwen35Model, "logits", logits)
    monkeypatch.setattr(VisionTower, "embed", embed)
    monkeypatch.setattr(VisionBlock, "forward", block)


def captions(chat: Chat, count: int, **options: Any) -> Iterator[Request]:
    """Requests that differ in their picture alone, by its digest: so many pictures would take minutes to make."""
    template = chat.request([SYSTEM, user(Image(picture(0)), words("what is this", count=30))], **options)
    (span,) = template.prompt.spans
    (medium,) = template.media
    assert isinstance(medium, PreparedMedia)
    for number in range(count):
        digest = f"{number:064x}"
        plan = replace(medium.plan, digest=digest, unit_digests=(digest,))
        prompt = replace(template.prompt, spans=(replace(span, digest=digest),))
        yield replace(template, prompt=prompt, media=(replace(medium, plan=plan),), id=f"caption {number}")


@dataclass
class Watch:
    """Looks at everything that has a budget, and remembers the most that there was."""

    engine: Engine
    directory: Path
    state_bytes: int
    vision_bytes: int
    disk_bytes: int
    most_states: int = 0
    most_vision: int = 0
    most_disk: int = 0

    def look(self, *, on_disk: bool) -> None:
        runtime = self.engine.runtime
        self.most_states = max(self.most_states, runtime.prefixes.states.num_bytes)
        self.most_vision = max(self.most_vision, runtime.vision.num_bytes)
        assert self.most_states <= self.state_bytes
        assert self.most_vision <= self.vision_bytes
        if on_disk:
            num_bytes = sum(path.stat().st_size for path in self.directory.glob("v2/*.*"))
            self.most_disk = max(self.most_disk, num_bytes)
            assert self.most_disk <= self.disk_bytes


def watched_engine(loaded: LoadedModel, directory: Path, *, num_states: int, disk_bytes: int) -> Watch:
    state_bytes = num_states * loaded.config.state_bytes(loaded.model.dtype)
    vision_bytes = 100 * loaded.config.text.hidden_size * 4
    settings = cache_settings(
        loaded, state_bytes=state_bytes, vision_bytes=vision_bytes, directory=directory, disk_bytes=disk_bytes
    )
    # Drafts' states would take a part of the budget.
    return Watch(
        Engine(loaded, replace(SETTINGS, speculate="off"), settings), directory, state_bytes, vision_bytes, disk_bytes
    )


def run(engine: Engine, request: Request) -> list[StepOutput]:
    engine.add(request)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("num_captions", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_captions_stay_within_every_budget(
    loaded: LoadedModel, tmp_path: Path, no_arithmetic: None, num_captions: int
) -> None:
    chat = Chat(loaded)
    watch = watched_engine(loaded, tmp_path, num_states=4, disk_bytes=MIB)
    one_state = loaded.config.state_bytes(loaded.model.dtype)
    for number, request in enumerate(captions(chat, num_captions, retain="shared")):
        outputs = run(watch.engine, request)
        watch.look(on_disk=number % 25 == 0)
        if number % 50 == 0:
            watch.engine.check_integrity()
        if number > 2:
            (finished,) = [output.event for output in outputs if isinstance(output.event, Finished)]
            assert finished.result.cache.num_cached_tokens == request.prompt.system_stop > 0
    watch.look(on_disk=True)
    assert watch.most_states <= 2 * one_state, "only what they share is kept"
    assert watch.engine.runtime.prefixes.num_segments <= 2


def test_chats_that_fill_every_budget_stay_within_it(loaded: LoadedModel, tmp_path: Path, no_arithmetic: None) -> None:
    """What people ask once each is all kept until it has to go: every budget is reached, and none is passed."""
    chat = Chat(loaded)
    watch = watched_engine(loaded, tmp_path, num_states=12, disk_bytes=MIB)
    for number, request in enumerate(captions(chat, 80, retain="conversation")):
        run(watch.engine, request)
        watch.look(on_disk=number % 5 == 0)
        watch.engine.check_integrity()
    assert watch.most_states > 0.9 * watch.state_bytes
    assert watch.most_vision > 0.9 * watch.vision_bytes
    assert watch.most_disk > 0.8 * watch.disk_bytes
    reopened = watched_engine(loaded, tmp_path, num_states=12, disk_bytes=MIB // 2)
    reopened.look(on_disk=True)


def test_nothing_is_kept_of_what_is_asked_to_leave_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    chat = Chat(loaded)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, directory=tmp_path))
    for request in captions(chat, 3, retain="nothing"):
        serve(engine, request)
    engine.flush()
    runtime = engine.runtime
    assert (runtime.prefixes.num_segments, runtime.prefixes.states.num_bytes, runtime.vision.num_bytes) == (0, 0, 0)
    assert runtime.disk is not None
    assert list(tmp_path.glob("v2/*.*")) == []


def test_captions_put_only_what_they_share_on_the_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    """A folder of pictures must not drive a person's conversations off the disk."""
    chat = Chat(loaded)
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, directory=tmp_path))
    for request in captions(chat, 8, retain="shared"):
        serve(engine, request)
    engine.flush()
    files = sorted(path.suffix for path in tmp_path.rglob("*") if path.suffix in (".kv", ".state", ".vision"))
    assert files == [".kv", ".state"]


def test_a_chat_of_twenty_turns_keeps_under_300_mib_of_a_9bs_states(tmp_path: Path) -> None:
    """The real engine on a tiny model, its states counted at the size that they have in a model of 9B."""
    loaded = chat_model(DENSE)
    nine_b = ModelConfig.from_dict(make_config("9B", "bfloat16")).state_bytes(torch.bfloat16)
    assert nine_b > 49 * MIB
    settings = cache_settings(loaded, num_tokens=8192, directory=tmp_path)
    engine = Engine(loaded, replace(SETTINGS, context_length=4096), settings)
    one_state = loaded.config.state_bytes(loaded.model.dtype)
    chat = Chat(loaded)
    questions = [
        user(Image(picture(number)), words(number, count=20)) if number % 4 == 0 else user(words(number, count=20))
        for number in range(21)
    ]
    messages = dialog(questions, system=SYSTEM.text)
    for number, asked in enumerate(turns(messages)[:20]):
        engine.add(chat.request(asked))
        engine.commit(chat.history(messages[: len(asked) + 1]))
        while engine.has_work:
            engine.step()
            num_states = engine.runtime.prefixes.states.num_bytes // one_state
            assert num_states * nine_b < 300 * MIB, f"{num_states} states in turn {number + 1}"
    assert engine.runtime.prefixes.num_segments > 20
    assert engine.runtime.prefixes.states.num_bytes >= 5 * one_state
    engine.flush()
    assert len(list(tmp_path.rglob("*.state"))) * nine_b < 300 * MIB, "what was thinned out is off the disk too"
    # They are the right ones: the next turn, the last answer once more and another last question begin at once, and an
    # edit in the middle begins later than at the system prompt.
    for index, most_tokens in ((20, 100), (19, 100), (18, 200), (10, 400)):
        request = chat.request(turns(messages)[index])
        (answer,) = serve(engine, request)
        assert answer.result.cache.num_prefilled_tokens < most_tokens
        assert answer.result.cache.num_cached_tokens > request.prompt.system_stop
