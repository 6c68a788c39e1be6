"""Trains a LoRA adapter with transformers' Trainer and PEFT.

Trainer runs the loop and writes the checkpoints; here are the loss of the answers alone, the best adapter, the samples
that are shown, and the choice of the last complete checkpoint. Without dropout, and with the order of the samples from
the seed, a resumed training computes what an uninterrupted one does.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.config import ModelConfig
from qwen35mm.cpu import cpu_capabilities
from qwen35mm.errors import ConfigError
from qwen35mm.tuning.encoding import Encoded, Encoder
from qwen35mm.tuning.need import TARGETS, Need, check_fits, memory_need, seconds_needed
from qwen35mm.tuning.output import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, digest_of
from qwen35mm.tuning.samples import hold_out, shares

logger = logging.getLogger(__name__)

# How often the held-out loss is measured.
_NUM_EVALUATIONS = 5
# Held-out samples whose answers are shown at the start and the end; between them, the first one's.
_NUM_SHOWN = 2
# Most seconds of work that a kill loses, roughly.
_SAVED_EVERY_S = 60.0
_MOST_NEW_TOKENS = 64
_WARMUP = 0.1
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TuneSettings:
    """How an adapter is trained.

    Attributes:
        rank: of the adapter; its alpha is twice that.
        batch: samples of a step, each computed alone.
        edited_weight: how much more an edited answer counts.
        dtype: of the weights: auto, bfloat16 or float32. The adapter is float32.

    Raises:
        ConfigError: a value is out of range.
    """

    rank: int = 16
    epochs: int = 3
    learning_rate: float = 3e-4
    batch: int = 4
    edited_weight: float = 3.0
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *_DTYPES):
            raise ConfigError(f"dtype must be auto, {' or '.join(_DTYPES)}; got '{self.dtype}'.")
        if not (math.isfinite(self.edited_weight) and self.edited_weight > 0):
            raise ConfigError(f"The weight of edited captions must be a number above 0; got {self.edited_weight}.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"The learning rate must be a number above 0; got {self.learning_rate}.")


@dataclass(frozen=True)
class Plan:
    """What a training will do, before it begins.

    Attributes:
        num_edited: of the training samples.
        num_steps: all steps of the run.
        seconds: what is left of it will take about so long; None if it isn't measured yet.
        resumes_at: the step that it resumes at; 0 for a new training.
        kernels: how Gated DeltaNet layers are computed.
    """

    num_samples: int
    num_edited: int
    num_held_out: int
    num_steps: int
    longest: int
    need: Need
    dtype: str
    device: str
    seconds: float | None = None
    resumes_at: int = 0
    kernels: str = "PyTorch"


@dataclass(frozen=True)
class Tuned:
    """A finished training.

    Attributes:
        before, after: the held-out loss without the adapter and with it, in nats for a token.
        step: the step of the best adapter.
        peak_bytes: the most memory that the program held; on a card, the most that was allocated;
            None if unknown.
    """

    before: float
    after: float
    step: int
    num_steps: int
    seconds: float
    peak_bytes: int | None


class Listener(Protocol):
    """Who is told what happens."""

    def planned(self, plan: Plan) -> None:
        """Called before the first step, with the measured time."""

    def stepped(self, done: int, total: int, loss: float | None, seconds_left: float | None) -> None:
        """Called after each step."""

    def evaluated(self, step: int, loss: float, is_best: bool) -> None:
        """Called with each held-out loss."""

    def shown(self, name: str, answer: str, expected: str) -> None:
        """Called with the model's answer to a held-out sample."""


