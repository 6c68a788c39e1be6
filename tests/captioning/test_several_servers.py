"""Runs whose captions several servers write; some die and come back, some refuse."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import pytest

from qwen35mm.backends.engine_pool import Member
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.backends.remote.pool import RemotePool
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Outcome, carry_out
from qwen35mm.captioning.progress import Counts, describe
from qwen35mm.contract import SamplingParams
from tests.backends.remote.server import Handler, ModelServer, answers, closes, fails, running_server
from tests.captioning.fake_model import picture
from tests.captioning.runs import failures, job, listed, settings, texts
from tests.captioning.test_parts import make_video
from tests.children import ROOT, environment
from tests.cli.conftest import Done, Run

NUM_ITEMS = 24
PATIENCE_S = 240
Caption = Callable[..., Done]


@pytest.fixture
def caption(qwen35mm: Run, media_in_process: None) -> Caption:
    return functools.partial(qwen35mm, "caption")


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for seed in range(NUM_ITEMS):
        picture(seed).save(folder / f"{seed:02}.png")
    return folder


@pytest.fixture
def servers() -> Iterator[tuple[ModelServer, ModelServer]]:
    with running_server() as first, running_server() as second:
        yield first, second


def options(media: Path, *urls: str) -> tuple[object, ...]:
    jsonl = f"jsonl:{media.parent / 'captions.jsonl'}"
    backends = [part for url in urls for part in ("--backend", url)]
    return (media, "--output", "sidecar", "--output", jsonl, *backends)


def check(media: Path, num_items: int = NUM_ITEMS) -> None:
    """Every item once in each output."""
    lines = listed(media.parent / "captions.jsonl")
    assert len(lines) == len(texts(media)) == num_items
    assert {line["name"].replace(".png", ".txt"): f"{line['caption']}\n" for line in lines} == texts(media)


def said(stderr: str, server: ModelServer) -> str:
    """What the end of a run says of a server."""
    (found,) = re.findall(rf"^{server.host}: (.*)$", stderr, re.MULTILINE)
    return found


def unused_url() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def test_each_server_gets_its_slots(caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer]) -> None:
    # Each answers its first two when both servers have two.
    together = threading.Barrier(4)

    def act(handler: Handler) -> None:
        together.wait(PATIENCE_S)
        answers(["A ", "square."])(handler)

    for server in servers:
        server.acts = [act, act]
    done = caption(*options(media, *(server.url for server in servers)), "--slots", "2")
    assert done.returncode == 0, done.stderr
    check(media)
    assert [server.max_active for server in servers] == [2, 2]
    num_answered = [len(server.bodies) for server in servers]
    assert sum(num_answered) == NUM_ITEMS
    assert [said(done.stderr, server) for server in servers] == [f"{n} answers" for n in num_answered]


def test_a_server_that_dies_and_comes_back_loses_nothing(
    caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer]
) -> None:
    dying, other = servers
    num_answered, came_back = 0, threading.Event()

    def live(handler: Handler) -> None:
        nonlocal num_answered
        num_answered += 1
        if num_answered == 4:
            dying.otherwise, dying.model_acts = closes, [closes] * 8
        if dying.otherwise is closes:
            closes(handler)
        else:
            answers(["A ", "square."])(handler)

    def answer_again(handler: Handler) -> None:
        came_back.set()
        answers(["A ", "circle."])(handler)

    def wait_for_return(handler: Handler) -> None:
        assert came_back.wait(PATIENCE_S)
        answers(["A ", "square."])(handler)

    dying.otherwise = live
    other.acts = [answers(["A ", "square."])] * 4
    other.otherwise = wait_for_return
    reviving = threading.Thread(target=revive, args=(dying, answer_again))
    reviving.start()
    done = caption(*options(media, dying.url, other.url), "--slots", "2")
    reviving.join()
    assert done.returncode == 0, done.stderr
    check(media)
    assert "A circle.\n" in texts(media).values()
    assert re.fullmatch(r"\d+ answers, [12] lost", said(done.stderr, dying)), done.stderr
    assert "lost" not in said(done.stderr, other)
    again = caption(*options(media, dying.url, other.url))
    assert (again.returncode, f"0 done, {NUM_ITEMS} skipped" in again.stderr) == (0, True), again.stderr


def test_a_summary_that_a_dying_server_loses_is_asked_of_the_other(
    caption: Caption, tmp_path: Path, servers: tuple[ModelServer, ModelServer]
) -> None:
    folder = tmp_path / "films"
    for number in range(4):
        make_video(folder / f"{number}.mp4", (2 * number, 2 * number + 1))
    dying, other = servers

    def die_at_a_summary(handler: Handler) -> None:
        if "image_url" in json.dumps(dying.bodies[-1]):
            answers(["A ", "square."])(handler)
            return
        dying.otherwise, dying.model_acts = closes, [closes] * 1000
        closes(handler)

    dying.otherwise = die_at_a_summary
    backends = ("--backend", dying.url, "--backend", other.url, "--slots", "1")
    command = (folder, "--split", "scenes", "--summary", "--output", f"jsonl:{tmp_path / 'all.jsonl'}", *backends)
    done = caption(*command)
    assert done.returncode == 0, done.stderr
    assert "1 lost, away" in said(done.stderr, dying)
    rows = listed(tmp_path / "all.jsonl")
    assert sorted(row["name"] for row in rows if "part" not in row) == ["0.mp4", "1.mp4", "2.mp4", "3.mp4"]
    assert (len(rows), {len(row["flags"]) for row in rows}) == (12, {0})
    asked = len(other.bodies)
    assert caption(*command).returncode == 0
    assert len(other.bodies) == asked, "nothing is asked twice"


def test_captions_of_a_medium_come_from_the_server_that_has_its_picture(
    caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer]
) -> None:
    for path in sorted(media.iterdir())[2:]:
        path.unlink()
    words = ("--preset", "tags,short,detailed", "--slots", "1")
    done = caption(media, *(part for server in servers for part in ("--backend", server.url)), *words)
    assert done.returncode == 0, done.stderr
    assert len(texts(media)) == 6
    asked = [[body["messages"][-1]["content"] for body in server.bodies] for server in servers]
    assert [len(each) for each in asked] == [3, 3]
    for questions in asked:
        assert len({str(picture) for picture, _ in questions}) == 1
        assert len({text["text"] for _, text in questions}) == 3


def revive(server: ModelServer, act: Callable[[Handler], None]) -> None:
    """Lets a server answer again once some probes have failed."""
    deadline = time.monotonic() + PATIENCE_S
    while not (server.otherwise is closes and len(server.model_acts) < 6):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with server.lock:
        server.otherwise = act
        server.model_acts.clear()


def test_a_server_that_comes_back_with_another_model_writes_no_caption(
    caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer]
) -> None:
    changing, other = servers
    was_asked = threading.Event()

    def change(handler: Handler) -> None:
        with changing.lock:
            changing.models, changing.otherwise = ["other"], answers(["Another model's."])
            changing.model_acts = [name_other, name_other]
        closes(handler)

    def name_other(handler: Handler) -> None:
        if not changing.model_acts:
            was_asked.set()
        handler.send_whole(200, b'{"object": "list", "data": [{"id": "other", "object": "model"}]}')

    def wait_for_question(handler: Handler) -> None:
        assert was_asked.wait(PATIENCE_S)
        answers(["A ", "square."])(handler)

    # Its requests that were under way at the change are dropped as well.
    changing.acts = [answers(["A ", "square."]), change, closes, closes, closes]
    other.otherwise = wait_for_question
    done = caption(*options(media, changing.url, other.url), "--slots", "1")
    assert done.returncode == 0, done.stderr
    check(media)
    assert set(texts(media).values()) == {"A square.\n"}
    assert "1 lost" in said(done.stderr, changing)


def test_a_server_that_is_not_there_is_said_and_the_other_works(caption: Caption, media: Path) -> None:
    missing = unused_url()
    with running_server() as server:
        done = caption(*options(media, missing, server.url))
        assert done.returncode == 0, done.stderr
        check(media)
        assert f"{missing.removeprefix('http://')}: 0 answers, 1 lost, away" in done.stderr
    done = caption(*options(media, missing, unused_url()))
    assert (done.returncode, "can't be reached" in done.stderr) == (1, True), done.stderr


def test_a_run_ends_if_all_servers_stay_away_and_the_next_one_completes_it(
    caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer]
) -> None:
    async def run() -> Outcome:
        backends = [RemoteBackend(server.url, max_concurrent=2, max_attempts=1, whole=True) for server in servers]
        async with aclosing(RemotePool(backends, 2, patience_s=0.01)) as pool:
            await pool.connect()
            for server in servers:
                server.otherwise, server.model_acts = closes, [closes] * 1000
            captioner = Captioner(
                backend=pool, name="tiny", identity={}, params=SamplingParams(), processor=pool.media, form="frames"
            )
            return await carry_out(job(media, run=settings(slots=4)), captioner)

    assert asyncio.run(run()).exit_code == 5
    assert {each["kind"] for each in failures(media)} == {"engine"}
    assert "No engine came back in 0.01 s" in failures(media)[-1]["message"]
    for server in servers:
        server.otherwise, server.model_acts = answers(["A ", "square."]), []
    done = caption(*options(media, *(server.url for server in servers)))
    assert done.returncode == 0, done.stderr
    check(media)


@pytest.mark.parametrize("kind", ["key", "address", "model", "named model", "twice"])
def test_servers_that_cannot_be_one_pool_are_refused_before_anything_is_asked(
    caption: Caption, media: Path, servers: tuple[ModelServer, ModelServer], kind: str
) -> None:
    first, second = servers
    urls, more = [first.url, second.url], []
    if kind == "key":
        second.model_acts = [fails(401, {"error": {"message": "Who are you?"}})]
        words = f"The server at {second.host} refused access with 401"
    elif kind == "address":
        second.model_acts = [fails(404)] * 9
        words = f"The server at {second.host} answered 404"
    elif kind == "twice":
        urls = [first.url, f"{first.url}/v1"]
        words = "is given twice"
    else:
        second.models = ["other"]
        more = ["--model", "tiny"] if kind == "named model" else []
        words = f"The server at {second.host} has 'other'; the one at {first.host} answers as 'tiny'."
    done = caption(*options(media, *urls), *more)
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    assert first.bodies == second.bodies == []
    assert not texts(media)


def test_the_progress_names_few_engines_and_counts_many() -> None:
    members = [Member("a:80", None, 4, num_answered=12), Member("b:80", None, 4)]
    members[1].state = "away"
    assert describe(Counts(engines=members)) == "0 done, a:80: 12, b:80: 0 (away)"
    assert describe(Counts(engines=members * 3)) == "0 done, 3 of 6 engines away"


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`qwen35mm serve` with the bundled model; ready."""
    command = (sys.executable, "-m", "qwen35mm", "serve", "--port", str(port), "--slots", "2")
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with socket.socket() as found:
                if found.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_real_server_is_killed_and_started_again_in_the_middle(tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    num_items = 300
    for seed in range(num_items):
        picture(seed).save(media / f"{seed:03}.png")
    urls = [unused_url(), unused_url()]
    ports = [int(url.rpartition(":")[2]) for url in urls]

    def wait_for(num_texts: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(texts(media)) < num_texts:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ExitStack() as stack:
        dying = stack.enter_context(serving(ports[0]))
        stack.enter_context(serving(ports[1]))
        command = ("caption", *options(media, *urls), "--preset", "plain", "--max-tokens", "24", "--slots", "2")
        run = subprocess.Popen(
            [sys.executable, "-m", "qwen35mm", *map(str, command)],
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(20, run)
        os.kill(dying.pid, signal.SIGKILL)
        dying.wait()
        wait_for(60, run)
        stack.enter_context(serving(ports[0]))
        errors = run.communicate(timeout=PATIENCE_S)[1]
    assert run.returncode == 0, errors
    check(media, num_items)
    assert "answers again" in errors
