"""A training of the bundled model: it learns, survives a kill at any time, and gives PEFT's adapter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.errors import ConfigError
from qwen35mm.tuning import need
from qwen35mm.tuning.captions import CaptionSource, read_captions
from qwen35mm.tuning.encoding import Encoder
from qwen35mm.tuning.output import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder
from qwen35mm.tuning.training import Plan, Tuner, TuneSettings, _Keeper, _loss, _Samples, _Trainer
from tests import forked
from tests.oracle import load_demo_oracle
from tests.tuning.conftest import QUESTION, sample, write

NUMBERS = range(6, 13)
SETTINGS = TuneSettings(rank=4, epochs=2, batch=2, learning_rate=3e-3, dtype="float32")


@dataclass
class Heard:
    """What a listener was told."""

    plan: Plan | None = None
    steps: list[int] = field(default_factory=list)
    losses: dict[int, tuple[float, bool]] = field(default_factory=dict)
    answers: list[tuple[str, str, str]] = field(default_factory=list)

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, done: int, total: int, loss: float | None, seconds_left: float | None) -> None:
        self.steps.append(done)

    def evaluated(self, step: int, loss: float, is_best: bool) -> None:
        self.losses[step] = (loss, is_best)

    def shown(self, name: str, answer: str, expected: str) -> None:
        self.answers.append((name, answer, expected))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("photos"), NUMBERS)


@pytest.fixture(scope="module")
def tuner(encoder: Encoder, photos: Path) -> Tuner:
    found = read_captions(CaptionSource(photos, Question(QUESTION)))
    samples = [encoder.encode(each) for each in found.samples]
    return Tuner(encoder, str(demo_model_path()), samples, SETTINGS, device="cpu")


@pytest.fixture(scope="module")
def whole(tuner: Tuner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Heard, Any]:
    """An uninterrupted training: its folder, what was told, and its result."""
    path, heard = tmp_path_factory.mktemp("whole") / "adapter", Heard()
    with closing(AdapterFolder(path)) as folder:
        tuned = tuner.run(folder, heard)
    return path, heard, tuned


def test_it_learns_what_is_held_out_and_keeps_the_best(whole: tuple[Path, Heard, Any], tuner: Tuner) -> None:
    path, heard, tuned = whole
    held_out = {each.sample.name for each in tuner.held_out}
    assert tuned.after < 0.8 * tuned.before
    assert heard.losses[tuned.step] == (tuned.after, True)
    assert tuned.after == min(loss for step, (loss, _) in heard.losses.items() if step)
    assert heard.losses[0] == (tuned.before, False)
    assert heard.steps == list(range(1, tuned.num_steps + 1))
    assert {name for name, *_ in heard.answers} == held_out
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*")) == [CONFIG_FILE, WEIGHTS_FILE]
    plan = heard.plan
    assert plan is not None
    assert plan.num_samples + plan.num_held_out == len(NUMBERS)
    assert plan.seconds is not None
    assert plan.seconds > 0


def test_a_loss_that_only_a_resumed_training_measures_does_not_count() -> None:
    some = SimpleNamespace(eval_steps=8, num_steps=36)
    keeper = _Keeper(some, None, None, None)  # pyright: ignore[reportArgumentType]
    counted = [keeper._count(step, loss) for step, loss in ((0, 3.0), (8, 2.0), (12, 0.5), (16, 1.0), (36, 0.9))]
    assert counted == [False, True, False, True, True]


def test_an_adapter_that_never_had_a_loss_is_none(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Trainer, "train", lambda self, **options: None)
    with closing(AdapterFolder(tmp_path)) as folder, pytest.raises(ConfigError, match="take a lower --learning-rate"):
        tuner.run(folder, Heard())


def test_files_of_others_stay(tmp_path: Path) -> None:
    photo, foreign = tmp_path / "training/photo.jpg", tmp_path / ".qwen35mm-tune/notes.txt"
    for path in (photo, foreign):
        path.parent.mkdir()
        path.write_text("mine")
    AdapterFolder(tmp_path).close()
    assert photo.exists()
    assert [path.name for path in foreign.parent.iterdir()] == ["notes.txt"]


def test_peft_loads_the_adapter_and_the_engine_computes_the_same(whole: tuple[Path, Heard, Any], tuner: Tuner) -> None:
    """The adapter's names are those of transformers' model, and our engine merges it."""
    path, _, tuned = whole
    config = json.loads((path / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["base_model_name_or_path"] == str(demo_model_path())
    names = load_file(path / WEIGHTS_FILE)
    layers = "base_model.model.model.language_model.layers"
    assert f"{layers}.0.linear_attn.in_proj_qkv.lora_A.weight" in names
    assert f"{layers}.3.self_attn.q_proj.lora_B.weight" in names
    assert all(name.startswith(f"{layers}.") for name in names)
    assert all(float(values.abs().max()) > 0 for values in names.values())

    model = PeftModel.from_pretrained(load_demo_oracle(), str(path))
    held_out, encoder = tuner.held_out, tuner.encoder
    with torch.no_grad():
        inputs = _Samples(encoder, held_out, [1.0] * len(held_out))
        losses = [float(_loss(model, inputs[at])) for at in range(len(inputs))]
    assert sum(losses) / len(losses) == pytest.approx(tuned.after, abs=1e-4)

    with closing(LocalBackend.load(demo_model_path(), dtype="float32", device="cpu", lora=path)) as backend:
        for at, encoded in enumerate(held_out):
            full = inputs[at]
            scored = backend.score(encoded.sample.answer, encoded.sample.messages, thinking=False)
            words = full | {name: full[name][:-1] for name in ("targets", "logits_to_keep")}
            with torch.no_grad():
                expected = float(_loss(model, words))
            assert -scored.logprob / len(scored.tokens) == pytest.approx(expected, abs=1e-4)


def test_killed_and_resumed_it_ends_with_the_same_bits(
    whole: tuple[Path, Heard, Any], photos: Path, tmp_path: Path
) -> None:
    """`kill -9` after a saved step, through the command line: the order, the optimizer and the rates go on."""
    out = tmp_path / "adapter"
    options = ("--rank", 4, "--epochs", 2, "--batch", 2, "--learning-rate", "3e-3", "--dtype", "float32")
    command = ("tune", photos, "--out", out, "--prompt", QUESTION, "--device", "cpu", *options)
    process = forked.ForkedProcess("qwen35mm", *command)
    try:
        deadline = time.monotonic() + forked.PATIENCE_S
        while not list(out.glob(".qwen35mm-tune/checkpoint-*/complete")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    # A checkpoint that a kill tore has no mark.
    (out / ".qwen35mm-tune/checkpoint-9").mkdir()
    other = forked.run("qwen35mm", *command, "--seed", 1)
    assert other.returncode == 1
    assert "unfinished training with other seed" in other.stderr
    done = forked.run("qwen35mm", *command)
    assert done.returncode == 0, done.stderr
    assert "Resumes at step" in done.stderr
    assert (out / WEIGHTS_FILE).read_bytes() == (whole[0] / WEIGHTS_FILE).read_bytes()
    assert sorted(each.name for each in out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_a_finished_adapter_is_only_replaced_on_request(
    whole: tuple[Path, Heard, Any], tuner: Tuner, tmp_path: Path
) -> None:
    path = shutil.copytree(whole[0], tmp_path / "adapter")
    with closing(AdapterFolder(path)) as folder, pytest.raises(ConfigError, match="finished adapter"):
        tuner.run(folder, Heard())
    with closing(AdapterFolder(path)) as folder:
        assert folder.begin({"seed": 1}, restart=True) is None
        assert (path / WEIGHTS_FILE).exists()


def test_what_doesnt_fit_or_cant_be_trained_is_refused_in_words(
    tuner: Tuner, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(need, "available_bytes", lambda device: 100 << 20)
    tight = Tuner(encoder, "demo", [*tuner.training, *tuner.held_out], SETTINGS, device="cpu")
    assert tight.need.checkpointing
    with (
        closing(AdapterFolder(tmp_path / "adapter")) as folder,
        pytest.raises(ConfigError, match=r"doesn't fit: it needs about .* of memory is available on cpu"),
    ):
        tight.run(folder, Heard())
    one = [encoder.encode(sample(1))]
    with pytest.raises(ConfigError, match="held out"):
        Tuner(encoder, "demo", one, SETTINGS, device="cpu")
    with pytest.raises(ConfigError, match="dtype"):
        TuneSettings(dtype="int4")


def test_time_is_a_line_through_two_measurements() -> None:
    assert need.seconds_needed([(100, 2.0), (300, 4.0)], [100, 200, 300]) == pytest.approx(9.0)
    # Noise: a longer sample was quicker.
    assert need.seconds_needed([(100, 2.0), (300, 1.5)], [300, 600]) == pytest.approx(4.5)
    assert need.seconds_needed([(50, 1.0), (50, 2.0)], [50]) == pytest.approx(2.0)


def test_checkpointing_computes_the_same(tuner: Tuner, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, layers are computed twice, with the same gradients."""
    inputs = _Samples(encoder, tuner.training[:1], [1.0])[0]
    gradients = []
    for checkpointing in (False, True):
        monkeypatch.setattr(tuner, "need", replace(tuner.need, checkpointing=checkpointing))
        model = tuner._load().train()
        _loss(model, inputs).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][name], each) for name, each in gradients[0].items())


def test_a_samples_weight_multiplies_its_loss(encoder: Encoder) -> None:
    samples = [encoder.encode(sample(number, edited=number == 8)) for number in range(6, 10)]
    made = Tuner(encoder, "demo", samples, SETTINGS, device="cpu")
    assert made.plan().num_edited == sum(each.sample.edited for each in made.training)
    plain, heavy = (_Samples(encoder, samples[:1], [weight])[0] for weight in (1.0, 3.0))
    oracle = load_demo_oracle()
    with torch.no_grad():
        assert float(_loss(oracle, heavy)) == pytest.approx(3 * float(_loss(oracle, plain)))