class Tuner:
    """One training of an adapter.

    Args:
        encoder: the model's.
        name: the model, as a person named it; written into the adapter.
        samples: encoded; at least two groups.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: the model can't be trained, or there are too few samples.
    """

    def __init__(
        self, encoder: Encoder, name: str, samples: Sequence[Encoded], settings: TuneSettings, *, device: str
    ) -> None:
        self.encoder, self.name, self.settings = encoder, name, settings
        self.device = torch.device(device)
        self.dtype = _dtype(settings.dtype, self.device)
        config = encoder.config
        check_trainable(config, encoder.folder)
        is_held_out = hold_out([each.sample.group for each in samples])
        pairs = list(zip(samples, is_held_out, strict=True))
        self.training = [each for each, held in pairs if not held]
        self.held_out = [each for each, held in pairs if held]
        if not self.held_out:
            raise ConfigError(
                "One picture or chat is held out to see whether training helps, and there is only one. Add at least "
                "one more."
            )
        # The same in each run, and no two of one group.
        by_group = {each.sample.group: each for each in self.held_out}
        self.shown = list(by_group.values())[:_NUM_SHOWN]
        sources = read_checkpoint(encoder.folder, None)
        self.need = memory_need(sources, config, samples, rank=settings.rank, dtype=self.dtype, device=self.device)

    @property
    def num_steps(self) -> int:
        """All steps of the training."""
        return math.ceil(len(self.training) / self.settings.batch) * self.settings.epochs

    def plan(self) -> Plan:
        """What it will do, without loading the model."""
        return Plan(
            num_samples=len(self.training),
            num_edited=sum(each.sample.edited for each in self.training),
            num_held_out=len(self.held_out),
            num_steps=self.num_steps,
            longest=max(each.num_tokens for each in (*self.training, *self.held_out)),
            need=self.need,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            kernels=_kernels(self.device),
        )

    def run(self, folder: AdapterFolder, listener: Listener, *, restart: bool = False) -> Tuned:
        """Trains, or resumes a training that was killed, and leaves the best adapter in the folder.

        Raises:
            ConfigError: it doesn't fit into memory, or the folder holds something else.
            OutputError: the folder can't be written to.
            MediaError: a file changed since it was encoded.
        """
        check_fits(self.need, self.name, self.device)
        checkpoint = folder.begin(self._identity(folder), restart=restart)
        with _quiet():
            return self._run(folder, listener, checkpoint)

    def _run(self, folder: AdapterFolder, listener: Listener, checkpoint: Path | None) -> Tuned:
        model = self._load()
        began_s = time.monotonic()
        weight = shares([each.sample.edited for each in self.training], self.settings.edited_weight)
        training = _Samples(self.encoder, self.training, weight)
        held_out = _Samples(self.encoder, self.held_out, [1.0] * len(self.held_out))
        step_s = self._measure(model, training)
        keeper = _Keeper(self, folder, listener, step_s)
        trainer = _Trainer(
            model=model,
            args=self._arguments(folder, step_s),
            data_collator=_alone,
            train_dataset=training,
            eval_dataset=held_out,
            callbacks=[keeper],
        )
        # It would print dictionaries.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        before, (after, step) = keeper.baseline, keeper.best
        if step == 0:
            raise ConfigError(
                "The held-out loss was never a number, so no adapter was kept: take a lower --learning-rate, and begin "
                "anew with --restart."
            )
        folder.finish()
        return Tuned(before, after, step, self.num_steps, time.monotonic() - began_s, _peak_bytes(self.device))

    def _identity(self, folder: AdapterFolder) -> dict[str, Any]:
        """What decides an adapter, besides the machine."""
        texts = [
            (
                digest_of(each.token_ids.tolist()),
                [plan.digest for plan in each.plans],
                each.sample.edited,
                each.sample.group.hex(),
            )
            for each in (*self.training, *self.held_out)
        ]
        return {
            "weights": weights_digest(self.encoder.folder, folder.training / "weights"),
            "samples": digest_of(texts),
            **asdict(self.settings),
            "dtype": str(self.dtype),
        }

    def _load(self) -> Any:
        """The model with a new adapter, whose random values come from the seed."""
        model: Any = AutoModelForImageTextToText.from_pretrained(self.encoder.folder, dtype=self.dtype)
        if self.need.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        torch.manual_seed(self.settings.seed)
        config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=2 * self.settings.rank,
            target_modules=list(TARGETS),
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model.to(self.device), config)

    def _measure(self, model: Any, training: _Samples) -> _StepTimes:
        """Times a training step of a short and of the longest sample, which also shows that it fits."""
        order = sorted(range(len(training)), key=lambda at: self.training[at].num_tokens)
        measured: list[tuple[int, float]] = []
        model.train()
        # The first one pays for what is made once.
        for at in (order[0], order[0], order[-1]):
            began_s = time.monotonic()
            _loss(model, _on(_alone([training[at]]), self.device)).backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            measured.append((self.training[at].num_tokens, time.monotonic() - began_s))
        model.zero_grad()
        return _StepTimes(measured[1:])

    def _arguments(self, folder: AdapterFolder, times: _StepTimes) -> TrainingArguments:
        settings = self.settings
        mean_s = times.seconds([each.num_tokens for each in self.training]) / len(self.training)
        step_s = max(mean_s * settings.batch, 1e-3)
        arguments = TrainingArguments(
            output_dir=str(folder.training),
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=settings.batch,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=_WARMUP,
            weight_decay=0.0,
            optim="adamw_torch",
            eval_strategy="steps",
            eval_steps=self.eval_steps,
            eval_on_start=True,
            save_strategy="steps",
            save_steps=max(1, min(self.eval_steps, int(_SAVED_EVERY_S / step_s))),
            save_total_limit=2,
            logging_steps=1,
            label_names=["targets"],
            prediction_loss_only=True,
            remove_unused_columns=False,
            use_cpu=self.device.type == "cpu",
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to="none",
            seed=settings.seed,
            data_seed=settings.seed,
        )
        if arguments.n_gpu > 1:
            # Trainer would give each card a part of a batch, and a batch is one sample here.
            arguments._n_gpu = 1
        return arguments

    @property
    def eval_steps(self) -> int:
        """Steps between two measurements of the held-out loss."""
        return math.ceil(self.num_steps / _NUM_EVALUATIONS)


