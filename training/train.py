"""Trains the demo checkpoint: `python -m training.train --minutes 60 --out assets/demo --seed 0 [--resume]`.

Two phases, scheduled by time: the vision tower alone with throwaway heads, then everything on conversations. The
state is saved every two minutes in `--work`; `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from training import parallel
from training.data import Encoder
from training.export import export, save_json
from training.fast import fast_forward
from training.losses import VisionHeads, answer_loss, vision_tokens
from training.mixture import Mixture
from training.model import demo_config, new_model
from training.optimizer import Optimizer
from training.tokenizer import token_ids, train_tokenizer

SAVE_EVERY_S = 120.0
LOG_EVERY_S = 30.0
PROBE_WEIGHT = 0.2  # of the vision heads' loss in the joint phase
WARMUP_STEPS = 60
PROBES = ("probe_color", "probe_shape", "probe_place", "probe_centre")


class Averages:
    """Exponential averages of accuracy, by skill."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, results: dict[str, list[bool]], decay: float = 0.995) -> None:
        for skill, hits in results.items():
            for hit in hits:
                self.values[skill] = decay * self.values.get(skill, float(hit)) + (1 - decay) * hit

    def line(self) -> str:
        return " ".join(f"{skill}={100 * value:.0f}" for skill, value in sorted(self.values.items()))


