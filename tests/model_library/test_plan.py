"""The forecast of memory: known figures, what is read for it, and that a running program keeps to it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.make_random import ROOT, make_config
from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
from qwen35mm.cache.planner import STARTED_BYTES
from qwen35mm.checkpoints.lora_choices import read_choices
from qwen35mm.cli import app
from qwen35mm.cli.plan import _show
from qwen35mm.config import ModelConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.memory import PROMPT_TOKEN_BYTES
from qwen35mm.errors import CheckpointError
from qwen35mm.model_library import HUB_MODELS, BackendOptions, fit_source
from qwen35mm.model_library import memory as model_memory
from qwen35mm.model_library.memory import NoRoomError
from qwen35mm.model_library.plan import Forecast, forecast
from qwen35mm_preprocess import MediaBudget
from tests.small_adapters import DEMO_MODULES, write_adapter

MIB, GIB = 1 << 20, 1 << 30
OPTIONS = BackendOptions(device="cpu", max_memory=64 * GIB)


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """35B-A3B's config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(make_config("35B-A3B", "bfloat16")))
    return tmp_path


def planned(folder: Path, context_length: int) -> Forecast:
    settings = EngineSettings(context_length=context_length)
    return forecast(folder, replace(OPTIONS, weights="int4", settings=settings))


def test_known_figures_of_35b(config_alone: Path) -> None:
    """Of llama.cpp's for this model: its KV, and the 251.25 MiB that it keeps for four sequences."""
    for length, mib in ((4_096, 80), (32_768, 640), (65_536, 1_280), (131_072, 2_560), (262_144, 5_120)):
        found = planned(config_alone, length)
        assert found.formats[0].needed.kv_bytes == mib * MIB
    assert found.weights_from == "config.json"
    assert 4 * found.recurrent_bytes == 240 * MIB
    config = ModelConfig.from_pretrained(config_alone)
    # With conv states in float32. Here they are in the model's own type, which is half of 11.25 MiB.
    assert 4 * config.state_bytes(torch.float32) == int(251.25 * MIB)
    assert 4 * found.state_bytes == 240 * MIB + int(11.25 * MIB) // 2
    assert [each.num_tokens for each in found.media] == [302, 1_224, 1_232, 3_911]