def check_trainable(config: ModelConfig, folder: Path) -> None:
    """Raises ConfigError for a checkpoint that can't be trained."""
    if config.tower is None:
        raise ConfigError("This checkpoint is for text alone. Train one that sees pictures.")
    if config.quantization is not None or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"'{folder.name}' holds quantised weights, which can't be trained. Name the original checkpoint, with "
            "weights in bfloat16 or float32; the adapter can be used with both."
        )


class _StepTimes:
    """Seconds of a training step of one sample, by its length."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        self._measured = measured

    def seconds(self, lengths: Sequence[int]) -> float:
        return seconds_needed(self._measured, lengths)


class _Samples(Dataset[dict[str, Any]]):
    """Encoded samples; pixels are read when they are needed."""

    def __init__(self, encoder: Encoder, samples: Sequence[Encoded], weight: Sequence[float]) -> None:
        self._encoder, self._samples, self._weight = encoder, samples, weight

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> dict[str, Any]:
        encoded = self._samples[at]
        inputs: dict[str, Any] = self._encoder.inputs(encoded)
        # The logits at a token predict the next one.
        inputs["logits_to_keep"] = torch.arange(encoded.start - 1, encoded.num_tokens - 1)
        inputs["targets"] = inputs["input_ids"][0, encoded.start :]
        inputs["weight"] = torch.tensor(self._weight[at])
        return inputs


def _alone(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of one: no padding, which the recurrent layers would have to be kept from."""
    (sample,) = samples
    return sample


