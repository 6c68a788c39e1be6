"""`qwen35mm tune`: an adapter from one's own captions or chats."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.errors import ConfigError, MissingExtraError, Qwen35mmError
from qwen35mm.option_values import with_options
from qwen35mm.settings import DEMO_NOTE

if TYPE_CHECKING:
    from rich.console import Console

    from qwen35mm.tuning.encoding import Encoded, Encoder
    from qwen35mm.tuning.samples import Found
    from qwen35mm.tuning.training import Plan, Tuned

_data = functools.partial(typer.Option, rich_help_panel="Data")
_media = functools.partial(typer.Option, rich_help_panel="Media")
_training = functools.partial(typer.Option, rich_help_panel="Training")

# The most skipped samples that are named, and the most characters of a text that are shown.
_NAMED, _SHOWN_CHARS = 5, 300
_LOG_S = 30.0
_PRESETS = ("captions", "chat")


@dataclass(frozen=True)
class TuneOptions:
    """What is learned, from what, and how."""

    preset: Annotated[str, _data(help="captions of media, or chat: replies of chats that the page exported.")] = (
        "captions"
    )
    prompt: Annotated[
        str,
        _data(help="The question for every caption; by default what the model was asked, else --preset short's."),
    ] = ""
    system: Annotated[str, _data(help="A system prompt for captions; chats have their own.")] = ""
    output: Annotated[str, _data(help="Which text files: sidecar or sidecar:.EXT.")] = "sidecar"
    output_dir: Annotated[Path | None, _data(help="Folder of the text files; by default beside their media.")] = None
    accepted: Annotated[bool, _data("--accepted", help="Only captions that a person accepted in review.")] = False
    edited_weight: Annotated[float, _data(help="How many times as much an edited text counts.")] = 3.0
    max_tokens: Annotated[int, _data(help="Most tokens of a sample; longer ones are left out.", min=16)] = 4096

    max_image_tokens: Annotated[int | None, _media(help="Most tokens of one image.", min=1)] = None
    max_video_tokens: Annotated[int | None, _media(help="Most tokens of one video.", min=1)] = None
    max_frames: Annotated[int | None, _media(help="Most frames of one video.", min=1)] = None
    fps: Annotated[float | None, _media(help="Frames a second that are read from a video.", min=0.001)] = None

    model: Annotated[
        str | None,
        _training(help="A checkpoint's folder or Hugging Face id, not quantised; by default the bundled demo."),
    ] = None
    rank: Annotated[int, _training(help="Rank of the adapter.", min=1, max=512)] = 16
    epochs: Annotated[int, _training(help="How often each sample is seen.", min=1)] = 3
    batch: Annotated[int, _training(help="Samples of a step.", min=1)] = 4
    learning_rate: Annotated[float, _training(help="Highest learning rate.")] = 3e-4
    seed: Annotated[int, _training(help="Decides the order and the adapter's first values.", min=0)] = 0
    device: Annotated[str, _training(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[
        str, _training(help="Of the model's weights: auto, bfloat16 or float32. auto takes the quicker one.")
    ] = "auto"
    threads: Annotated[int | None, _training(help="Threads on the processor; by default one for each core.", min=1)] = (
        None
    )
    restart: Annotated[
        bool, _training("--restart", help="Begin anew, in place of what the folder of the adapter holds.")
    ] = False
    dry_run: Annotated[bool, _training("--dry-run", help="Only say what would be done and what memory it needs.")] = (
        False
    )
    as_json: Annotated[bool, _training("--json", help="Also print what happens, one JSON object a line.")] = False


@with_options
def tune(
    source: Annotated[
        Path, typer.Argument(help="A folder or file with captions, or exported chats: a ZIP file or a folder of them.")
    ],
    options: TuneOptions,
    out: Annotated[Path, typer.Option(help="Folder of the adapter.")],
) -> None:
    """Make a LoRA adapter from your own captions or chats. The same command resumes."""
    try:
        import qwen35mm.tuning.training  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("Training an adapter", "tune") from error
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _tune(source, out, options, console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command resumes at the last saved step.")
        raise typer.Exit(130) from None


def _tune(source: Path, out: Path, options: TuneOptions, console: Console) -> None:
    from qwen35mm.assets import demo_model_path
    from qwen35mm.cpu import set_num_threads
    from qwen35mm.tuning.encoding import Encoder
    from qwen35mm.tuning.output import AdapterFolder
    from qwen35mm.tuning.training import Tuner, TuneSettings, check_trainable

    set_num_threads(options.threads)
    device = _device(options.device)
    settings = TuneSettings(
        rank=options.rank,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        batch=options.batch,
        edited_weight=options.edited_weight,
        seed=options.seed,
        dtype=options.dtype,
    )
    if options.model is None:
        console.print(DEMO_NOTE)
    budget = {
        "max_image_tokens": options.max_image_tokens,
        "max_video_tokens": options.max_video_tokens,
        "max_frames": options.max_frames,
        "fps": options.fps,
    }
    encoder = Encoder.of(options.model or demo_model_path(), device=device, budget=budget)
    check_trainable(encoder.config, encoder.folder)
    # Where it lies counts for a folder, the id for the Hub.
    name = options.model if options.model and not Path(options.model).exists() else str(encoder.folder)
    with tempfile.TemporaryDirectory(prefix="qwen35mm-tune-") as folder:
        found = _read(source, options, encoder, Path(folder))
        samples = _encode(found, encoder, options, console)
        tuner = Tuner(encoder, name, samples, settings, device=device)
        for line in _described(tuner.plan(), options, samples):
            console.print(line)
        if options.dry_run:
            return
        with contextlib.closing(AdapterFolder(out)) as adapter, _Shown(console, as_json=options.as_json) as shown:
            tuned = tuner.run(adapter, shown, restart=options.restart)
            shown.ended(tuned)
    for line in _ended(tuned, out):
        console.print(line)


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda; got '{name}'. Training takes one card.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no GPU that PyTorch can use here. Take --device cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _read(source: Path, options: TuneOptions, encoder: Encoder, folder: Path) -> Found:
    """The samples of the source, not yet encoded."""
    from qwen35mm.captioning.texts.presets import preset_question
    from qwen35mm.tuning.captions import CaptionSource, read_captions

    if not source.exists():
        raise typer.BadParameter(f"there is no '{source}'.")
    if options.preset not in _PRESETS:
        raise typer.BadParameter(f"--preset must be {' or '.join(_PRESETS)}; got '{options.preset}'.")
    if options.preset == "chat":
        try:
            from qwen35mm.tuning.chats import read_chats
        except ModuleNotFoundError as error:
            raise MissingExtraError("Reading exported chats", "chat") from error
        return read_chats(source, folder, encoder.media)
    return read_captions(
        CaptionSource(
            source,
            preset_question("short"),
            options.prompt,
            options.system,
            options.output,
            options.output_dir,
            options.accepted,
        )
    )


def _encode(found: Found, encoder: Encoder, options: TuneOptions, console: Console) -> list[Encoded]:
    """The samples that can be used; says which can't and why."""
    from qwen35mm.captioning.records import one_line, printable

    encoded: list[Encoded] = []
    skipped = list(found.skipped)
    with console.status("reading media"):
        for sample in found.samples:
            try:
                made = encoder.encode(sample)
            except Qwen35mmError as error:
                skipped.append((sample.name, str(error)))
                continue
            if made.num_tokens > options.max_tokens:
                skipped.append((sample.name, f"It has {made.num_tokens:,} tokens, more than --max-tokens."))
            else:
                encoded.append(made)
    for name, why in skipped[:_NAMED]:
        console.print(f"Left out: {one_line(name)}. {printable(why)}", markup=False)
    if len(skipped) > _NAMED:
        console.print(f"Left out: {len(skipped) - _NAMED} more.")
    if found.num_bare:
        console.print(
            f"{found.num_bare:,} media have no {'accepted ' if options.accepted else ''}caption to learn from."
        )
    if not encoded:
        raise ConfigError("There is nothing to learn from: every sample was left out.")
    return encoded


