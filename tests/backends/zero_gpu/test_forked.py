"""A ZeroGPU Space in a process of its own, with a `spaces` that forks for each call and throws the child away."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import forked
from tests.children import environment


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver tells; see there."""
    folder = tmp_path_factory.mktemp("space")
    inherited = {name: value for name, value in environment().items() if not name.startswith("QWEN35MM_")}
    space = {"SPACES_ZERO_GPU": "true", "SPACE_ID": "someone/something", "TMPDIR": str(folder)}
    done = forked.run("tests.backends.zero_gpu.drive", env={**inherited, **space})
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "errors": done.stderr, "left": sorted(path.name for path in folder.iterdir())}


def test_the_environment_chooses_the_backend(told: dict[str, Any]) -> None:
    assert told["kind"] == "ZeroGpuBackend"
    assert told["demo"]


def test_each_call_is_another_child(told: dict[str, Any]) -> None:
    pids = [call["pid"] for call in told["calls"]]
    assert len(set(pids)) == len(pids) == 9
    assert told["parent"] not in pids


def test_replies_equal_the_local_backends(told: dict[str, Any]) -> None:
    for name in ("token_ids", "prompt_token_ids", "num_prefilled"):
        assert [turn[name] for turn in told["turns"]] == [turn[name] for turn in told["local_turns"]]
    assert all(turn["token_ids"] for turn in told["turns"])


def test_a_turn_goes_on_from_what_the_call_before_left_on_disk(told: dict[str, Any]) -> None:
    first, second = told["turns"]
    assert first["cached_from"] == {}
    assert list(second["cached_from"]) == ["disk"]
    assert second["cached_from"]["disk"] == told["local_turns"][1]["cached_from"]["device"] > 600


def test_nothing_of_an_engine_is_held_at_a_fork(told: dict[str, Any]) -> None:
    for call in told["calls"]:
        assert call["forbidden"] == []
        # The pools that read media and make prompts wait for work, and the decoders' clock for its time; the call's
        # thread is the one that forks.
        names = {name.rstrip("0123456789") for name in call["threads"]}
        pools = {"qwen35mm-media_", "qwen35mm-prompts_", "qwen35mm-decoders"}
        assert names <= {"MainThread", "asyncio_", "qwen35mm-gpu-call"} | pools


def test_a_killed_child_is_an_error_and_the_next_call_works(told: dict[str, Any]) -> None:
    assert told["killed"]["type"] == "EngineError"
    assert "GPU process ended" in told["killed"]["message"]
    assert told["after"]


def test_an_error_in_the_child_arrives_as_its_type_with_its_words(told: dict[str, Any]) -> None:
    assert told["gone"] == {
        "type": "MediaSourceError",
        "message": "'gone.png' could not be opened: there is no such file. Check its path and permissions.",
    }
    assert told["found"]["type"] == "none", "what is on disk needs no file"


def test_what_breaks_in_the_child_shows_nothing_of_the_server(told: dict[str, Any]) -> None:
    assert told["failed"]["type"] == "EngineError"
    assert "/a/path" not in told["failed"]["message"]
    assert "/a/path" in told["errors"], "the log has it"


def test_stopping_ends_the_child_and_keeps_its_prompt(told: dict[str, Any]) -> None:
    assert told["stopped"]
    assert told["closed"]
    assert told["after_stop"]["cached_from"]["disk"] > 450


def test_what_is_too_long_asks_for_no_gpu(told: dict[str, Any]) -> None:
    assert told["too_long"]["type"] == "ContextTooLongError"
    assert told["calls_for_too_long"] == 0


def test_the_pipe_carries_batches(told: dict[str, Any]) -> None:
    assert all(call["num_values"] < 60 for call in told["calls"])
    assert all(call["duration"] == 15 for call in told["calls"]), "the least that is asked for"


def test_the_cache_ends_with_the_program(told: dict[str, Any]) -> None:
    assert told["left"] == []
