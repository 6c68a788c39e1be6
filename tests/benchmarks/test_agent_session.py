"""The session of an agent: its script, and that a real server reads of each turn little more than what is new."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.agent_session import OURS, Script, Step, body_of, measure
from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.prompt.build import num_in_common
from qwen35mm.prompt.calls import OPEN
from qwen35mm.server.app import create_app
from tests.server.conftest import PATIENCE_S, serving

OPTIONS = Namespace(model=demo_model_path(), turns=12, system_tokens=700, result_percent=5)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(OPTIONS)


class Prefixes:
    """A server that keeps every prompt it has seen, and nothing between two tokens of one."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._seen: list[Any] = []

    def ask(self, step: Step) -> tuple[float, int] | None:
        ids = self._script.ids(step.messages)
        if step.hangs_up:
            return None
        cached = max((num_in_common(ids, each) for each in self._seen), default=0)
        self._seen.append(ids)
        return 0.0, len(ids) - cached


def test_a_session_has_every_kind_of_turn(script: Script) -> None:
    steps = list(script.steps())
    assert {step.what for step in steps} == {
        *("cold", "turn", "interrupted", "asked again", "other agent", "other agent again", "after the other agent"),
        *("restart", "edited"),
    }
    assert [step.what for step in steps if step.after_restart] == ["restart"]
    assert [step.what for step in steps if step.hangs_up] == ["interrupted"]


def test_a_turn_goes_on_from_the_prompt_and_the_token_before(script: Script) -> None:
    begin = script.tokenizer.control_ids[OPEN]
    before = None
    for step in script.steps():
        ids = script.ids(step.messages)
        if step.what == "turn" and before is not None and ids[-1] == before[-1]:
            shared = num_in_common(ids, before)
            # A person's message changes how the template writes the turns before it.
            if "user" not in [each["role"] for each in step.messages[-2:]]:
                assert shared == len(before)
                assert ids[shared] == begin
        before = ids if step.agent == 0 else None


def test_a_perfect_server_reads_what_is_new(script: Script) -> None:
    rows = measure(script, {OURS: Prefixes(script)}, 0)  # pyright: ignore[reportArgumentType]
    assert rows[0]["own"] == rows[0]["prompt"]
    assert all(row[f"{OURS}: read"] in (None, row["own"]) for row in rows)


class Served:
    """Our own server in this process, with one slot and a disk cache."""

    def __init__(self, demo: LoadedModel, folder: Path, script: Script) -> None:
        self._demo, self._folder, self._script = demo, folder, script
        self._stack = ExitStack()
        self._start()

    def _start(self) -> None:
        cache = CacheSettings(directory=self._folder)
        self._backend = LocalBackend(self._demo, settings=EngineSettings(slots=1), cache=cache)
        self._stack.callback(self._backend.close)
        self._address = self._stack.enter_context(serving(create_app(self._backend)))

    def close(self) -> None:
        self._stack.close()

    def ask(self, step: Step) -> tuple[float, int] | None:
        if step.after_restart:
            self._stack.close()
            self._start()
        address, body = f"{self._address}/v1/chat/completions", body_of(step, self._script)
        if step.hangs_up:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(address, json=body, timeout=httpx.Timeout(PATIENCE_S, read=0.001))
            return None
        answer = httpx.post(address, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        # As long as a tool runs.
        assert self._backend.wait_idle(PATIENCE_S)
        return 0.0, answer.json()["timings"]["prompt_n"]


@pytest.fixture
def served(demo: LoadedModel, script: Script, tmp_path: Path) -> Iterator[Served]:
    with closing(Served(demo, tmp_path, script)) as server:
        yield server


def test_a_turn_reads_its_own_message_and_little_more(served: Served, script: Script) -> None:
    rows = measure(script, {OURS: served}, 0)  # pyright: ignore[reportArgumentType]
    cold = ("cold", "other agent", "interrupted")
    more = {row["request"]: row[f"{OURS}: read"] - row["own"] for row in rows if row["what"] not in cold}
    assert max(more.values()) < 128, more
