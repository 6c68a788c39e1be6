"""Trains the demo checkpoint: `python -m training.train --out assets/demo --seed 0 [--resume]`.

The phases are `phases.PHASES`. Every step's batch is the sum of `--parts-per-step` parts, each drawn from the seed, the
phase, the step and its number alone, so that one process or several, and a training that was stopped and went on, see
the same data. The state is saved every few minutes in `--work`, with `metrics.jsonl` beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from training import parallel
from training.data import Encoder
from training.export import export, read_weights, save_json
from training.fast import compile_layers, vision_tokens
from training.losses import VisionHeads, answer_loss
from training.mixture import draw, texts
from training.model import demo_config, new_model
from training.optimizer import Optimizer
from training.phases import PHASES, Phase
from training.tokenizer import token_ids, train_tokenizer

SAVE_EVERY_S = 180.0
LOG_EVERY = 25
JUDGED_OVER = 50  # parts of steps whose mean ends a phase, or four times as many answers
WARMUP_STEPS = 60
APART_STEPS = 100  # in which new heads on a trained tower learn, before they teach it


class Batches(IterableDataset):
    """This process's parts of every step from (phase, step) on, in order: (phase's number, step, batch).

    `together`: its parts of a step come as one batch, which a card takes in the time of one part.
    """

    def __init__(
        self,
        encoder: Encoder,
        phases: tuple[Phase, ...],
        seed: int,
        parts: int,
        start: tuple[int, int],
        together: bool = False,
    ) -> None:
        self.encoder, self.phases, self.seed, self.start = encoder, phases, seed, start
        mine = range(parallel.rank(), parts, parallel.world())
        self.batches = [[*mine]] if together else [[part] for part in mine]

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        torch.set_num_threads(1)
        # The loader asks its workers in turn: each draws what it is asked for, so that the order stays.
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for number, step, parts in islice(self._wanted(), first, None, stride):
            phase = self.phases[number]
            rngs = [random.Random(f"{self.seed}/{phase.name}/{step}/{part}") for part in parts]
            yield number, step, draw(rngs, self.encoder, phase, step / phase.steps)

    def _wanted(self) -> Iterator[tuple[int, int, list[int]]]:
        """(phase's number, step, parts of one batch), in order."""
        for number in range(self.start[0], len(self.phases)):
            for step in range(self.start[1] if number == self.start[0] else 0, self.phases[number].steps):
                for parts in self.batches:
                    yield number, step, parts


class Trainer:
    """Owns the model, the heads, the optimizer, and where in the phases it is."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.state_path = Path(args.work) / "state.pt"
        if args.resume and not self.state_path.is_file():
            raise FileNotFoundError(
                f"--resume goes on from {self.state_path}, and there is no such file. Leave --resume away to begin, or "
                "name the folder that the training was begun with as --work."
            )
        state = torch.load(self.state_path, map_location=args.device, weights_only=True) if args.resume else None
        # The model's vocabulary is the one it began with, also where the phrases have changed since.
        if state:
            self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        elif args.start:
            self.tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        else:
            self.tokenizer = train_tokenizer(texts(args.seed))
        config = demo_config(token_ids(self.tokenizer), self.tokenizer.get_vocab_size())
        self.model = new_model(config, args.seed).to(args.device)
        if args.device != "cpu":
            compile_layers()
        if args.start and not state:
            read_weights(self.model, args.start)
        self.heads = VisionHeads(self.model.lm_head.in_features).to(args.device)
        self.optimizer = Optimizer(self.model, self.heads, args.muon_lr, args.adam_lr, args.vision_rate)
        self.phases = planned(args.steps)
        self.phase = [phase.name for phase in self.phases].index(args.first)
        self.step, self.tokens, self.elapsed_s = 0, 0, 0.0
        # The phase in whose first steps the heads are new: none learn where they aren't asked.
        asked = (number for number in range(self.phase, len(self.phases)) if self.phases[number].probe_weight)
        self.apart = next(asked, None) if args.start else None
        self.history: list[dict[str, Any]] = []  # of the phases that are over
        self.mean = Averages()
        known = args.start and args.start / "training_info.json"
        if known and known.is_file():
            info = json.loads(known.read_text())
            self.history, self.tokens, self.elapsed_s = info["phases"], info["tokens"], 60 * info["trained_minutes"]
        if state:
            self.load(state)

    def rate(self, phase: Phase) -> float:
        """Linear warm-up, then linear from the phase's first rate to its last."""
        first, last = phase.rates
        return min(1.0, (self.step + 1) / WARMUP_STEPS) * (first + (last - first) * self.step / phase.steps)

    def part(self, phase: Phase, batch: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[bool]]]:
        """Adds one part's gradients; returns its figures, and which answers were right."""
        args = self.args
        if phase.parts:
            self.tokens += int((batch["segments"] > 0).sum()) * parallel.world()
        batch = {
            k: v.to(args.device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()
        }
        with torch.autocast(args.device, torch.bfloat16) if args.dtype == "bfloat16" else nullcontext():
            tokens = vision_tokens(self.model, batch["pixels"], batch["grids"]) if "pixels" in batch else None
            shown: dict[str, torch.Tensor] = {}
            skills, wrong = batch.get("skills", []), torch.zeros(0, dtype=torch.long, device=args.device)
            loss = torch.zeros((), device=args.device)
            if tokens is not None and phase.probe_weight:
                probe_loss, shown = self.heads(tokens, batch["targets"], batch["boxes"])
                loss = loss + probe_loss * phase.probe_weight
            if phase.parts:
                heads = self.heads if phase.probe_weight else None
                text_loss, text_shown, wrong = answer_loss(self.model, batch, tokens, phase.mtp_weight, heads)
                loss = loss + text_loss
                shown |= text_shown
        (loss / self.batches_per_step).backward()
        # A card is waited for once, when all that it has to do is known there.
        whole, *values = torch.stack([loss.detach().float(), *(value.float() for value in shown.values())]).tolist()
        if not math.isfinite(whole):
            raise FloatingPointError(f"the loss is {whole} at step {self.step}: lower --muon-lr or --adam-lr")
        figures = {name: value for name, value in zip(shown, values, strict=True) if not math.isnan(value)}
        results: dict[str, list[bool]] = {}
        for skill, errors in zip(skills, wrong.tolist(), strict=True):
            results.setdefault(skill, []).append(errors == 0)
        return figures, results

    def apply(self, phase: Phase) -> None:
        """Sums gradients over processes and takes the step.

        What one process has no gradient of counts as zero there; what none has one of stays as it is, momentum and
        all: Muon would go on with steps of their full size.
        """
        params = [*self.model.parameters(), *self.heads.parameters()]
        known = torch.tensor([float(param.grad is not None) for param in params])
        parallel.sum_over_processes([known])
        params = [param for param, processes in zip(params, known.tolist(), strict=True) if processes]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        parallel.sum_over_processes([param.grad for param in params if param.grad is not None])
        torch.nn.utils.clip_grad_norm_(params, 2.0)
        self.optimizer.step(self.rate(phase), 1.0 if phase.parts else 2.0)  # vision alone bears larger steps

    def run(self, stop_after_s: float | None = None) -> bool:
        """Trains to the end, or for `stop_after_s`; returns whether it came to the end."""
        args = self.args
        quiet, begun, saved = parallel.rank() > 0, time.monotonic(), time.monotonic()
        while self.phase < len(self.phases):
            phase = self.phases[self.phase]
            template = Path(__file__).with_name("chat_template.jinja").read_text()
            encoder = Encoder(self.tokenizer, template)
            card = args.device != "cpu"
            data = Batches(encoder, self.phases, args.seed, args.parts_per_step, (self.phase, self.step), together=card)
            self.batches_per_step = len(data.batches) * parallel.world()
            ahead = 4 if args.workers else None
            loader = DataLoader(data, None, num_workers=args.workers, prefetch_factor=ahead, pin_memory=card)
            batches = iter(loader)
            bar = tqdm(total=phase.steps, initial=self.step, desc=phase.name, disable=quiet, mininterval=10)
            while self.step < phase.steps and not self.mean.reached(phase):
                start = time.monotonic()
                self.heads.teach = self.phase != self.apart or self.step >= APART_STEPS
                for _ in data.batches:
                    number, step, batch = next(batches)
                    assert (number, step) == (self.phase, self.step)
                    self.mean.add(*self.part(phase, batch))
                self.apply(phase)
                self.step += 1
                # Every process judges by the same figures, and stops at the same step.
                self.mean.share()
                stop = stop_after_s is not None and time.monotonic() - begun > stop_after_s
                stop = parallel.any_of(stop)
                self.elapsed_s += time.monotonic() - start
                bar.update()
                if self.step % LOG_EVERY == 0 and not quiet:
                    self.log(phase)
                if time.monotonic() - saved > SAVE_EVERY_S or stop:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    return False
            bar.close()
            del batches
            self.history.append({"phase": phase.name, "steps": self.step} | self.mean.figures())
            self.phase, self.step = self.phase + 1, 0
            self.mean = Averages()
            self.save()
        return True

    def log(self, phase: Phase) -> None:
        """A line of metrics.jsonl: the means that the phase is judged by."""
        line = {"phase": phase.name, "step": self.step, "seconds": round(self.elapsed_s), "tokens": self.tokens}
        line |= {name: round(value, 4) for name, value in self.mean.figures().items()}
        with (Path(self.args.work) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Writes the whole state beside and renames it; the first process does it for all."""
        if parallel.rank():
            return
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "tokenizer": self.tokenizer.to_str(),
            "optimizer": self.optimizer.state_dict(),
            "phase": self.phase,
            "step": self.step,
            "apart": self.apart,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "history": self.history,
            "mean": dict(self.mean.values),
        }
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.state_path.with_suffix(".tmp"))
        self.state_path.with_suffix(".tmp").replace(self.state_path)

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `save` wrote."""
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.phase, self.step, self.tokens = state["phase"], state["step"], state["tokens"]
        self.apart = state["apart"]
        self.elapsed_s, self.history = state["elapsed_s"], state["history"]
        self.mean.values.update(state["mean"])  # without them, a phase would end later than uninterrupted

    def info(self) -> dict[str, Any]:
        """What is needed to make this checkpoint again."""
        names = ("seed", "muon_lr", "adam_lr", "vision_rate", "parts_per_step", "dtype")
        return {name: getattr(self.args, name) for name in names} | {
            "phases": self.history,
            "tokens": self.tokens,
            "trained_minutes": round(self.elapsed_s / 60, 1),
            "device": self.args.device,
            "processes": self.args.processes,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


class Averages:
    """Means of every figure over its last `JUDGED_OVER` parts, and by "right SKILL" over four times as many answers."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self._new: dict[str, list[float]] = defaultdict(list)

    def add(self, shown: dict[str, float], results: dict[str, list[bool]]) -> None:
        for name, value in shown.items():
            self._new[name].append(value)
        for skill, hits in results.items():
            self._new[f"right {skill}"] += [float(hit) for hit in hits]

    def share(self) -> None:
        """Takes in what was added here and in the other processes since the last time."""
        for each in parallel.gather(dict(self._new)):
            for name, values in each.items():
                kept = JUDGED_OVER * (4 if name.startswith("right ") else 1)
                self.values[name] = (self.values[name] + values)[-kept:]
        self._new.clear()

    def figures(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in sorted(self.values.items()) if values}

    def reached(self, phase: Phase) -> bool:
        """Whether every figure that ends the phase is there; "box" and losses are to fall, all others to rise."""
        figures = self.figures()
        if not phase.until or any(len(self.values.get(name, ())) < JUDGED_OVER for name in phase.until):
            return False
        return all(
            figures[name] <= goal if name in ("box", "loss", "mtp") else figures[name] >= goal
            for name, goal in phase.until.items()
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/demo"), help="where the checkpoint is written")
    parser.add_argument("--work", type=Path, default=Path("build/demo-training"), help="where the state is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the state in --work")
    parser.add_argument("--start", type=Path, help="a checkpoint whose weights and vocabulary it begins with, not anew")
    names = [phase.name for phase in PHASES]
    parser.add_argument("--first", choices=names, default=names[0], help="the phase that it begins with")
    parser.add_argument(
        "--steps", nargs="+", type=_steps, default=[], metavar="PHASE=STEPS", help="other numbers than phases.py has"
    )
    parser.add_argument("--stop-after", type=float, help="minutes; the state is saved, and --resume goes on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="bfloat16: autocast")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel; on a CPU, one a core is best")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw scenes, for each of --processes")
    parser.add_argument("--parts-per-step", type=int, default=2, help="what a step sums; a multiple of --processes")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--vision-rate", type=float, default=0.3, help="the vision tower's share of --muon-lr")
    args = parser.parse_args(argv)
    if args.parts_per_step % args.processes:
        parser.error(f"--parts-per-step {args.parts_per_step} is no multiple of --processes {args.processes}")
    return args


def _steps(text: str) -> tuple[str, int]:
    """One of `--steps`: "world=1500"."""
    name, _, steps = text.partition("=")
    if name not in [phase.name for phase in PHASES] or not steps.isdecimal() or not int(steps):
        names = ", ".join(phase.name for phase in PHASES)
        raise argparse.ArgumentTypeError(f"{text!r} isn't PHASE=STEPS, such as world=1500; the phases are {names}")
    return name, int(steps)


def planned(steps: list[tuple[str, int]]) -> tuple[Phase, ...]:
    """The phases, some of them with other numbers of steps: what there is time for differs by machine."""
    wanted = dict(steps)
    return tuple(replace(phase, steps=wanted.get(phase.name, phase.steps)) for phase in PHASES)


def train(args: argparse.Namespace) -> None:
    """One process's part of the training; the first one exports."""
    trainer = Trainer(args)
    ended = trainer.run(args.stop_after and 60 * args.stop_after)
    if parallel.rank() or not ended:
        return
    export(trainer.model, trainer.tokenizer, args.out)
    save_json(args.out / "training_info.json", trainer.info())
    print(json.dumps(trainer.info()))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    parallel.launch(train, args.processes, args.work, args)


if __name__ == "__main__":
    main()
