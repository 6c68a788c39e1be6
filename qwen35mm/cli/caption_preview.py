"""`qwen35mm caption --preview`: a few random media with every prompt, on a page or in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

import typer

from qwen35mm.checkpoints.lora_choices import read_choices
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.errors import CaptioningError, ConfigError, MissingExtraError

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner
    from qwen35mm.captioning.job import Job
    from qwen35mm.captioning.preview import Preview
    from qwen35mm.http.run import ServerThread
    from qwen35mm.review.preview import Column, Shown
    from qwen35mm.settings import ModelOptions

Opening = Callable[[], contextlib.AbstractAsyncContextManager["Captioner"]]

# The review page's; a free one if it is in use.
_PORT = 7861
_OF_PREVIEW = frozenset({"preview", "open"})
_PROMPTS = frozenset({"preset", "prompt", "prompt_file"})
_MINUTE_S, _HOUR_S = 60, 3600
_FROM_MINUTES_S, _FROM_HOURS_S = 90, 5400
_WATCH_S = 0.5


@dataclass(frozen=True)
class AdapterChoices:
    """The adapters of a preview, each beside the model alone.

    Attributes:
        model: the options to load the model with, in which each adapter has a name.
        names: of the adapters.
        titles: what a person calls them.
        options: the values of `--lora` that a run with one takes.
    """

    model: ModelOptions
    names: Sequence[str] = ()
    titles: Sequence[str] = ()
    options: Sequence[str] = ()

    @classmethod
    def of(cls, model: ModelOptions) -> AdapterChoices:
        """Of the options of a command. Raises ConfigError."""
        alone = [replace(each, name=None) for each in read_choices(model.lora)]
        names = [f"adapter-{at}" for at in range(1, len(alone) + 1)]
        named = [str(replace(each, name=name)) for each, name in zip(alone, names, strict=True)]
        titles = [each.title for each in read_choices(model.lora)]
        return cls(replace(model, lora=named or None), names, titles, [str(each) for each in alone])


def preview_captions(
    job: Job,
    options: CaptionOptions,
    adapters: AdapterChoices,
    columns: Sequence[Column],
    together: str | None,
    opening: Opening,
) -> int:
    """Captions a few media, and shows them until a person ends it. Returns the exit code.

    Args:
        columns, together: see `columns_of`.
        opening: loads the model, or connects to it.

    Raises:
        CaptioningError: there are fewer media than asked for, or none.
        MissingExtraError: the page needs an extra.
        Qwen35mmError: the model can't be loaded.
    """
    from qwen35mm.captioning.preview import Preview
    from qwen35mm.review.preview import Shown

    assert options.preview is not None
    if options.dry_run:
        raise CaptioningError("--dry-run and --preview both look before a run: give one of them.")
    with contextlib.ExitStack() as stack:
        preview = stack.enter_context(contextlib.closing(Preview(job, options.preview, adapters.names)))
        # Outside the event loop, so that Ctrl-C ends it.
        preview.look()
        shown = Shown(preview, columns, together)
        if options.open:
            stack.callback(_open_page(shown).close)
        return asyncio.run(_run(shown, opening, has_page=options.open))


def columns_of(
    context: typer.Context, options: CaptionOptions, adapters: AdapterChoices
) -> tuple[list[Column], str | None]:
    """Each prompt with the command line of its run alone, then with each adapter; and the command line of all prompts
    in one pass, if a run asks them all."""
    from qwen35mm.review.preview import Column

    shared = _typed(context, without=_OF_PREVIEW | _PROMPTS | {"lora"})
    asked = options.asked()
    found = [Column(each.title, _command(*shared, each.option, each.value)) for each in asked]
    for title, lora in zip(adapters.titles, adapters.options, strict=True):
        found += [
            Column(f"{each.title}, {title}", _command(*shared, "--lora", lora, each.option, each.value))
            for each in asked
        ]
    is_one_pass = len(asked) > 1 and not adapters.names and all(each.question.name for each in asked)
    return found, _command(*_typed(context, without=_OF_PREVIEW)) if is_one_pass else None


def _typed(context: typer.Context, *, without: Container[str]) -> list[str]:
    """The sources and options as they were given on a command line."""
    sources: list[str] = []
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source, value = context.get_parameter_source(name), context.params.get(name)
        if source is None or source.name != "COMMANDLINE" or name in without:
            continue
        if parameter.param_type_name == "argument":
            sources = [f"./{each}" if each.startswith("-") else each for each in value or ()]
        elif isinstance(value, bool):
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            given: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
            words += [word for each in given for word in (parameter.opts[0], str(each))]
    return [*sources, *words]


def _command(*words: str) -> str:
    line = ["qwen35mm", "caption", *words]
    return subprocess.list2cmdline(line) if sys.platform == "win32" else join(line)


def _open_page(shown: Shown) -> ServerThread:
    """Serves the page; prints its address and opens it. Raises MissingExtraError."""
    try:
        from qwen35mm.http.run import ServerThread
        from qwen35mm.http.sessions import PageToken
        from qwen35mm.review.preview_page import create_preview_app
    except ModuleNotFoundError as error:
        raise MissingExtraError("A preview on a page (--no-open shows it in the terminal)", "serve") from error
    import webbrowser

    token = PageToken()
    app = create_preview_app(shown, token=token)
    try:
        page = ServerThread(app, host="127.0.0.1", port=_PORT)
    except ConfigError:
        page = ServerThread(app, host="127.0.0.1", port=0)
    typer.echo(f"qwen35mm shows the preview on {token.address(page.url)} (Ctrl-C ends it)")
    webbrowser.open(token.address_for_once(page.url))
    return page


async def _run(shown: Shown, opening: Opening, *, has_page: bool) -> int:
    preview, ended = shown.preview, asyncio.Event()
    with _ended_by_signals(ended):
        filling, waiting = asyncio.create_task(_fill(preview, opening)), asyncio.create_task(ended.wait())
        watching = asyncio.create_task(_watch(preview))
        await asyncio.wait([filling, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not filling.done():
            filling.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await filling
        preview.stop()
        _print(shown, with_captions=not has_page)
        if has_page and not ended.is_set():
            typer.echo("The page stays until Ctrl-C.", err=True)
            await waiting
        waiting.cancel()
    if preview.state == "stopped":
        return 130
    return 0 if any(row.num_captions for row in preview.rows) else 4


async def _fill(preview: Preview, opening: Opening) -> None:
    async with opening() as captioner:
        await preview.fill(captioner)


@contextlib.contextmanager
def _ended_by_signals(ended: asyncio.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set the event; a second one ends the program."""
    loop = asyncio.get_running_loop()

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, _: object) -> None:
        signal.signal(number, before[number])
        loop.call_soon_threadsafe(ended.set)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _watch(preview: Preview) -> None:
    """Shows on a terminal how far it is."""
    from rich.console import Console

    words = {"looking": "Looking for media that satisfy --where", "loading": "Loading the model"}
    with Console(stderr=True).status("") as status:
        while True:
            over = f"{sum(row.is_over for row in preview.rows)} of {preview.num_asked} captioned"
            status.update(words.get(preview.state, over))
            await asyncio.sleep(_WATCH_S)