class Trainer:
    """Owns the model, the heads, the optimizer and the clock, which counts training over all resumptions."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.state_path = Path(args.work) / "state.pt"
        # The model's vocabulary is the one it began with, also where the phrases have changed since.
        state = torch.load(self.state_path, map_location=args.device, weights_only=True) if args.resume else None
        self.tokenizer = Tokenizer.from_str(state["tokenizer"]) if state else train_tokenizer(args.seed)
        config = demo_config(token_ids(self.tokenizer), self.tokenizer.get_vocab_size())
        self.model = new_model(config, args.seed).to(args.device)
        self.heads = VisionHeads(self.model.lm_head.in_features).to(args.device)
        self.optimizer = Optimizer(self.model, self.heads, args.muon_lr, args.adam_lr, args.vision_rate)
        self.averages = Averages()
        self.elapsed_s, self.step, self.tokens, self.runs = 0.0, 0, 0, 0
        self.progress = multiprocessing.Value("d", 0.0)
        if state:
            self.load(state)

    @property
    def phase(self) -> int:
        return int(self.elapsed_s >= 60 * self.args.vision_minutes)

    def done(self) -> float:
        """The fraction of the present phase that is over."""
        vision_s = 60 * self.args.vision_minutes
        if self.phase == 0:
            return self.elapsed_s / vision_s
        return min(1.0, (self.elapsed_s - vision_s) / (60 * self.args.minutes - vision_s))

    def rate(self) -> float:
        """Linear warm-up, then linear decay to 0.3 over the vision phase, and from 1 to 0.02 over the joint one."""
        floor = 0.02 if self.phase else 0.3
        return min(1.0, (self.step + 1) / WARMUP_STEPS) * (1 - (1 - floor) * self.done())

    def train_step(self, batch: dict[str, Any]) -> dict[str, float]:
        batch = {k: v.to(self.args.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        phase = batch.pop("phase")
        autocast = self.args.dtype == "bfloat16"
        with torch.autocast(self.args.device, torch.bfloat16) if autocast else nullcontext():
            tokens = vision_tokens(self.model, batch) if "pixels" in batch else None
            shown: dict[str, float] = {}
            loss = torch.zeros((), device=self.args.device)
            if tokens is not None:
                probe_loss, hits = self.heads(tokens, batch["targets"])
                loss = loss + probe_loss * (PROBE_WEIGHT if phase else 1.0)
                shown |= dict(zip(PROBES, hits.tolist(), strict=True))
            if phase:
                text_loss, results = answer_loss(self.model, batch, tokens)
                loss = loss + text_loss
                self.averages.add(results)
                shown["loss"] = text_loss.item()
                self.tokens += batch["input_ids"].numel() * parallel.world()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.step}: lower --muon-lr or --adam-lr")
        loss.backward()
        self.share_gradients()
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 2.0)
        self.optimizer.step(self.rate(), 1.0 if phase else 2.0)  # vision alone bears larger steps
        return {"total": loss.item()} | shown

    def share_gradients(self) -> None:
        """Averages gradients over processes; where one has none (no pictures in its batch), it counts as zero."""
        if parallel.world() == 1:
            return
        trained = self.model if self.phase else self.model.model.visual
        params = [*trained.parameters(), *self.heads.parameters()]
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad / parallel.world()
        parallel.sum_over_processes([param.grad for param in params if param.grad is not None])

    def share_clock(self, seconds: float) -> None:
        """Adds to the clock; the first process's counts, so that all change phase at the same step."""
        shared = torch.tensor([seconds if parallel.rank() == 0 else 0.0])
        parallel.sum_over_processes([shared])
        self.elapsed_s += shared.item()

    def run(self) -> None:
        args = self.args
        template = Path(__file__).with_name("chat_template.jinja").read_text()
        seed = args.seed + 1000 * self.runs + 100 * parallel.rank()  # a resumed run draws new scenes
        mixture = Mixture(Encoder(self.tokenizer, template), seed, self.progress, args.tokens_per_batch)
        loader = DataLoader(mixture, batch_size=None, num_workers=args.workers, prefetch_factor=4)
        self.progress.value = self.phase + min(0.999, self.done())
        batches = iter(loader)
        total, quiet = round(60 * args.minutes), parallel.rank() > 0
        bar = tqdm(total=total, initial=round(self.elapsed_s), unit="s", smoothing=0, disable=quiet)
        saved = logged = last = time.monotonic()
        recent: dict[str, list[float]] = defaultdict(list)
        phase = self.phase
        while self.elapsed_s < 60 * args.minutes:
            batch = next(batches)
            if batch["phase"] != self.phase:  # drawn before the phase changed
                continue
            for name, value in self.train_step(batch).items():
                recent[name].append(value)
            self.step += 1
            now = time.monotonic()
            self.share_clock(now - last)
            last = now
            self.progress.value = self.phase + min(0.999, self.done())
            bar.update(round(self.elapsed_s) - bar.n)
            if now - logged > LOG_EVERY_S and not quiet:
                losses = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in recent.items())
                bar.write(f"{self.elapsed_s:6.0f} s step {self.step} {losses} | {self.averages.line()}")
                bar.set_postfix_str(losses)
                recent.clear()
                logged = now
            if now - saved > SAVE_EVERY_S or self.phase != phase:
                self.save()
                saved, phase = now, self.phase
        bar.close()
        self.save()

    def save(self) -> None:
        """Writes the whole state beside and renames it; the first process does it for all."""
        if parallel.rank():
            return
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "tokenizer": self.tokenizer.to_str(),
            "optimizer": self.optimizer.state_dict(),
            "averages": self.averages.values,
            "elapsed_s": self.elapsed_s,
            "step": self.step,
            "tokens": self.tokens,
            "runs": self.runs + 1,
        }
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.state_path.with_suffix(".tmp"))
        self.state_path.with_suffix(".tmp").replace(self.state_path)

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `save` wrote."""
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.averages.values = state["averages"]
        self.elapsed_s, self.step = state["elapsed_s"], state["step"]
        self.tokens, self.runs = state["tokens"], state["runs"]

    def info(self) -> dict[str, Any]:
        """What is needed to make this checkpoint again."""
        names = (
            "seed",
            "minutes",
            "vision_minutes",
            "muon_lr",
            "adam_lr",
            "vision_rate",
            "tokens_per_batch",
            "processes",
            "dtype",
        )
        return {name: getattr(self.args, name) for name in names} | {
            "steps": self.step,
            "joint_tokens": self.tokens,
            "runs": self.runs + 1,
            "trained_minutes": round(self.elapsed_s / 60, 1),
            "device": self.args.device,
            "cpu_threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="training time in all, over all resumptions")
    parser.add_argument("--vision-minutes", type=float, default=None, help="of these, vision alone (default: a sixth)")
    parser.add_argument("--out", type=Path, default=Path("assets/demo"), help="where the checkpoint is written")
    parser.add_argument("--work", type=Path, default=Path("build/demo-training"), help="where the state is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the state in --work")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel; on a CPU, one a core is best")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw scenes, for each of --processes")
    parser.add_argument("--tokens-per-batch", type=int, default=2600, help="for each process")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--vision-rate", type=float, default=0.3, help="the vision tower's share of --muon-lr")
    args = parser.parse_args(argv)
    if args.vision_minutes is None:
        args.vision_minutes = args.minutes / 6
    return args


def train(args: argparse.Namespace) -> None:
    """One process's part of the training; the first one exports."""
    trainer = Trainer(args)
    with fast_forward():
        trainer.run()
    if parallel.rank():
        return
    export(trainer.model, trainer.tokenizer, args.out)
    save_json(args.out / "training_info.json", trainer.info())
    print(json.dumps(trainer.info()))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    parallel.launch(train, args.processes, args.work, args)


if __name__ == "__main__":
    main()
