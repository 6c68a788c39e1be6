"""Several servers in one run: the work goes to who is least busy, and elsewhere when a server dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwen35mm.captioning import pool
from qwen35mm.captioning.job import carry_out
from qwen35mm.captioning.pool import Member, PoolCaptioner
from qwen35mm.cli import app
from qwen35mm.errors import CaptioningError, EngineError
from tests.backends.remote.server import closes, running_server
from tests.captioning.fake_model import Asked, FakeModel, picture, say_what_was_seen
from tests.captioning.runs import failures, job, listed, settings

pytestmark = pytest.mark.usefixtures("media_in_process")


class FailingModel(FakeModel):
    """Fails while it is down."""

    def __init__(self, is_down: Callable[[], bool], delay_s: float = 0.0) -> None:
        def answer(asked: Asked) -> str:
            if is_down():
                raise EngineError("The connection was refused.")
            return say_what_was_seen(asked)

        super().__init__(answer=answer, delay_s=delay_s)


def pool_of(*models: FakeModel, slots: int = 2) -> PoolCaptioner:
    members = [Member(f"http://{number}", model.captioner()) for number, model in enumerate(models)]

    async def sleep(seconds: float) -> None:
        assert 0 < seconds <= 30
        for member in members:
            member.rests_until_s = 0.0
        await asyncio.sleep(0)

    return replace(PoolCaptioner.of(members, slots), sleep=sleep)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for seed in range(30):
        picture(seed).save(folder / f"{seed:02}.png")
    return folder


async def test_the_least_busy_server_gets_the_next_item(many: Path) -> None:
    fast, slow = FakeModel(delay_s=0.001), FakeModel(delay_s=0.05)
    captioner = pool_of(fast, slow)
    one = job(many, run=settings(slots=captioner.num_at_once))
    assert (await carry_out(one, captioner)).counts.num_captioned == 30
    assert len(fast.asked) > 2 * len(slow.asked) > 0
    assert fast.most_at_once <= 3
    assert sorted([len(fast.asked), len(slow.asked)]) == sorted(member.num_captions for member in captioner.members)


async def test_a_server_that_dies_is_left_and_tried_again_and_its_items_go_elsewhere(many: Path) -> None:
    asked = 0

    def is_down() -> bool:
        nonlocal asked
        asked += 1
        return 4 <= asked < 8

    dying, other = FailingModel(is_down, delay_s=0.002), FakeModel(delay_s=0.004)
    captioner = pool_of(dying, other)
    outcome = await carry_out(job(many, outputs=[f"jsonl:{many.parent}/all.jsonl"], run=settings(slots=4)), captioner)
    assert (outcome.exit_code, outcome.counts.num_captioned, failures(many)) == (0, 30, [])
    # Each picture has its own caption, once.
    lines = listed(many.parent / "all.jsonl")
    assert len({line["caption"] for line in lines}) == len(lines) == 30
    first = captioner.members[0]
    assert first.num_captions >= 3
    assert first.num_failures >= 1
    assert first.num_captions + captioner.members[1].num_captions == 30


async def test_a_run_ends_where_all_servers_are_gone_and_the_next_one_completes_it(many: Path) -> None:
    captioner = pool_of(FailingModel(lambda: True), FailingModel(lambda: True))
    outcome = await carry_out(job(many, run=settings(slots=4)), captioner)
    assert outcome.exit_code == 5
    assert "attempts on 2 servers failed" in failures(many)[0]["message"]
    outcome = await carry_out(job(many, run=settings(slots=4)), pool_of(FakeModel(), FakeModel()))
    assert (outcome.exit_code, outcome.counts.num_captioned) == (0, 30)


async def test_a_failed_server_rests_longer_each_time_and_is_then_tried_by_one_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = Member("http://0", FakeModel().captioner())
    assert member.may_take(0.0)
    rests = []
    now_s = 100.0
    for _ in range(9):
        member.fail(now_s, "refused")
        # Those under way when it died don't count.
        member.fail(now_s, "refused")
        rests.append(member.rests_until_s - now_s)
        assert not member.may_take(now_s)
        now_s = member.rests_until_s
        assert member.may_take(now_s)
        monkeypatch.setattr(member, "num_running", 1)
        assert not member.may_take(now_s)
        monkeypatch.setattr(member, "num_running", 0)
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert pool._MOST_TRIES > 2


def test_servers_with_different_models_are_refused() -> None:
    members = [Member("http://a", FakeModel().captioner("a")), Member("http://b", FakeModel().captioner("b"))]
    with pytest.raises(CaptioningError, match="need the same model: http://a has Fake-1B, http://b has Fake-1B"):
        PoolCaptioner.of(members, 2)


def test_the_command_takes_several_servers(many: Path) -> None:
    with running_server() as first, running_server() as second:
        first.acts = [first.otherwise] * 3 + [closes] * 8
        urls = [word for server in (first, second) for word in ("--backend", server.url)]
        arguments = ["caption", str(many), "--slots", "2", *urls, "--output", f"jsonl:{many.parent}/all.jsonl"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        lines = listed(many.parent / "all.jsonl")
        assert Counter(line["name"] for line in lines) == Counter(f"{seed:02}.png" for seed in range(30))
        assert len(second.bodies) >= 20
        assert f"{first.url}: " in result.output
        assert f"{second.url}: " in result.output
        second.models = ["other"]
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, CaptioningError)
        assert "need the same model" in str(result.exception)