@pytest.mark.usefixtures("hub_cache")
def test_a_model_of_the_catalogue_is_planned_without_the_network(
    config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from its config.json, also with another rope scaling."""
    monkeypatch.setattr("qwen35mm.model_library.plan.download_config", None)
    options = replace(OPTIONS, weights="int4", rope_scaling="yarn,factor=2")
    known, read = (forecast(each, options, room_bytes=64 * GIB) for each in ("Qwen/Qwen3.5-35B-A3B", config_alone))
    assert known.weights_from == "the catalogue"
    assert known.num_positions == 2 * 262_144
    assert known.download_bytes == HUB_MODELS[-1].download_bytes
    assert replace(known, name=read.name, weights_from="config.json", download_bytes=None) == read


def test_on_a_card_the_forecast_counts_integers_and_a_mixtures_experts_too(
    config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for module in ("qwen35mm.model.weights", "qwen35mm_kernels.backend"):
        monkeypatch.setattr(f"{module}.why_not_triton", lambda kind: None)
    (config_alone / "dense").mkdir()
    (config_alone / "dense/config.json").write_text(json.dumps(make_config("9B", "bfloat16")))

    def weights_bytes(folder: Path, weights: str, device: str) -> int:
        options = BackendOptions(device=device, weights=weights, settings=EngineSettings(context_length=4_096))
        found = forecast(folder, options, room_bytes=1 << 40)
        assert [offer.weights for offer in found.offers] == ["bf16", "int8", "int4"]
        return found.formats[0].needed.weights_bytes

    for folder in (config_alone, config_alone / "dense"):
        sizes = {name: weights_bytes(folder, name, "cuda:0") for name in ("bf16", "int8", "int4")}
        on_cpu = weights_bytes(folder, "int4", "cpu")
        assert sizes["bf16"] > sizes["int8"] > sizes["int4"] == on_cpu


def test_what_fits_is_as_long_as_it_says(config_alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.model_library.plan.resident_bytes", lambda: 300 * MIB)
    options = replace(OPTIONS, max_memory=22 * GIB)
    found = forecast(config_alone, options)
    own, eight, four = (each for each in found.formats if each.kv_dtype == "auto")
    assert (own.fits, eight.fits, four.fits) == (False, False, True)
    assert own.largest_context is None
    assert four.most is not None
    assert four.most.total_bytes <= 22 * GIB
    longest = four.largest_context
    assert longest is not None
    one = replace(options, weights="int4")
    assert forecast(config_alone, one.with_context(longest)).formats[0].fits
    assert not forecast(config_alone, one.with_context(longest + 64)).formats[0].fits


def test_headers_are_read_where_they_are() -> None:
    found = forecast(demo_model_path(), OPTIONS)
    assert found.weights_from == "headers"
    assert found.to_dict()["formats"][0]["needed"]["total_bytes"] == found.formats[0].needed.total_bytes


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        forecast(tmp_path, OPTIONS)


def test_max_memory_is_kept_to(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(model_memory, "resident_bytes", lambda: 300 * MIB)
    monkeypatch.setattr(model_memory, "available_bytes", lambda device: 20 * GIB)

    def within(num_bytes: int, **changes: Any) -> BackendOptions:
        caplog.clear()
        options = BackendOptions(device="cpu", max_memory=num_bytes, **changes)
        fitted, _ = fit_source(options, demo_model_path(), "demo")
        (said,) = caplog.messages
        assert said.startswith("Within ")
        return fitted

    assert within(4_096 * MIB).settings == EngineSettings()
    cache, settings = CacheSettings(kv_dtype="int8"), EngineSettings(slots=1)
    (least,) = forecast(demo_model_path(), replace(OPTIONS, weights="int4", cache=cache, settings=settings)).formats
    tokenizer = model_memory.tokenizer_bytes(ModelConfig.from_pretrained(demo_model_path()))
    enough = 300 * MIB + STARTED_BYTES + tokenizer + 8_192 * PROMPT_TOKEN_BYTES + least.needed.device_bytes
    one = within(enough)
    assert (one.settings.slots, one.cache.kv_dtype, one.settings.context_length) == (1, "int8", None)
    few = enough - MIB // 2
    small = within(few)
    assert small.settings.slots == 1
    assert small.cache.kv_dtype == "int8"
    assert small.settings.context_length is not None
    assert 2_048 <= small.settings.context_length < 8_192
    with pytest.raises(
        NoRoomError, match=r"--max-memory 450\.0 MiB, 372\.0 MiB of it for the program: demo doesn't fit"
    ):
        within(450 * MIB)
    with pytest.raises(NoRoomError):
        within(few, settings=EngineSettings(context_length=8_192), fixed_slots=True)


def test_a_context_beyond_memory_is_planned_in_a_file(
    config_alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """35B-A3B in int4, 5 GiB of keys and values, in as much memory as it takes without them."""
    monkeypatch.setattr("qwen35mm.cache.planner.file_room", lambda folder: 5 * GIB)
    monkeypatch.setattr("qwen35mm.model_library.plan.resident_bytes", lambda: 300 * MIB)
    options = replace(OPTIONS, weights="int4", cache=CacheSettings(kv_dtype="bf16"), kv_directory=config_alone)
    options = options.with_context(262_144)
    (in_memory,) = forecast(config_alone, options).formats
    assert (in_memory.needed.kv_directory, in_memory.needed.kv_memory_bytes) == (None, 5 * GIB)
    least = in_memory.needed.total_bytes - 5 * GIB - 3 * (in_memory.needed.slot_bytes // 5)
    short = forecast(config_alone, replace(options, max_memory=least + 8 * MIB))
    (in_file,) = short.formats
    needed = in_file.needed
    assert (in_file.fits, needed.kv_directory, needed.num_slots) == (True, str(config_alone), 1)
    assert (needed.kv_bytes, needed.kv_memory_bytes) == (5 * GIB, 0)
    assert in_memory.needed.total_bytes - needed.total_bytes > 5 * GIB
    assert in_file.largest_context == 262_144
    _show(Console(width=200), short)
    shown = capsys.readouterr().out
    assert f"keys and values of 262,144 tokens are in a file of 5,120.0 MiB in {config_alone}" in shown
    assert " file " in shown
    # One that nobody asked for, and one that the disk doesn't hold either.
    default = options.with_context(None)
    assert forecast(config_alone, replace(default, max_memory=least)).formats[0].needed.kv_directory is None
    monkeypatch.setattr("qwen35mm.cache.planner.file_room", lambda folder: 5 * GIB - 1)
    assert not forecast(config_alone, replace(options, max_memory=least + 8 * MIB)).formats[0].fits


# Prints, in MiB: the plan's total, the most that the process had resident, and the conversation's tokens.
PROGRAM = """
import asyncio, sys
from qwen35mm.backends.local import LocalBackend
import qwen35mm.model_library
from qwen35mm.cache import CacheSettings
from qwen35mm.config import ModelConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.model_library.memory import tokenizer_bytes
from qwen35mm.model_library.options import BackendOptions
from qwen35mm.model_library.plan import forecast
from qwen35mm.contract import GenerationRequest, Message, SamplingParams, Text
from qwen35mm_preprocess import MediaBudget
import torch

folder, length, num_turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = ModelConfig.from_pretrained(folder)
token_bytes, state_bytes = config.kv_bytes_per_token(torch.bfloat16), config.state_bytes(torch.bfloat16)
# Text alone, and no more is kept than the conversation fills.
cache = CacheSettings(kv_bytes=-(-length // 64) * 64 * token_bytes, state_bytes=2 * state_bytes, vision_bytes=0)
options = BackendOptions(
    "bfloat16", "cpu", "bf16", budget=MediaBudget(max_image_tokens=8, max_video_tokens=8),
    settings=EngineSettings(context_length=length, slots=1), cache=cache, max_memory=1 << 40,
)
plan = forecast(folder, options).formats[0]
backend = options.load(folder)
open("/proc/self/clear_refs", "w").write("5")  # the most from here on

async def talk():
    words = "A red square lies left of the green circle. "
    messages = [Message("user", (Text(words * 64),))]
    turn = words * max(1, int((0.93 * length / num_turns - 8) / (backend.count_tokens(messages) / 64)))
    messages = []
    for _ in range(num_turns):
        messages.append(Message("user", (Text(turn),)))
        request = GenerationRequest(messages, SamplingParams(temperature=0.0, max_tokens=4))
        async for event in backend.stream(request):
            pass
        messages.append(Message("assistant", (Text(event.result.text or "yes"),)))
        backend.wait_idle()
    return backend.count_tokens(messages)

count = asyncio.run(talk())
most = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
# The plan counts the vocabulary's ids; a random checkpoint has the demo's tokenizer, of fewer.
missing = tokenizer_bytes(config) * (1 - backend.loaded.tokenizer.vocab_size / config.text.vocab_size)
print("found", (plan.most.total_bytes - missing) / 2**20, most, count)
backend.close()
"""


def run(folder: Path, length: int, num_turns: int) -> tuple[float, float, int]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(length), str(num_turns)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    plan, most, count = done.stdout.split("found ")[1].split()
    return float(plan), float(most), int(count)


def check_promise(plan: float, most: float, count: int, length: int) -> None:
    assert 0.85 * length < count <= length
    assert most <= plan, "more than was promised"
    assert plan - most <= 0.03 * plan, "so much less that the promise says little"


def test_the_layer_that_drafts_is_counted_where_it_is_asked_for() -> None:
    plans = []
    for speculate in ("auto", "mtp"):
        command = ["plan", str(demo_model_path()), "--json", "--max-memory", "8GiB", "--speculate", speculate]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.stdout)["formats"][0]["needed"])
    text = ModelConfig.from_pretrained(demo_model_path()).text
    layers = len(text.attention_layers)
    assert plans[1]["kv_token_bytes"] * layers == plans[0]["kv_token_bytes"] * (layers + 1)
    assert plans[1]["weights_bytes"] > plans[0]["weights_bytes"]


def test_adapters_that_requests_choose_are_counted(tmp_path: Path) -> None:
    """One that is merged takes nothing more."""
    folder = write_adapter(tmp_path / "adapter", rank=16)
    plain, merged, beside = (
        forecast(demo_model_path(), BackendOptions(device="cpu", lora=read_choices(lora)))
        for lora in (None, folder, {"a": folder, "b": folder})
    )
    more = beside.formats[0].needed.weights_bytes - plain.formats[0].needed.weights_bytes
    # Of two adapters: rows of sixteen values, packed for bfloat16 as thirty-two.
    values = sum(16 * columns + 32 * rows for rows, columns in DEMO_MODULES.values())
    assert more == beside.adapter_bytes
    assert more in (2 * 2 * values, 2 * 2 * sum(16 * sum(shape) for shape in DEMO_MODULES.values()))
    assert merged.formats[0].needed.weights_bytes == plain.formats[0].needed.weights_bytes


@pytest.mark.parametrize(("memory", "how"), [("8GiB", "they all stay loaded"), ("800MiB", "so they take turns")])
def test_several_models_are_planned_together(memory: str, how: str) -> None:
    command = ["plan", *[str(demo_model_path())] * 2, "--max-memory", memory]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert how in " ".join(done.stdout.split())
    one, two = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert one["formats"] == two["formats"]


def test_the_keys_and_values_that_attention_packs_for_amx_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(context_length: int, has_tiles: bool) -> int:
        monkeypatch.setattr("qwen35mm.engine.memory.uses_tiles", lambda dtype: has_tiles)
        options = BackendOptions("bfloat16", "cpu", "bf16", budget=MediaBudget(8, 8), max_memory=1 << 40)
        plan = forecast(demo_model_path(), options.with_context(context_length)).formats[0].most
        assert plan is not None
        return plan.work_bytes

    text = ModelConfig.from_pretrained(demo_model_path()).text
    for length in (1_024, 8_192):
        packed = 2 * length * text.num_key_value_heads * text.head_dim * 2
        assert planned(length, True) - planned(length, False) >= packed


# Prints how much larger the process is with a tokenizer of 65,792 ids, and with the table for constrained decoding.
TOKENIZER = """
import itertools, json, sys
from pathlib import Path
import llguidance, psutil
from qwen35mm.model.vocabulary import GrammarVocabulary
from qwen35mm.tokenizer import Tokenizer

small, folder, notation = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
resident = psutil.Process().memory_info
for each in (small, folder):
    if each is folder:
        whole = json.loads((small / "tokenizer.json").read_text())
        first = [text for text in whole["model"]["vocab"] if len(text) == 1]
        pairs = [*itertools.product(first, first)]
        vocab = {text: id_ for id_, text in enumerate([*first, *map("".join, pairs)])}
        merges = [" ".join(pair) for pair in pairs] if notation == "words" else pairs
        whole["model"] |= {"vocab": vocab, "merges": merges}
        whole["added_tokens"] = [
            token | {"id": len(vocab) + at} for at, token in enumerate(whole["added_tokens"])
        ]
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        del whole, pairs, vocab, merges
    before = resident().rss
    tokenizer = Tokenizer.from_pretrained(each)
    for id_ in range(tokenizer.vocab_size):
        tokenizer.token_bytes(id_)
    alone = resident().rss
    vocabulary = GrammarVocabulary(tokenizer, [tokenizer.vocab_size - 1])
    vocabulary.table
print("found", tokenizer.vocab_size, alone - before, resident().rss - alone)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("notation", ["pairs", pytest.param("words", marks=pytest.mark.slow)])
def test_a_tokenizer_takes_what_the_plan_says_however_its_file_is_written(
    notation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    command = [sys.executable, "-c", TOKENIZER, str(demo_model_path()), str(tmp_path), notation]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    num_ids, tokenizer, table = map(int, done.stdout.split("found ")[1].split())
    config = ModelConfig.from_pretrained(demo_model_path())
    planned = model_memory.tokenizer_bytes(config) * num_ids / config.text.vocab_size
    assert 0.6 * planned < tokenizer + table <= planned
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    planned = model_memory.tokenizer_bytes(config) * num_ids / config.text.vocab_size
    assert 0.75 * planned < tokenizer <= planned


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_small_model_takes_no_more_than_its_plan() -> None:
    plan, most, _ = run(demo_model_path(), 2_048, 3)
    # Of the program's own memory, with which a tiny model's plan is nearly all.
    assert 0.8 * plan < most <= plan


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_takes_what_its_plan_says(tmp_path: Path) -> None:
    make = [sys.executable, "-m", "benchmarks.make_random", "--size", "0.8B", "--out", str(tmp_path / "random-0.8B")]
    subprocess.run([*make, "--dtype", "bfloat16", "--seed", "0"], check=True, cwd=ROOT, capture_output=True)
    for length in (2_048, 16_384):
        check_promise(*run(tmp_path / "random-0.8B", length, 3), length)
