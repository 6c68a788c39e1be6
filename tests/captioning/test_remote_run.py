"""A run whose captions a server writes: its media are read in other processes, and are those of the digest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.job import Outcome, carry_out
from qwen35mm.captioning.media import workers
from qwen35mm.cli.caption import open_captioner
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.contract import SamplingParams
from qwen35mm.decoding import process
from qwen35mm.settings import ModelOptions
from tests import hostile_decoder
from tests.backends.remote.server import ModelServer, running_server
from tests.captioning.fake_model import picture
from tests.captioning.runs import failures, job, listed, settings


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with running_server() as server:
        yield server


async def run(folder: Path, server: ModelServer, **options: Any) -> Outcome:
    backend = RemoteBackend(server.url, model="tiny", max_concurrent=2)
    outputs = [f"jsonl:{folder}/all.jsonl"]
    one = job(folder, outputs=outputs, num_workers=2, run=settings(**options))
    captioner = Captioner(
        backend=backend, name="tiny", identity={}, params=SamplingParams(), processor=backend.media, form="frames"
    )
    try:
        return await carry_out(one, captioner)
    finally:
        await backend.aclose()


def sent_digests(server: ModelServer) -> set[str]:
    uris = [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.bodies]
    return {hashlib.sha256(base64.b64decode(uri.partition(",")[2])).hexdigest() for uri in uris}


@pytest.mark.usefixtures("media_in_process")
async def test_a_caption_is_kept_under_the_digest_of_what_was_sent(folder: Path, server: ModelServer) -> None:
    outcome = await run(folder, server, max_distance=2)
    assert (outcome.exit_code, outcome.counts.num_captioned) == (0, 6)
    lines = listed(folder / "all.jsonl")
    assert {line["sha256"] for line in lines} == sent_digests(server)
    assert {(line["width"], line["height"]) for line in lines} == {(48, 32)}


async def test_a_file_on_which_the_decoder_dies_and_one_that_changes_before_it_is_sent_are_failures(
    folder: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = workers.MediaWorkers.prepare

    async def changing(self: Any, item: Item, *arguments: Any, **options: Any) -> Any:
        if item.name == "1.png":
            picture(99).save(folder / "1.png")
        return await prepare(self, item, *arguments, **options)

    monkeypatch.setattr(workers.MediaWorkers, "prepare", changing)
    monkeypatch.setattr(process, "_COMMAND", hostile_decoder.COMMAND)
    (folder / "2.png").rename(folder / "-late crash-.png")
    outcome = await run(folder, server)
    assert (outcome.exit_code, outcome.counts.num_captioned, len(server.bodies)) == (3, 4, 4)
    kinds = {each["name"]: each["kind"] for each in failures(folder)}
    assert kinds == {"-late crash-.png": "crash", "1.png": "changed"}


@pytest.mark.usefixtures("media_in_process")
async def test_another_address_of_the_same_model_does_nothing_again_and_another_model_everything(folder: Path) -> None:
    one = job(folder, run=settings())

    async def ask(url: str, model: str) -> Outcome:
        async with open_captioner(one, ModelOptions(model=model), CaptionOptions(backend=[url])) as captioner:
            return await carry_out(one, captioner)

    with running_server() as first, running_server() as second:
        # As a run of an earlier version, whose captions had the server's address in their keys.
        async with open_captioner(one, ModelOptions(model="tiny"), CaptionOptions(backend=[first.url])) as captioner:
            (before,) = captioner.others
            await carry_out(replace(one, run=settings(limit=2)), replace(captioner, identity=before["model"]))
        assert len(first.bodies) == 2
        await ask(first.url, "tiny")
        assert len(first.bodies) == 6
        (folder / "new.png").write_bytes((folder / "0.png").read_bytes() + b"!")
        await ask(first.url, "tiny")
        # Of the earlier version's two, nothing tells at which address they were made.
        outcome = await ask(second.url, "tiny")
        assert (outcome.counts.num_captioned, len(second.bodies)) == (2, 2)
        outcome = await ask(second.url, "other")
        assert outcome.counts.num_captioned == 7
