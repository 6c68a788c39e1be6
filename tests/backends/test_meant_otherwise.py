"""What users try with a backend, and what was meant for something else: refused before any work, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import GenerationRequest, Image, Message, Text, pin_plans
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import CheckpointError, ConfigError, PromptError, RequestError
from qwen35mm.model import LoadedModel
from tests.backends.events import collect
from tests.engine.exact import picture

HELLO = Message("user", (Text("hello"),))


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(demo)
    yield backend
    backend.close()


@pytest.mark.parametrize(
    ("messages", "options", "error", "words"),
    [
        (HELLO, {}, PromptError, r"got one Message\. Put it in \["),
        ("hello", {}, PromptError, "got one str"),
        ([{"role": "user", "content": "hello"}], {}, PromptError, "Message 1 is a dict"),
        ([HELLO], {"params": {"temperature": 0}}, RequestError, "params must be SamplingParams.*got {'temperature'"),
        (
            [HELLO],
            {"retain": "all"},
            RequestError,
            "retain must be one of conversation, memory, prompt, shared, nothing; got 'all'",
        ),
        ([HELLO], {"timeout_s": float("nan")}, RequestError, "timeout_s must be a number of seconds above 0.*got nan"),
        ([HELLO], {"timeout_s": True}, RequestError, "timeout_s .*got True"),
        ([HELLO], {"enable_thinking": "yes"}, RequestError, "enable_thinking must be True, False or None; got 'yes'"),
        ([HELLO], {"conversation": 3}, RequestError, "conversation must be a string, or None; got 3"),
        ([HELLO], {"tenant": 3}, RequestError, "tenant must be a string, or None; got 3"),
        ([HELLO], {"tools": "f"}, RequestError, "tools must be a list of definitions in OpenAI's form; got 'f'"),
        ([HELLO], {"tools": [print]}, RequestError, "tools must be a list of definitions"),
    ],
)
async def test_what_was_meant_for_something_else_is_refused_in_words(
    messages: Any, options: dict[str, Any], error: type[Exception], words: str, backend: LocalBackend
) -> None:
    with pytest.raises(error, match=words):
        await collect(backend.stream(GenerationRequest(messages, **options)))
    if error is PromptError:
        with pytest.raises(error, match=words):
            backend.count_tokens(messages)


def test_settings_of_another_kind_are_refused_in_words(demo: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="slots must be a whole number, 1 or more; got '4'"):
        EngineSettings(slots="4")  # pyright: ignore[reportArgumentType]
    for name, wrong in (("settings", {"slots": 4}), ("cache", 3), ("budget", 1280), ("limits", "none")):
        with pytest.raises(ConfigError, match=f"{name} must be .*got {wrong!r}"):
            LocalBackend(demo, **{name: wrong})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"min_segment must be a whole number from 1 to .*got 0"):
        LocalBackend(demo, min_segment=0)
    with pytest.raises(ConfigError, match="batch_invariant must be True or False; got 'no'"):
        EngineSettings(batch_invariant="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="commit_history must be bool, or None; got 'no'"):
        LocalBackend(demo, commit_history="no")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("path", [None, 3, "", b"model"])
def test_a_model_that_is_none_is_refused_in_words(path: Any) -> None:
    with pytest.raises(CheckpointError, match="A model is a folder, or a Hub id"):
        LocalBackend.load(path)


PICTURE = Message("user", Image(picture(0)))


@pytest.mark.parametrize(
    ("messages", "plans", "words"),
    [
        ([PICTURE], [], r"a plan for each medium, 1 in all; got 0\."),
        (PICTURE, [], r"got one Message\. Put it in"),
        ("hello", [], "got one str"),
        ([{"role": "user"}], [], "Message 1 is a dict"),
        ([PICTURE], None, "plans must be a list of MediaPlan; got NoneType"),
        ([PICTURE], [None], "plans must be a list of MediaPlan; got list"),
    ],
)
def test_plans_that_belong_to_nothing_are_refused_in_words(messages: Any, plans: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        pin_plans(messages, plans)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": "3"}, "timeout_s must be a number of seconds above 0; got '3'"),
        ({"api_key": 3}, "api_key must be str, or None; got 3"),
        ({"model": Path("model")}, "model must be str, or None"),
        ({"budget": 1280}, "budget must be MediaBudget, or None; got 1280"),
        ({"timeouts": 3}, "timeouts must be RemoteTimeouts"),
    ],
)
def test_a_server_s_options_are_checked_first(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RemoteBackend("http://127.0.0.1:1", **options)
