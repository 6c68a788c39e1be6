"""`qwen35mm eval`: the cost of formats of weights, of keys and values, and of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35mm.cli.quick_imports import quick_imports

if TYPE_CHECKING:
    from rich.table import Table

    from qwen35mm.evaluation.compare import Result

# For each skill of the bundled model: 400 in all.
_QUESTIONS = 20


def evaluate(
    weights: Annotated[
        str | None,
        typer.Option(
            help="Formats with commas between: bf16, float32, int8, int4, fp8; auto is as a quantised checkpoint has "
            "them. Without it int8,int4, or none beside --kv-dtype, --kv-keep and --lora.",
            metavar="FORMATS",
        ),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="A type of keys and values, as for chat, beside the reference's weights; may be repeated.",
            metavar="TYPE",
        ),
    ] = None,
    kv_keep: Annotated[
        list[str] | None,
        typer.Option(
            help="A share of keys and values to keep, as for chat, beside the reference's weights; may be repeated.",
            metavar="SHARE",
        ),
    ] = None,
    kv_gates: Annotated[
        str,
        typer.Option(help="What chooses the kept ones, as for chat: a file, auto or none.", metavar="FILE"),
    ] = "auto",
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="An adapter, as for chat, merged into the reference's weights; may be repeated: each is measured "
            "alone.",
            metavar="FOLDER[=SCALE]",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint's folder or Hugging Face id; by default the bundled demo.")
    ] = None,
    reference: Annotated[str, typer.Option(help="What they are compared with: bf16, or float32.")] = "bf16",
    text: Annotated[
        Path | None,
        typer.Option(help="Text file to measure on; by default the demo's right answers, or a bundled text."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of the text.", min=2)] = 8192,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens that are read in one go; by default 2,048. Losses are also shown by depth.", min=2),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(help="Questions of each skill; by default 20 for the bundled model, none for others.", min=0),
    ] = None,
    device: Annotated[str, typer.Option(help="Integers are for cpu alone.")] = "cpu",
    rope_scaling: Annotated[
        str | None, typer.Option(metavar="yarn,factor=N", help="As for chat: N times as many positions.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads on the processor; by default one per core.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what formats of weights and KV, and adapters, cost, in KL divergence, perplexity and right answers."""
    if weights is None:
        weights = "" if kv_dtype or kv_keep or lora else "int8,int4"
    words = None if text is None else read_text(text)
    with quick_imports():
        from rich.console import Console

        from qwen35mm.assets import demo_model_path
        from qwen35mm.cpu import set_num_threads
        from qwen35mm.evaluation.compare import compare

    set_num_threads(threads)
    if questions is None:
        questions = _QUESTIONS if model is None else 0
    with Console(stderr=True).status("making questions" if questions else "loading") as status:
        results = compare(
            model or demo_model_path(),
            [name.strip() for name in weights.split(",") if name.strip()],
            reference=reference,
            kv_dtypes=kv_dtype or (),
            kv_keeps=kv_keep or (),
            kv_gates=kv_gates,
            loras=lora or (),
            text=words,
            max_tokens=tokens if context is None else max(tokens, context),
            context=context,
            num_questions=questions,
            device=device,
            rope_scaling=rope_scaling,
            told=status.update,
        )
    if as_json:
        found: dict[str, Any] = {"model": model or "demo", "reference": reference}
        found["text"] = "right answers" if words is None and questions else str(text or "the project's")
        typer.echo(json.dumps({**found, "formats": [result.to_dict() for result in results]}))
        return
    console = Console()
    console.print(_divergences(results))
    if results[0].divergence.depths:
        console.print(_depths(results))
    if questions:
        console.print(_skills(results))


def read_text(path: Path) -> str:
    """A text file's text, read before a model is loaded."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise typer.BadParameter(f"'{path}' can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"'{path}' is no text in UTF-8.") from None


def _divergences(results: list[Result]) -> Table:
    from rich.table import Table

    from qwen35mm.evaluation.compare import ALL

    table = Table(title=f"{results[0].divergence.num_tokens:,} tokens, against {results[0].weights}; KL in nats")
    for name in ("weights", "KV", "MiB", "KL mean", "KL 99%", "KL max", "same first, %", "perplexity"):
        table.add_column(name, justify="left" if name in ("weights", "KV") else "right")
    for result in results:
        found = result.divergence
        kl = (f"{number:.5f}" for number in (found.kl_mean, found.kl_p99, found.kl_max))
        first = f"{found.top1_percent:.2f}"
        kv = result.kv_dtype if result.kv_keep == ALL else result.kv_keep
        size, perplexity = f"{result.num_bytes / 2**20:,.1f}", f"{found.perplexity:.4f}"
        weights = result.weights if result.lora is None else f"{result.weights} + {result.lora}"
        table.add_row(weights, kv, size, *kl, first, perplexity)
    return table


def _depths(results: list[Result]) -> Table:
    from rich.table import Table

    table = Table(title="KL mean, and same first in %, by the tokens before")
    table.add_column("")
    for depth in results[0].divergence.depths:
        table.add_column(f"{depth.start:,} to {depth.stop:,}", justify="right")
    for result in results[1:]:
        depths = result.divergence.depths
        table.add_row(_name(result), *(f"{depth.kl_mean:.5f}  {depth.top1_percent:.2f}" for depth in depths))
    return table


def _skills(results: list[Result]) -> Table:
    from rich.table import Table

    total = results[0].accuracy
    assert total is not None
    each = next(iter(results[0].skills.values())).num_questions
    title = f"Right answers, %, and points more than {results[0].weights} has, with their standard error"
    table = Table(title=f"{title}: {each} questions a skill, {total.num_questions:,} in all")
    table.add_column("skill")
    for result in results:
        table.add_column(_name(result), justify="right")
    for skill in (*results[0].skills, "all"):
        table.add_row(skill, *(_accuracy(result, skill, result is results[0]) for result in results))
    return table


def _name(result: Result) -> str:
    from qwen35mm.evaluation.compare import result_name

    return result_name(result.weights, result.kv_dtype, result.kv_keep, result.lora)


def _accuracy(result: Result, skill: str, is_reference: bool) -> str:
    found = result.accuracy if skill == "all" else result.skills[skill]
    assert found is not None
    if is_reference:
        return f"{found.percent:.1f} ± {found.error:.1f}"
    return f"{found.percent:.1f} ({found.change:+.1f} ± {found.change_error:.1f})"
