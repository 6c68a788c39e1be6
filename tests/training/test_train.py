"""Phases by step, the same data for any number of processes, and a training that stops and goes on as if it hadn't."""

from __future__ import annotations

import functools
import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import Qwen3_5ForConditionalGeneration

from qwen35mm.model import load
from tests.training.conftest import TINY
from training import mixture, parallel, train
from training.data import Encoder
from training.export import export, export_mean, export_state
from training.phases import PHASES, Phase
from training.train import Averages, Batches, Trainer, main, parse_args

WORLD = {"picture": 1.0, "chat": 1.0}
SHORT = (
    Phase("vision", 2, (1.0, 0.5), ends=0.5),
    Phase("recall", 1, (1.0, 0.8), {"chat": 1.0}, rows=1, most_tokens=256, probe_weight=0.0),
    Phase("joint", 2, (0.9, 0.1), WORLD, rows=1, most_tokens=512, mtp_weight=0.3),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole training, of a tiny model through short phases."""
    monkeypatch.setattr(train, "texts", lambda seed: mixture.texts(seed, 150))
    monkeypatch.setattr(train, "demo_config", functools.partial(train.demo_config, **TINY))
    monkeypatch.setattr(train, "PHASES", SHORT)
    monkeypatch.setattr(mixture, "_VISION_TOKENS", 40)


def arguments(work: Path, *more: str) -> Namespace:
    work.mkdir(exist_ok=True)
    options = [
        "--work",
        str(work),
        "--out",
        str(work / "out"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--workers",
        "0",
    ]
    return parse_args([*options, *more])


def numbers(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.model.state_dict(), **{f"heads.{k}": v for k, v in trainer.heads.state_dict().items()}}


def test_a_training_that_stops_after_every_step_ends_as_one_that_does_not(small: None, tmp_path: Path) -> None:
    whole = Trainer(arguments(tmp_path / "whole"))
    assert whole.run()
    stops = 0
    trainer = Trainer(arguments(tmp_path / "parts"))
    while not trainer.run(stop_after_s=0.0):
        stops += 1
        before = trainer.phase, trainer.step
        trainer = Trainer(arguments(tmp_path / "parts", "--resume"))
        assert (trainer.phase, trainer.step) == before
    assert stops >= 5
    expected, found = numbers(whole), numbers(trainer)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.history == trainer.history
    assert [(each["phase"], each["steps"]) for each in whole.history] == [(p.name, p.steps) for p in SHORT]
    assert whole.tokens == trainer.tokens > 0


def test_the_mean_of_checkpoints(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.export.demo_config", train.demo_config)
    trainer = Trainer(arguments(tmp_path))
    folders = [tmp_path / name for name in ("one", "other", "mean")]
    for folder in folders[:2]:
        export(trainer.model, trainer.tokenizer, folder)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight += 0.5
    export_mean(folders[:2], folders[2])
    one, other, mean = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == mean.keys()
    for name, weight in mean.items():
        torch.testing.assert_close(weight.float(), (one[name].float() + other[name].float()) / 2, atol=0.01, rtol=0.01)
    (folders[1] / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="one vocabulary"):
        export_mean(folders[:2], folders[2])


def test_a_training_begins_with_an_exported_checkpoint(small: None, tmp_path: Path) -> None:
    """With its weights and vocabulary, whatever the seed, at the phase that is named."""
    first = Trainer(arguments(tmp_path))
    export(first.model, first.tokenizer, tmp_path / "out")
    then = Trainer(arguments(tmp_path / "then", "--start", str(tmp_path / "out"), "--first", "joint", "--seed", "7"))
    assert (then.phase, then.step) == (2, 0)
    assert then.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    expected, found = first.model.state_dict(), then.model.state_dict()
    assert all(torch.equal(expected[name].bfloat16(), found[name].bfloat16()) for name in expected)
    assert then.run()
    assert [each["phase"] for each in then.history] == ["joint"]
    # What is known of the weights' own training goes on with it.
    (tmp_path / "out" / "training_info.json").write_text(
        '{"phases": [{"phase": "vision", "steps": 7}], "tokens": 1000000, "trained_minutes": 50.0}'
    )
    then = Trainer(arguments(tmp_path / "then", "--start", str(tmp_path / "out"), "--first", "joint"))
    assert then.run()
    then = Trainer(arguments(tmp_path / "then", "--resume"))
    assert [each["phase"] for each in then.info()["phases"]] == ["vision", "joint"]
    assert then.info()["tokens"] > 1000000
    assert then.info()["trained_minutes"] >= 50.0
    weights = tmp_path / "out" / "model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if "mtp" not in name}, weights)
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight.* are missing"):
        Trainer(arguments(tmp_path / "then", "--start", str(tmp_path / "out")))


@pytest.mark.parametrize("texts", [(), SHORT[1:2]], ids=["at once", "after texts alone"])
def test_new_heads_learn_before_they_teach_a_trained_tower(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: tuple[Phase, ...]
) -> None:
    """In their first steps the tower gets nothing of them, and they get all; also where it was stopped in between."""
    monkeypatch.setattr(train, "PHASES", (*texts, Phase("vision", 3, (1.0, 1.0))))
    monkeypatch.setattr(train, "APART_STEPS", 2)
    first = Trainer(arguments(tmp_path))
    export(first.model, first.tokenizer, tmp_path / "out")
    trainer = Trainer(arguments(tmp_path, "--start", str(tmp_path / "out")))
    moved = []
    for _ in range(len(texts) + 3):
        before = {name: value.clone() for name, value in numbers(trainer).items()}
        trainer.run(0.0)
        moved.append({name for name, value in numbers(trainer).items() if not torch.equal(value, before[name])})
        trainer = Trainer(arguments(tmp_path, "--resume"))
    apart, still_apart, together = moved[len(texts) :]
    assert all(name.startswith("heads.") for name in apart | still_apart)
    assert {"heads.classes.weight", "heads.box.weight"} <= apart & still_apart
    assert any(name.startswith("model.visual.") for name in together)


def test_phases_may_have_other_numbers_of_steps(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(arguments(tmp_path, "--steps", "vision=1", "joint=3", "--first", "recall"))
    assert [phase.steps for phase in trainer.phases] == [1, 1, 3]
    assert trainer.run()
    assert [(each["phase"], each["steps"]) for each in trainer.history] == [("recall", 1), ("joint", 3)]
    for wrong in ("world=2", "joint", "joint=0", "joint=-1", "joint=many"):
        with pytest.raises(SystemExit):
            arguments(tmp_path, "--steps", wrong)
        assert "the phases are vision, recall, joint" in capsys.readouterr().err


def test_what_a_phase_does_not_show_stays_as_it_is(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of several processes too, where each counts as zero what it has no gradient of."""
    trainer = Trainer(arguments(tmp_path))
    monkeypatch.setattr(train, "PHASES", SHORT[:2])
    monkeypatch.setattr(parallel, "world", lambda: 2)
    monkeypatch.setattr(parallel, "sum_over_processes", lambda tensors: None)
    monkeypatch.setattr(parallel, "gather", lambda value: [value])
    before = {name: value.clone() for name, value in numbers(trainer).items()}
    seen: dict[str, dict[str, torch.Tensor]] = {}
    save = trainer.save

    def watched() -> None:
        seen[str(trainer.phase)] = {name: value.clone() for name, value in numbers(trainer).items()}
        save()

    monkeypatch.setattr(trainer, "save", watched)
    assert trainer.run()
    after_vision, after_recall = seen["1"], seen["2"]
    moved = {name for name in before if not torch.equal(before[name], after_vision[name])}
    assert moved
    assert all(name.startswith(("model.visual.", "heads.")) for name in moved)
    moved = {name for name in before if not torch.equal(after_vision[name], after_recall[name])}
    assert {name.split(".")[1] for name in moved if name.startswith("model.")} == {"language_model"}
    assert not any(name.startswith(("heads.", "mtp.")) for name in moved)


def test_every_process_and_worker_draws_its_parts_of_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = (Phase("one", 3, (1, 1)), Phase("two", 5, (1, 1)))
    monkeypatch.setattr(train, "draw", lambda rngs, encoder, phase, done: (phase.name, done, rngs[0].random()))

    def drawn(rank: int, world: int, workers: int, start: tuple[int, int] = (0, 0)) -> list[Any]:
        monkeypatch.setattr(parallel, "rank", lambda: rank)
        monkeypatch.setattr(parallel, "world", lambda: world)
        found = []
        for worker in range(workers):
            info = SimpleNamespace(id=worker, num_workers=workers) if workers > 1 else None
            monkeypatch.setattr(train, "get_worker_info", lambda info=info: info)
            found.append(list(Batches(None, phases, 0, 4, start)))  # type: ignore[arg-type]
        # The loader asks its workers in turn.
        return [found[i % workers][i // workers] for i in range(sum(map(len, found)))]

    whole = drawn(0, 1, 1)
    assert len(whole) == 8 * 4
    assert len({batch[-1] for _, _, batch in whole}) == len(whole)
    for world in (1, 2, 4):
        for workers in (1, 2, 3):
            shares = [drawn(rank, world, workers) for rank in range(world)]
            # One part of each process in turn is the order of the parts.
            together = [share[i] for i in range(len(shares[0])) for share in shares]
            assert together == whole
    assert drawn(0, 1, 1, (1, 2)) == [each for each in whole if each[:2] >= (1, 2)]


def test_the_loader_keeps_the_order_of_two_real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "draw", lambda rngs, encoder, phase, done: rngs[0].random())
    data = Batches(None, (Phase("one", 7, (1, 1)),), 3, 2, (0, 0))  # type: ignore[arg-type]
    one, two = (
        list(DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=context))
        for workers, context in ((0, None), (2, "fork"))  # which sees the other draw
    )
    assert one == two
    assert [step for _, step, _ in one] == [i // 2 for i in range(14)]


def test_a_card_gets_all_parts_of_a_step_as_one_batch(encoder: Encoder) -> None:
    phase = Phase("few", 3, (1, 1), {"chat": 1.0, "lone": 1.0}, most_tokens=256)
    alone = [batch for _, _, batch in Batches(encoder, (phase,), 0, 3, (0, 1))]
    (first, second) = [batch for _, _, batch in Batches(encoder, (phase,), 0, 3, (0, 1), together=True)]
    assert len(alone) == 6
    for whole, parts in ((first, alone[:3]), (second, alone[3:])):
        assert whole["skills"] == [skill for part in parts for skill in part["skills"]]
        assert torch.equal(whole["input_ids"], torch.cat([part["input_ids"] for part in parts]))
        assert torch.equal(whole["position_ids"], torch.cat([part["position_ids"] for part in parts], dim=1))
        assert torch.equal(whole["pixels"], torch.cat([part["pixels"] for part in parts if "pixels" in part]))
        begin = 0
        for row, part in enumerate(parts):
            learned = part["answers"][0] >= 0
            assert torch.equal(whole["answers"][row][learned], part["answers"][0][learned] + begin)
            assert (whole["answers"][row][~learned] == -1).all()
            begin += len(part["skills"])


@pytest.mark.parametrize("phase", [PHASES[0], PHASES[2]], ids=lambda phase: phase.name)
def test_the_same_part_is_the_same_batch(encoder: Encoder, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_VISION_TOKENS", 150)
    first, second, other = (
        mixture.draw([random.Random(f"0/{phase.name}/7/{part}")], encoder, phase, 0.4) for part in (0, 0, 1)
    )
    assert set(first) == set(second)
    for name, value in first.items():
        assert (
            torch.equal(value.nan_to_num(), second[name].nan_to_num())
            if isinstance(value, torch.Tensor)
            else (value == second[name])
        )
    assert first["pixels"].shape != other["pixels"].shape or not torch.equal(first["pixels"], other["pixels"])


def test_the_curriculum_goes_from_where_a_phase_begins_to_where_it_ends(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(mixture, "_vision", lambda rng, done, least_tokens: seen.append(done) or [])
    monkeypatch.setattr(mixture, "vision_batch", lambda media: {})
    monkeypatch.setitem(mixture.PARTS, "chat", lambda rng, done: seen.append(done) or 1 / 0)
    for done in (0.0, 0.5, 1.0):
        mixture.draw([random.Random(0)], encoder, Phase("vision", 1, (1, 1), ends=0.8), done)
        with pytest.raises(ZeroDivisionError):
            mixture.draw([random.Random(0)], encoder, Phase("joint", 1, (1, 1), {"chat": 1}, begins=0.2), done)
    assert seen == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(set(phase.parts) <= set(mixture.PARTS) and 0 <= phase.begins <= phase.ends <= 1 for phase in PHASES)
    assert sum(phase.mtp_weight > 0 for phase in PHASES) == 1


@pytest.mark.parametrize(("least", "expected"), [(16, 16), (None, 64), (100, 100)])
def test_a_phase_says_how_many_tokens_small_pictures_have(encoder: Encoder, least: int | None, expected: int) -> None:
    """Few where sight is learned; in the end as many as the checkpoint's processor makes of them."""
    alone = [medium for medium in mixture._vision(random.Random(0), 1.0, least) if medium.times_s is None]
    phase = Phase("some", 1, (1.0, 1.0), {"plain": 1.0}, least_tokens=least)
    asked = mixture.draw([random.Random(0)], encoder, phase, 1.0)["grids"].prod(1) // 4
    for smallest in (min(medium.tokens_per_span for medium in alone), int(asked.min())):
        assert expected <= smallest < 1.4 * expected


def test_a_conversation_that_fits_in_no_row_is_told(encoder: Encoder) -> None:
    phase = Phase("short", 1, (1, 1), {"recall": 1.0}, most_tokens=64)
    with pytest.raises(ValueError, match="rows of the phase 'short' have 64: give it longer rows"):
        mixture.draw([random.Random(0)], encoder, phase, 1.0)


def test_a_phase_ends_when_all_its_figures_are_there() -> None:
    phase = Phase("vision", 100, (1, 1), until={"color": 0.9, "box": 12.0})
    mean = Averages()
    for _ in range(train.JUDGED_OVER):
        assert not mean.reached(phase)
        mean.add({"color": 0.95, "box": 20.0}, {})
        mean.share()
    assert not mean.reached(phase)
    for _ in range(train.JUDGED_OVER):
        mean.add({"color": 0.95, "box": 10.0}, {})
        mean.share()
    assert mean.reached(phase)
    assert mean.figures() == pytest.approx({"color": 0.95, "box": 10.0})
    mean.add({"color": -50.0, "box": 10.0}, {})
    mean.share()
    assert not mean.reached(phase)
    assert not mean.reached(Phase("endless", 100, (1, 1)))


def test_answers_are_judged_over_more(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = Phase("recall", 100, (1, 1), until={"right recall": 0.9})
    mean = Averages()
    mean.add({}, {"recall": [True] * 300 + [False] * 100})
    mean.share()
    assert mean.figures() == {"right recall": 0.5}
    mean.add({}, {"recall": [True] * 190})
    mean.share()
    assert mean.reached(phase)


@pytest.mark.slow
def test_a_phase_that_ends_early_hands_on_to_the_next(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    easy = Phase("easy", 50, (1.0, 0.5), {"chat": 1.0}, {"loss": 1000.0}, rows=1, most_tokens=256)
    monkeypatch.setattr(train, "PHASES", (easy, SHORT[1]))
    monkeypatch.setattr(train, "JUDGED_OVER", 6)
    ended = []
    for stop in (None, 0.0):
        trainer = Trainer(arguments(tmp_path / str(stop)))
        while not trainer.run(stop_after_s=stop):
            trainer = Trainer(arguments(tmp_path / str(stop), "--resume"))
        ended.append([(each["phase"], each["steps"]) for each in trainer.history])
    # Two parts a step; what a stopped training judged by goes on with it.
    assert ended == [[("easy", 3), ("recall", 1)]] * 2


def test_rates_warm_up_and_fall(small: None, tmp_path: Path) -> None:
    trainer = Trainer(arguments(tmp_path))
    phase = Phase("long", 1000, (0.8, 0.2))
    rates = []
    for trainer.step in (0, 59, 500, 1000):
        rates.append(trainer.rate(phase))
    assert rates == pytest.approx([0.8 / 60, 0.8 - 0.6 * 0.059, 0.5, 0.2])


def test_a_state_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Leave --resume away to begin"):
        Trainer(arguments(tmp_path, "--resume"))


def test_a_running_trainings_state_becomes_a_checkpoint(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "PHASES", SHORT[:2])
    assert Trainer(arguments(tmp_path)).run()
    monkeypatch.setattr("training.export.demo_config", train.demo_config)
    export_state(tmp_path / "state.pt", tmp_path / "out")
    loaded: Any = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    # Our own engine reads it, too.
    ours = load(tmp_path / "out", dtype="float32", device="cpu")
    assert ours.config.text.num_layers == model.config.text_config.num_hidden_layers


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """The real phases and the real size, by the command, stopped after a step; then to the end of another."""
    states = []
    for processes in ("1", "2"):
        work = tmp_path / processes
        command = ["--work", str(work), "--out", str(work / "out"), "--device", "cpu", "--dtype", "float32"]
        command += ["--stop-after", "0.001", "--processes", processes]
        main(command)
        main([*command, "--resume"])
        states.append(torch.load(work / "state.pt", weights_only=True))
        assert not (work / "out").exists()
    one, two = states
    assert (one["phase"], one["step"]) == (two["phase"], two["step"]) == (0, 2)
    assert one["tokenizer"] == two["tokenizer"]
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, atol=2e-4, rtol=0)
    for name, value in one["mean"].items():
        assert two["mean"][name] == pytest.approx(value, abs=1e-3), name