def _described(plan: Plan, options: TuneOptions, samples: Sequence[Encoded]) -> Iterator[str]:
    from qwen35mm.model.devices import gib
    from qwen35mm_preprocess.say import english

    what = "captions" if options.preset == "captions" else "replies"
    weight = f", {plan.num_edited:,} of them edited by a person, which count {options.edited_weight:g} times"
    yield (
        f"Learns from {plan.num_samples:,} {what}{weight if plan.num_edited else ''}; held out: "
        f"{plan.num_held_out:,}. Steps: {plan.num_steps:,}. The longest sample has {plan.longest:,} tokens."
    )
    checkpointing = ", gradient checkpointing" if plan.need.checkpointing else ""
    yield (
        f"Needs about {english(gib(plan.need.total))} of memory: {plan.need}. {plan.dtype} on {plan.device}"
        f"{checkpointing}; Gated DeltaNet by {plan.kernels}."
    )
    asked = Counter(each.sample.messages[-1].text for each in samples)
    if options.preset == "captions":
        (question, _), *others = asked.most_common()
        more = f" and {len(others)} other questions" if others else ""
        yield f"Asked: {_short(question)}{more}"


class _Shown:
    """Shows a training in the terminal: a bar, losses and answers. Programs are told by lines of JSON on stdout."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console
        self._as_json = as_json
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}, {task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = None
        self._logged_s = time.monotonic()

    def __enter__(self) -> _Shown:
        self._status = self._console.status("loading the model and measuring two steps")
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        self._bar.stop()

    def planned(self, plan: Plan) -> None:
        assert plan.seconds is not None
        self._tell("planned", step=plan.resumes_at, steps=plan.num_steps, seconds_left=plan.seconds)
        self._status.stop()
        if plan.resumes_at:
            self._console.print(f"Resumes at step {plan.resumes_at:,}.")
        end = time.strftime("%H:%M", time.localtime(time.time() + plan.seconds))
        self._console.print(f"Takes about {_duration(plan.seconds)}, until {end}. Ctrl-C stops it.")
        self._task = self._bar.add_task(
            "", total=plan.num_steps, completed=plan.resumes_at, loss="-", left=_duration(plan.seconds)
        )
        self._bar.start()

    def stepped(self, done: int, total: int, loss: float | None, seconds_left: float | None) -> None:
        assert self._task is not None
        self._tell("step", step=done, steps=total, loss=loss, seconds_left=seconds_left)
        said, left = "-" if loss is None else f"{loss:.3f}", _duration(seconds_left or 0)
        self._bar.update(self._task, completed=done, loss=said, left=left)
        if not self._console.is_terminal and (done == total or time.monotonic() - self._logged_s >= _LOG_S):
            self._logged_s = time.monotonic()
            self._console.print(f"Step {done:,} of {total:,}: loss {said}, {left} left.")

    def evaluated(self, step: int, loss: float, is_best: bool) -> None:
        self._tell("held_out", step=step, loss=loss, is_best=is_best)
        note = "before training" if step == 0 else "the best so far, kept" if is_best else "not kept"
        self._console.print(f"Step {step:,}: held-out loss {loss:.4f} ({note}).")

    def shown(self, name: str, answer: str, expected: str) -> None:
        self._tell("answer", name=name, answer=_short(answer), wanted=_short(expected))
        self._console.print(f"  {_short(name)}: {_short(answer)}", markup=False)
        self._console.print(f"    wanted: {_short(expected)}", markup=False)

    def ended(self, tuned: Tuned) -> None:
        self._tell("ended", step=tuned.step, before=tuned.before, after=tuned.after)

    def _tell(self, event: str, **values: object) -> None:
        if self._as_json:
            # A loss that is no number, or an endless one, has none in JSON.
            known = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in values.items()
            }
            print(json.dumps({"event": event, **known}), flush=True)


def _ended(tuned: Tuned, out: Path) -> Iterator[str]:
    from qwen35mm.model.devices import gib
    from qwen35mm_preprocess.say import english

    memory = "" if tuned.peak_bytes is None else f", {english(gib(tuned.peak_bytes))} at most"
    yield (
        f"Held-out loss {tuned.before:.4f} before, {tuned.after:.4f} with the adapter of step {tuned.step:,} of "
        f"{tuned.num_steps:,}. {_duration(tuned.seconds)}{memory}."
    )
    if tuned.after >= tuned.before:
        yield (
            "The adapter is no better than the model alone on what was held out: use more captions, fewer --epochs "
            "or a lower --learning-rate."
        )
    yield f"The adapter is in {out}: use it with --lora {out}."


def _short(text: str) -> str:
    from qwen35mm.captioning.records import one_line

    line = one_line(text)
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"


def _duration(seconds: float) -> str:
    """Such as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
