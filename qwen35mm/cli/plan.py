"""`qwen35mm plan`: the memory that a model needs on this machine, before its weights are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.option_values import parse_size
from qwen35mm.settings import ModelOptions

if TYPE_CHECKING:
    from rich.console import Console

    from qwen35mm.cache import MemoryPlan
    from qwen35mm.model_library.plan import Forecast, FormatPlan

_BAR_WIDTH = 48
# Each part has a sign, so that a bar can be read without colours.
_PARTS = (
    ("weights", "█", "blue", ("weights_bytes",)),
    ("KV", "▓", "green", ("kv_memory_bytes",)),
    ("states", "▒", "magenta", ("slot_bytes",)),
    ("work", "░", "yellow", ("work_bytes",)),
    ("program", "▚", "cyan", ("runtime_bytes",)),
    ("kept", "·", "white", ("state_bytes", "device_state_bytes", "vision_bytes")),
)


def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A checkpoint's folder, a GGUF file or a Hugging Face id; several for one program with all of them.",
        ),
    ],
    context: Annotated[int | None, typer.Option(help="Most tokens of a conversation; by default as for chat.")] = None,
    slots: Annotated[int | None, typer.Option(help="Replies at one time; by default 4.")] = None,
    weights: Annotated[str, typer.Option(help="auto (all of them), bf16, int8, int4 or fp8.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto (all useful types), or as for chat.")] = "auto",
    kv_keep: Annotated[str, typer.Option(metavar="SHARE", help="As for chat: 1 keeps all keys and values.")] = "1",
    lora: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]FOLDER[=SCALE]", help="As for chat; may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="As for chat.")] = "auto",
    rope_scaling: Annotated[str | None, typer.Option(metavar="yarn,factor=N", help="As for chat.")] = None,
    speculate: Annotated[
        str | None, typer.Option(metavar="auto|off|mtp|ngram", help="As for chat; the layer is only counted with mtp.")
    ] = None,
    max_image_tokens: Annotated[int | None, typer.Option(help="Most tokens of one image.")] = None,
    max_video_tokens: Annotated[int | None, typer.Option(help="Most tokens of one video.")] = None,
    max_memory: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="Memory to plan for; by default what is free.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in bytes and tokens.")] = False,
) -> None:
    """Show the memory that a model needs in each format of weights, and the context that fits."""
    with quick_imports():
        from qwen35mm.model_library.plan import forecast, room_for_models
    options = ModelOptions(
        dtype=dtype,
        weights=weights,
        device=device,
        context_length=context,
        rope_scaling=rope_scaling,
        slots=slots,
        kv_dtype=kv_dtype,
        speculate=speculate,
        kv_keep=kv_keep,
        lora=lora,
        max_image_tokens=max_image_tokens,
        max_video_tokens=max_video_tokens,
        max_memory=max_memory,
    )
    backend_options = options.backend_options()
    room_bytes = room_for_models(backend_options) if len(models) > 1 else None
    found = [forecast(model, backend_options, room_bytes=room_bytes) for model in models]
    if as_json:
        told = [each.to_dict() for each in found]
        typer.echo(json.dumps(told[0] if len(told) == 1 else told))
        return
    from rich.console import Console

    console = Console()
    for each in found:
        _show(console, each)
    if room_bytes is not None:
        # As a start compares them: it keeps some states of each.
        needed = [each.taken.least_bytes for each in found]
        how = "they all stay loaded" if sum(needed) <= room_bytes else "they don't fit together, so they take turns"
        sizes = " + ".join(map(_mib, needed))
        console.print(f"Together: {sizes} MiB needed, {_mib(room_bytes)} available: {how}.", highlight=False)


def _show(console: Console, found: Forecast) -> None:
    from rich.table import Table

    first = found.formats[0].needed
    console.print(
        f"[bold]{found.name}[/] on {found.device}, {_mib(found.memory_bytes)} MiB available; a context of "
        f"{first.context_length:,} tokens, {first.num_slots} slots. Weights by {found.weights_from}. In MiB:",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    heads = (
        "weights/KV",
        "weights",
        "KV",
        "states",
        "work",
        "program",
        "needed",
        "+ kept",
        "= most",
        "fits",
        "longest",
    )
    for name in heads:
        table.add_column(name, justify="left" if name in ("weights/KV", "fits") else "right")
    for each in found.formats:
        table.add_row(_label(each), *_numbers(each))
    console.print(table)
    widest = max(found.memory_bytes, *(each.needed.total_bytes for each in found.formats))
    for each in found.formats:
        console.print(f"{_label(each):>10} ", _bar(each.most or each.needed, widest, found.memory_bytes), sep="")
    legend = "  ".join(f"[{colour}]{sign * 2}[/] {name}" for name, sign, colour, _ in _PARTS)
    console.print(f"{'':>10} {legend}  | available", highlight=False)
    for each in found.formats:
        if (folder := each.needed.kv_directory) is not None:
            console.print(
                f"{_label(each)}: keys and values of {each.needed.num_kv_tokens:,} tokens are in a file of "
                f"{_mib(each.needed.kv_bytes)} MiB in {folder}, which is slower if the free memory can't hold them.",
                highlight=False,
            )
    if found.adapter_bytes:
        console.print(f"Weights include {_mib(found.adapter_bytes)} MiB of adapters with a name.", highlight=False)
    states, recurrent = found.state_bytes, found.recurrent_bytes
    rows = "" if first.context_rows == first.context_length else f", of {first.context_rows:,} tokens a context"
    console.print(
        f"KV: {first.kv_token_bytes / 1024:g} KiB a token{rows}. States: {_mib(states)} MiB a sequence, "
        f"{_mib(recurrent)} of them recurrent in float32, {_mib(states - recurrent)} of the convolution; "
        "one more sequence is for commits.",
        highlight=False,
    )
    media = Table("medium", box=None, pad_edge=False)
    for name in ("tokens, at most", "KV, MiB", "embeddings, MiB"):
        media.add_column(name, justify="right")
    for each in found.media:
        height, width = each.size
        name = f"{width} x {height}" if each.kind == "image" else f"a minute of video, {width} x {height}"
        media.add_row(name, f"{each.num_tokens:,}", _mib(each.kv_bytes), _mib(each.embedding_bytes))
    if found.media:
        console.print(media)


def _label(each: FormatPlan) -> str:
    return each.weights if each.kv_dtype == "auto" else f"{each.weights}/{each.kv_dtype}"


def _numbers(each: FormatPlan) -> list[str]:
    needed, most = each.needed, each.most
    sizes = [getattr(needed, name) for _, _, _, (name, *_) in _PARTS[:5]]
    sums = [needed.total_bytes]
    if most is not None:
        sums += [most.total_bytes - needed.total_bytes, most.total_bytes]
    context = "-" if each.largest_context is None else f"{each.largest_context:,}"
    fits = "no" if not each.fits else "yes" if needed.kv_directory is None else "file"
    told = [f"{size / 2**20:,.0f}" for size in (*sizes, *sums)]
    return [*told, *["-"] * (3 - len(sums)), fits, context]


def _bar(plan: MemoryPlan, widest: int, memory_bytes: int) -> str:
    """A bar of all parts, with a mark where the memory ends."""
    drawn, end, shown = "", 0, 0
    mark = round(memory_bytes / widest * _BAR_WIDTH)
    for _, sign, colour, names in _PARTS:
        end += sum(getattr(plan, name) for name in names)
        stop = round(end / widest * _BAR_WIDTH)
        drawn += f"[{colour}]{sign * (stop - shown)}[/]"
        shown = max(shown, stop)
    return f"{drawn}{' ' * max(mark - shown, 0)}|" if shown <= mark else f"{drawn} (| at {mark} of {_BAR_WIDTH})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