def _print(shown: Shown, *, with_captions: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from qwen35mm.captioning.records import one_line

    console, summary = Console(), shown.summary()
    if with_captions:
        table = Table("", *(escape(each["title"]) for each in summary["columns"]), show_lines=True)
        for row in shown.rows():
            name = Text(one_line(row["name"]))
            if row["failed"] is not None:
                table.add_row(name, Text(one_line(row["failed"]), "red"))
            else:
                table.add_row(name, *(_cell(cell, one_line) for cell in row["cells"]))
        console.print(table)
    kinds = [kind for kind in ("image", "video") if kind in summary["num"]]
    counted = " and ".join(_counted(_number(summary["num"][kind]), kind) for kind in kinds)
    tried = " and ".join(_counted(f"{num:,}", kind) for kind, num in summary["tried"].items())
    console.print(Text(f"A run of {counted}" + (f", estimated from {tried}" if tried else "")))
    table = Table("", "Whole run", "Words", *(["Tokens"] if summary["most_tokens"] is not None else []), "Failed")
    for column in summary["columns"]:
        lengths = [_lengths(column["words"])]
        if summary["most_tokens"] is not None:
            over = f", {column['shortened']} too long" if column["shortened"] else ""
            lengths.append(f"{_lengths(column['tokens'])} of {summary['most_tokens']:,}{over}")
        table.add_row(Text(column["title"]), _time(column["cost"]), *lengths, f"{column['failed']}")
    if summary["together"] is not None:
        table.add_row("all in one pass", _time(summary["together"]["cost"]))
    console.print(table)
    notes = [f"{name} isn't counted in the time." for name in summary["not_counted"]]
    notes += [
        f"The time of {kind}s isn't known: none was captioned."
        for kind in kinds
        if kind not in summary["tried"] and summary["num"][kind][1] and summary["state"] == "done"
    ]
    if num := summary["unreadable"]:
        names = ", ".join(one_line(name) for name, _ in summary["named"][:3])
        notes.append(f"{num:,} can't be read, such as {names}.")
    commands = [each["command"] for each in [*summary["columns"], summary["together"]] if each is not None]
    for line in (*notes, "Run one of these:", *(f"  {command}" for command in commands)):
        typer.echo(line)


def _cell(cell: Mapping[str, Any] | None, one_line: Callable[[str], str]) -> Any:
    from rich.text import Text

    if cell is None:
        return Text("")
    if "failed" in cell:
        return Text(one_line(cell["failed"]), "red")
    facts = [f"{cell['seconds']:.1f} s", f"{cell['words']} words", *cell["flags"]]
    return Text(one_line(cell["text"])).append(f"\n{', '.join(facts)}", "dim")


def _time(cost: Mapping[str, Sequence[float]]) -> str:
    if len(cost) == 1:
        return _span(*next(iter(cost.values())))
    total = [sum(each) for each in zip(*cost.values(), strict=True)]
    apart = ", ".join(f"{_span(*each)} for {kind}s" for kind, each in cost.items())
    return f"{_span(*total)} ({apart})" if total else ""


def _span(low_s: float, high_s: float) -> str:
    """A time, such as "40 s", "12 to 20 min" or "1.2 h"."""
    unit_s, unit = 1, "s"
    if high_s >= _FROM_MINUTES_S:
        unit_s, unit = (_HOUR_S, "h") if high_s >= _FROM_HOURS_S else (_MINUTE_S, "min")
    low, high = (_digits(each / unit_s) for each in (low_s, high_s))
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def _digits(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"


def _number(ends: Sequence[float]) -> str:
    low, high = (f"{each:,.0f}" for each in ends)
    return low if low == high else f"{low} to {high}"


def _counted(number: str, kind: str) -> str:
    return f"{number} {kind}{'' if number == '1' else 's'}"


def _lengths(lengths: Sequence[float] | None) -> str:
    if lengths is None:
        return ""
    low, middle, high = (f"{each:g}" for each in lengths)
    return low if low == high else f"{low} to {high}, median {middle}"
