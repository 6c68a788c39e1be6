from __future__ import annotations

from typing import Any

import pytest

from qwen35mm.chat.replies.stats import stats_of
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.contract import Progress
from qwen35mm.web.rendering.wording import describe_memory, describe_stats, work_of
from qwen35mm_preprocess.say import english
from tests.chat.fake_backend import make_result

RUNNING = Node("1" * 32, "0" * 32, "assistant", 2.0, status="running")


def question(kinds: str) -> list[Node]:
    kind_of: dict[str, Any] = {"i": "image", "v": "video", "t": "text"}
    files = tuple(Attachment("ab" * 32, kind_of[kind], "x", 1) for kind in kinds)
    return [Node("0" * 32, None, "user", 1.0, "x", attachments=files)]


def read_work(node: Node, progress: Progress | None, path: list[Node]) -> dict[str, Any]:
    work = work_of(node, progress, path)
    assert work is not None
    return {**work, "label": english(work["label"])}


def read_stats(stats: dict[str, Any]) -> dict[str, str]:
    """The rows on what an answer cost."""
    told = describe_stats(stats)
    assert told is not None
    return {english(name): english(value) for name, value in told}


@pytest.mark.parametrize(
    ("progress", "kinds", "label", "share"),
    [
        (Progress("wait", 0, 0), "", "Waiting in the queue", None),
        (Progress("wait", 2, 5), "", "Waiting in the queue, 2 ahead", None),
        (Progress("read", 0, 1), "i", "Reading image", 0.0),
        (Progress("read", 6, 24), "v", "Reading video, 6/24 frames", 0.25),
        (Progress("read", 1, 2), "it", "Reading image", 0.5),
        (Progress("read", 1, 2), "iv", "Reading images and videos, 1/2 frames", 0.5),
        (Progress("encode", 3, 6), "ii", "Encoding images, 50%", 0.5),
        (Progress("encode", 0, 0), "v", "Encoding video, 0%", None),
        (Progress("prefill", 512, 1024), "", "Reading the prompt, 512/1,024 tokens", 0.5),
        (Progress("prefill", 9, 8), "", "Reading the prompt, 9/8 tokens", 1.0),
    ],
)
def test_work_in_progress(progress: Progress, kinds: str, label: str, share: float | None) -> None:
    assert read_work(RUNNING, progress, question(kinds)) == {"label": label, "share": share, "pace": []}


@pytest.mark.parametrize(
    ("fields", "label"), [({}, "Waiting for the model"), ({"reasoning": "hm"}, "Thinking"), ({"text": "so"}, "Writing")]
)
def test_work_without_a_measure(fields: dict[str, str], label: str) -> None:
    node = Node("1" * 32, "0" * 32, "assistant", 2.0, status="running", **fields)  # pyright: ignore[reportArgumentType]
    assert read_work(node, None, question("")) == {"label": label, "share": None, "pace": []}


def test_no_work_is_left_at_the_end() -> None:
    assert work_of(Node("1" * 32, None, "assistant", 2.0, "so"), Progress("read", 1, 2), question("")) is None


def test_what_an_answer_cost() -> None:
    result = make_result(
        "so",
        num_prompt_tokens=1000,
        num_cached_tokens=900,
        cached_from={"device": 600, "disk": 300, "host": 0},
        miss="new content",
        num_encoded_units=1,
        num_cached_units=2,
        decode_s=0.05,
        cache_bytes=18 * 2**20,
    )
    rows = read_stats(stats_of(result))
    assert rows["Answer"] == "2 tokens"
    assert rows["Speed"] == "40.0 tokens per second, 0.1 s"
    assert rows["First token after"] == "0.25 s"
    assert not {"Tokens a step", "Evicted"} & set(rows)
    assert rows["Prompt"] == "1,000 tokens, 100 of them computed"
    assert rows["From the cache"] == "900 tokens (600 in memory, 300 on disk); the rest is new"
    assert rows["Pictures and clips"] == "1 encoded, 2 from the cache"
    assert rows["Memory"] == "18 MiB"


def test_how_many_tokens_a_step_gave() -> None:
    stats = stats_of(make_result("so")) | {"num_generated_tokens": 21, "num_accepted_tokens": 11}
    assert read_stats(stats)["Tokens a step"] == "2.1"


def test_how_many_keys_and_values_were_evicted() -> None:
    rows = read_stats(stats_of(make_result("so", num_evicted_tokens=1_200)))
    assert rows["Evicted"] == "keys and values of 1,200 tokens"


def test_what_a_first_answer_cost() -> None:
    rows = read_stats(stats_of(make_result("so", num_prompt_tokens=1, miss="evicted")))
    assert rows["Prompt"] == "1 token, 1 of them computed"
    assert rows["From the cache"] == "nothing: the rest was evicted"
    assert describe_stats(None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompt_tokens": "many"},
        {"num_cached_units": {"text": "x", "values": {}}},
        {"cached_from": 3},
        {"cached_from": {"disk": "1"}},
        {"cached_from": {"moon": 1}},
        {"ttft_s": []},
        {"decode_s": float("inf")},
    ],
)
def test_numbers_of_another_form_are_not_told(change: dict[str, Any]) -> None:
    stats = stats_of(make_result("so", num_cached_tokens=1))
    assert describe_stats(stats) is not None
    assert describe_stats({**stats, **change}) is None
    assert describe_stats({"foreign": True}) is None


def test_memory() -> None:
    gib = 2**30
    memory = {"kv_bytes": gib, "kv_budget_bytes": 2 * gib, "states_bytes": 3 * gib, "states_budget_bytes": 2 * gib}
    told = describe_memory(memory)
    assert english(told["words"]) == "Cache: KV 1.0 GiB of 2.0 GiB, states 3.0 GiB of 2.0 GiB"
    assert told["share"] == 1.0
    assert describe_memory({})["share"] == 0.0
    assert describe_memory({})["words"] == "", "a server's cache is its own"