def _loss(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The mean of -log p of the answer's tokens, times the sample's weight."""
    forward = {name: value for name, value in inputs.items() if name not in ("targets", "weight")}
    logits = model(**forward, use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), inputs["targets"]) * inputs["weight"]


class _Trainer(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = _loss(model, inputs)
        return (loss, {}) if return_outputs else loss


class _Keeper(TrainerCallback):
    """Keeps the best adapter, marks complete checkpoints, and tells the listener."""

    def __init__(self, tuner: Tuner, folder: AdapterFolder, listener: Listener, times: _StepTimes) -> None:
        self._tuner, self._folder, self._listener, self._times = tuner, folder, listener, times
        self.baseline = math.nan
        self.best = (math.inf, 0)
        self._began: tuple[float, int] = (0.0, 0)
        self._has_planned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for step, loss in _held_out_losses(state):
            self._count(step, loss)
        self._began = (time.monotonic(), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        began_s, first = self._began
        done = state.global_step - first
        left = (state.max_steps - state.global_step) * (time.monotonic() - began_s) / done
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        self._listener.stepped(state.global_step, state.max_steps, losses[-1] if losses else None, left)
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step, loss = _held_out_losses(state)[-1]
        is_best = self._count(step, loss)
        self._listener.evaluated(step, loss, is_best)
        if is_best:
            self._folder.keep(lambda folder: self._save(model, folder))
        is_all = not self._has_planned or step >= state.max_steps
        for each in self._tuner.shown if is_all else self._tuner.shown[:1]:
            self._listener.shown(each.sample.name, self._answer(model, each), each.sample.answer)
        if not self._has_planned:
            self._has_planned = True
            self._plan(state.global_step, time.monotonic() - self._began[0])
            self._began = (time.monotonic(), state.global_step)

    def _plan(self, step: int, evaluation_s: float) -> None:
        """Tells how long the rest will take, after the first evaluation."""
        tuner = self._tuner
        left = (tuner.num_steps - step) / tuner.num_steps
        seconds = self._times.seconds([each.num_tokens for each in tuner.training]) * tuner.settings.epochs * left
        seconds += evaluation_s * math.ceil(left * tuner.num_steps / tuner.eval_steps)
        self._listener.planned(_with(tuner.plan(), seconds=seconds, resumes_at=step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._folder.complete(state.global_step)

    def _save(self, model: Any, folder: Path) -> None:
        # By its folder until now: PEFT would ask the Hub for a name.
        model.peft_config["default"].base_model_name_or_path, name = self._tuner.name, str(self._tuner.encoder.folder)
        try:
            model.save_pretrained(folder, save_embedding_layers=False)
        finally:
            model.peft_config["default"].base_model_name_or_path = name

    def _count(self, step: int, loss: float) -> bool:
        """Takes a held-out loss; whether it is the best one so far."""
        if step == 0:
            self.baseline = loss
            return False
        if step % self._tuner.eval_steps and step < self._tuner.num_steps:
            # A resumed training begins with a loss that an uninterrupted one doesn't measure.
            return False
        # A resumed training measures its step again, and a kill may have come before the adapter was kept.
        is_best = loss < self.best[0] or (loss, step) == self.best
        if is_best:
            self.best = (loss, step)
        return is_best

    def _answer(self, model: Any, encoded: Encoded) -> str:
        """The greedy answer to a held-out sample."""
        encoder = self._tuner.encoder
        inputs = encoder.inputs(encoded)
        prompt = {name: inputs[name][:, : encoded.start] for name in ("input_ids", "mm_token_type_ids")}
        media = {name: value for name, value in inputs.items() if "pixel" in name or "grid" in name}
        stop = int(encoded.token_ids[-1])
        most = min(_MOST_NEW_TOKENS, encoded.num_answer_tokens + 8)
        with torch.no_grad():
            ids = model.generate(
                **_on({**prompt, **media}, self._tuner.device),
                attention_mask=torch.ones_like(prompt["input_ids"], device=self._tuner.device),
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=stop,
            )
        return encoder.tokenizer.decode(ids[0, encoded.start :].tolist()).strip()


def _held_out_losses(state: Any) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in state.log_history if "eval_loss" in row]


def _with(plan: Plan, **values: Any) -> Plan:
    return Plan(**{**vars(plan), **values})


def _on(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights: bfloat16 where a processor or a card multiplies it."""
    if name != "auto":
        return _DTYPES[name]
    can = cpu_capabilities()
    multiplies = device.type == "cuda" or can.get("amx_bf16") or can.get("avx512_bf16")
    return torch.bfloat16 if multiplies else torch.float32


def _kernels(device: torch.device) -> str:
    """Whose kernels compute the Gated DeltaNet layers."""
    from transformers.utils.import_utils import is_flash_linear_attention_available

    return "flash-linear-attention" if device.type == "cuda" and is_flash_linear_attention_available() else "PyTorch"


def _peak_bytes(device: torch.device) -> int | None:
    """None where the system doesn't say: on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' and PEFT's progress bars and notes."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "Listener", "Plan", "TuneSettings", "Tuned", "Tuner", "check_trainable"]
