"""`qwen35mm gates`: gates that help to choose which keys and values `--kv-keep` keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.eval import read_text
from qwen35mm.cli.quick_imports import quick_imports

if TYPE_CHECKING:
    from rich.progress import TaskID


def gates(
    out: Annotated[
        Path, typer.Option(help="The file to write. As kv_gates.safetensors beside the model it is found by itself.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint's folder, GGUF file or Hugging Face id; by default the bundled demo."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to read; by default Python's reference, English and code.")
    ] = None,
    media: Annotated[
        Path | None, typer.Option(help="A folder of pictures and videos to read; by default drawn ones.")
    ] = None,
    conversations: Annotated[int, typer.Option(help="How many conversations are read.", min=2)] = 64,
    rank: Annotated[int, typer.Option(help="Rank of a layer's gate: its size.", min=1, max=256)] = 16,
    seed: Annotated[int, typer.Option(help="Decides the conversations and the gates' first values.", min=0)] = 0,
    weights: Annotated[str, typer.Option(help="Format of the model's weights, as for chat.")] = "auto",
    device: Annotated[str, typer.Option(help="As for chat.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads on the processor; by default one for each core.", min=1)
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the file if it exists.")] = False,
) -> None:
    """Train gates that help to choose what --kv-keep keeps. The same command resumes."""
    words = None if text is None else read_text(text)
    with quick_imports():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from qwen35mm.assets import demo_model_path
        from qwen35mm.cpu import set_num_threads
        from qwen35mm.model import load
        from qwen35mm.tuning.gate_texts import Conversations
        from qwen35mm.tuning.gates import GateSettings, check_free, train

    check_free(out, replace=replace)
    set_num_threads(threads)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("loading the model"):
        loaded = load(model or demo_model_path(), device=device, weights=weights, mtp=True)
    read = Conversations.of(words, media, blind=loaded.config.tower is None, seed=seed)
    settings = GateSettings(conversations=conversations, rank=rank, seed=seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as bar:
            tasks: dict[str, TaskID] = {}

            def told(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = bar.add_task(phase, total=total)
                bar.update(tasks[phase], completed=done)

            trained = train(loaded, out, read, settings, replace=replace, told=told)
    except KeyboardInterrupt:
        console.print("Stopped. The same command continues behind the last conversation.")
        raise typer.Exit(130) from None
    found = ", ".join(f"{layer}: {share:.0%}" for layer, share in trained.overlap.items())
    if trained.num_left_out:
        console.print(f"{trained.num_left_out:,} conversations were too long for the model and left out.")
    console.print(f"Of the half of all tokens that is needed most, the gates find by layer {found} (chance: 50%).")
    console.print(f"{trained.num_parameters:,} numbers in {out}: use them with --kv-keep 0.5 --kv-gates {out}.")
