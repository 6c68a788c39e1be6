"""`qwen35mm captions`: changes and counts captions that are there already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35mm.cli.amounts import amount
from qwen35mm.cli.caption import open_captioner
from qwen35mm.cli.caption_options import DEFAULT_SLOTS, CaptionOptions
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.errors import CaptioningError
from qwen35mm.option_values import with_options
from qwen35mm.settings import ModelOptions

if TYPE_CHECKING:
    from rich.text import Text

    from qwen35mm.captioning.texts.trainers import Trainer
    from qwen35mm.review.collection import Changed, Collection, Plan, Planned
    from qwen35mm.review.edits import Edit
    from qwen35mm.review.journal import Run
    from qwen35mm.review.statistics import Statistics

captions = typer.Typer(
    name="captions",
    help="Change many captions at once, or count what is in them. Nothing is written without --write.",
    no_args_is_help=True,
)

_which = functools.partial(typer.Option, rich_help_panel="Captions")
# Some captions couldn't be changed.
_PARTLY = 3
# Translations that are written together.
_TOGETHER = 16
_NAMED = 3
_BAR_CHARS = 40
# Actions of one command line over several sources are one run.
Sources = Annotated[
    list[Path], typer.Argument(help="Folders of images and videos with text files, or JSONL files that caption wrote.")
]
Many = list[str] | None


@dataclass(frozen=True)
class Which:
    """Where the captions are, and which of them are meant."""

    output: Annotated[
        str, _which(help="Where the captions are: sidecar, sidecar:.EXT, jsonl:FILE or dataset:FOLDER.")
    ] = "sidecar"
    output_dir: Annotated[Path | None, _which(help="Folder of the text files; by default beside their media.")] = None
    state_dir: Annotated[
        Path | None,
        _which(help="Folder of the manifest; by default .qwen35mm in --output-dir, in the folder or near the file."),
    ] = None
    search: Annotated[
        str, _which(help="Only captions with these words in them or the name; -WORD: lacking it.", metavar="WORDS")
    ] = ""
    flag: Annotated[str, _which(help="Only captions with this flag, such as edited or truncated.")] = ""
    accepted: Annotated[
        bool | None, _which("--accepted/--not-accepted", help="Only captions that a person accepted, or didn't.")
    ] = None

    @contextlib.contextmanager
    def opened(self, sources: Sequence[Path]) -> Iterator[list[Collection[Any]]]:
        """The captions; text files aren't locked yet."""
        from qwen35mm.review.opening import open_captions

        found = open_captions(sources, self.output, texts=self.output_dir, state=self.state_dir, for_page=False)
        with contextlib.ExitStack() as stack:
            for each in found:
                stack.enter_context(contextlib.closing(each))
            yield found

    def numbers(self, collection: Collection[Any]) -> list[int]:
        """The numbers of the captions that are meant."""
        from qwen35mm.review.collection import Search

        numbers = collection.look()
        if not self.search and not self.flag and self.accepted is None:
            return numbers
        show = "all" if self.accepted is None else "accepted" if self.accepted else "open"
        return collection.find(Search(self.search, show, self.flag))["numbers"]


@dataclass(frozen=True)
class Writing:
    """Whether changes are written, and how many are shown."""

    write: Annotated[bool, typer.Option("--write", help="Write the changes; a terminal asks otherwise.")] = False
    show: Annotated[int, typer.Option(help="Most changes to show.", min=0)] = 10


@captions.command("replace")
@with_options
def replace_text(
    sources: Sources,
    find: Annotated[str, typer.Option(help="The text to find.")],
    by: Annotated[str, typer.Option("--with", help="The text in its place; empty removes it.")],
    which: Which,
    writing: Writing,
    regex: Annotated[
        bool, typer.Option("--regex", help="--find is a regular expression of Python; \\1 in --with is a group.")
    ] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", help="A and a are the same.")] = False,
    words: Annotated[bool, typer.Option("--words", help="Only whole words.")] = False,
) -> None:
    """Find and replace a text."""
    from qwen35mm.review.edits import replacing_text

    edit = replacing_text(find, by, regex=regex, ignore_case=ignore_case, words=words)
    _carry_out(sources, which, writing, lambda _: edit)


@captions.command("add")
@with_options
def add_tags(
    sources: Sources,
    tags: Annotated[str, typer.Option(help="Tags with commas between them.")],
    which: Which,
    writing: Writing,
    last: Annotated[bool, typer.Option("--last", help="Add them at the end, not in front.")] = False,
    each_line: Annotated[bool, typer.Option("--each-line", help="Each line is a caption of its own.")] = False,
) -> None:
    """Add tags to captions that lack them."""
    from qwen35mm.review.edits import adding_tags

    edit = adding_tags([tags], last=last, each_line=each_line)
    _carry_out(sources, which, writing, lambda _: edit)


@captions.command("remove")
@with_options
def remove_tags(
    sources: Sources,
    tags: Annotated[str, typer.Option(help="Tags with commas between them.")],
    which: Which,
    writing: Writing,
) -> None:
    """Remove tags."""
    from qwen35mm.review.edits import removing_tags

    edit = removing_tags([tags])
    _carry_out(sources, which, writing, lambda _: edit)


@captions.command("sort")
@with_options
def sort_tags(
    sources: Sources,
    which: Which,
    writing: Writing,
    keep: Annotated[int, typer.Option(help="Tags in front that stay there, as the trainer's keep_tokens.", min=0)] = 0,
    by_count: Annotated[bool, typer.Option("--by-count", help="The most frequent tag first; by default by name.")] = (
        False
    ),
) -> None:
    """Sort tags. Captions with sentences stay."""
    from qwen35mm.review.edits import count_tags, sorting

    _carry_out(sources, which, writing, lambda texts: sorting(keep, count_tags(texts()) if by_count else None))


@captions.command()
@with_options
def deduplicate(sources: Sources, which: Which, writing: Writing) -> None:
    """Remove tags that a caption has twice. Captions with sentences stay."""
    from qwen35mm.review.edits import deduplicating

    edit = deduplicating()
    _carry_out(sources, which, writing, lambda _: edit)


@captions.command()
@with_options
def translate(
    sources: Sources,
    to: Annotated[str, typer.Option(help="The language, such as English.")],
    model: ModelOptions,
    which: Which,
    writing: Writing,
    keep: Annotated[Many, typer.Option(help="A word that stays as it is, such as a trigger; may be repeated.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a translation.", min=1)] = 512,
    backend: Annotated[
        Many,
        typer.Option(help="Address of an OpenAI-compatible server that translates; may be repeated.", metavar="URL"),
    ] = None,
    backend_key: Annotated[
        str | None, typer.Option(help="The server's key.", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
) -> None:
    """Translate captions with the model. Without --write it translates only what it shows.

    An interrupted translation is continued by the same command.
    """
    options = CaptionOptions(
        max_tokens=max_tokens,
        backend=backend,
        backend_key=backend_key,
        state_dir=which.state_dir,
    )
    with which.opened(sources) as collections:
        raise typer.Exit(asyncio.run(_translate(collections, sources, to, keep or [], model, which, writing, options)))


@captions.command()
@with_options
def stats(
    sources: Sources,
    which: Which,
    trainer: Annotated[
        str | None,
        typer.Option("--for", help="Count tokens as this trainer does; by default words.", metavar="TRAINER"),
    ] = None,
    lacking: Annotated[
        Many, typer.Option(help="Name the captions without this word, or re:PATTERN; may be repeated.", metavar="WORD")
    ] = None,
    top: Annotated[int, typer.Option(help="How many tags or words to list.", min=0)] = 20,
    svg: Annotated[Path | None, typer.Option(help="Draw the lengths into this SVG file.", metavar="FILE")] = None,
) -> None:
    """Count captions, tags and words, and show how long captions are."""
    from qwen35mm.captioning.texts.trainers import Length, trainer_named
    from qwen35mm.review.statistics import drawing, measure, num_words

    chosen = None if trainer is None else trainer_named(trainer)
    length = None if chosen is None else Length.of(chosen)
    with which.opened(sources) as collections:
        texts = [each for one in collections for each in one.texts(which.numbers(one))]
        found = measure(texts, num_words if length is None else length.count, lacking or [])
    bars = found.bars(None if chosen is None else chosen.max_tokens)
    unit = "words" if length is None else f"{'' if length.encoder else 'estimated '}tokens for {trainer}"
    _show_statistics(found, unit, chosen, top)
    if svg is not None:
        from qwen35mm.captioning.manifest.files import replacing

        with replacing(svg) as file:
            file.write(drawing(bars, f"{found.num_captions:,} captions by {unit}").encode())


@captions.command()
@with_options
def undo(sources: Sources, which: Which) -> None:
    """Take back the last run of changes. Texts that somebody has changed since stay."""
    with which.opened(sources) as collections:
        runs = [(run, each) for each in collections for run in each.runs()]
        if not runs:
            raise CaptioningError("There is nothing to take back: no run changed these captions.")
        latest = max(run.made for run, _ in runs)
        done: list[str] = []
        kept: list[str] = []
        label = ""
        for run, each in runs:
            if run.made == latest:
                each.begin()
                each.look()
                undone = each.undo_run(run)
                done += undone.places
                kept += undone.kept
                label = run.label
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(latest))
    typer.echo(f"Taken back: {label}, of {when}. {amount(len(done), 'caption')} as before.")
    if kept:
        typer.echo(f"{amount(len(kept), 'caption')} changed since, and left: {_some(kept)}.", err=True)
        raise typer.Exit(_PARTLY)


@dataclass
class _Total:
    """What was done over all sources."""

    num: int = 0
    refused: list[tuple[str, object]] = field(default_factory=list)

    def add(self, changed: Changed) -> None:
        self.num += changed.num
        self.refused += changed.refused


def _carry_out(
    sources: Sequence[Path],
    which: Which,
    writing: Writing,
    edit_for: Callable[[Callable[[], Iterator[str]]], Edit],
) -> None:
    """Shows what an edit changes, and changes it if that is wanted.

    Args:
        edit_for: the edit, from a function that gives all texts.
    """
    with which.opened(sources) as collections:
        numbers = [which.numbers(each) for each in collections]
        chosen = list(zip(collections, numbers, strict=True))
        edit = edit_for(lambda: (text for each, those in chosen for _, text in each.texts(those)))
        plans = [(each, each.plan(those, edit)) for each, those in chosen]
        changes = [change for _, plan in plans for change in plan.changes]
        _show_changes(changes[: writing.show])
        _say_what_would_change([plan for _, plan in plans], writing)
        if not changes or not _is_wanted(writing):
            return
        total, made = _Total(), time.time()
        for each, plan in plans:
            if plan.changes:
                each.begin()
                total.add(each.carry_out(plan, each.start(plan.label, made)))
    raise typer.Exit(_report(total, sources))


async def _translate(
    collections: Sequence[Collection[Any]],
    sources: Sequence[Path],
    language: str,
    kept: Sequence[str],
    model: ModelOptions,
    which: Which,
    writing: Writing,
    options: CaptionOptions,
) -> int:
    from qwen35mm.review.collection import Plan
    from qwen35mm.review.translating import translations

    label = f"translate to {language}"
    to_do: list[tuple[Collection[Any], list[Planned]]] = []
    for each in collections:
        # What an earlier run of this translated is done.
        done = {step.after for run in each.runs() if run.label == label for step in run.steps()}
        found = [caption for caption in each.captions(which.numbers(each)) if caption.digest not in done]
        to_do.append((each, [caption for caption in found if caption.before.strip()]))
    num = sum(len(found) for _, found in to_do)
    if not num:
        typer.echo("There is no caption to translate.", err=True)
        return 0
    with quick_imports() if not options.backend else contextlib.nullcontext():
        job = options.job([str(each) for each in sources], model)
    total, made = _Total(), time.time()
    async with open_captioner(job, model, options) as captioner:
        asked = functools.partial(
            translations,
            language=language,
            captioner=captioner,
            slots=captioner.num_at_once or model.slots or DEFAULT_SLOTS,
            max_tokens=options.max_tokens,
            kept=kept,
        )
        if not writing.write:
            shown = [caption for _, found in to_do for caption in found][: writing.show]
            async for each in asked(shown):
                _show_translation(each.caption, each.problem)
            typer.echo(f"{num:,} captions to translate.", err=True)
            if not _is_wanted(writing):
                return 0
        for collection, found in to_do:
            if not found:
                continue
            collection.begin()
            run, ready = collection.start(label, made), []

            def write(ready: list[Planned], collection: Collection[Any], run: Run) -> None:
                total.add(collection.carry_out(Plan(label, [*ready], len(ready)), run))
                ready.clear()

            try:
                async for each in asked(found):
                    if each.problem is not None:
                        total.refused.append((each.caption.name, each.problem))
                        continue
                    ready.append(each.caption)
                    if len(ready) >= _TOGETHER:
                        write(ready, collection, run)
            finally:
                write(ready, collection, run)
    return _report(total, sources)


def _is_wanted(writing: Writing) -> bool:
    if writing.write:
        return True
    if sys.stdin.isatty() and sys.stderr.isatty():
        return typer.confirm("Write the changes?", err=True)
    typer.echo("Nothing was written: add --write.", err=True)
    return False


def _report(total: _Total, sources: Sequence[Path]) -> int:
    where = " ".join(str(each) for each in sources)
    typer.echo(f"{amount(total.num, 'caption')} changed. To take it back: qwen35mm captions undo {where}", err=True)
    if total.refused:
        name, why = total.refused[0]
        typer.echo(f"{amount(len(total.refused), 'caption')} not changed, such as {name}: {why}", err=True)
    return _PARTLY if total.refused else 0


def _say_what_would_change(plans: Sequence[Plan], writing: Writing) -> None:
    changes = [change for plan in plans for change in plan.changes]
    num_captions, num_others = sum(plan.num_captions for plan in plans), sum(plan.num_others for plan in plans)
    parts = [f"{len(changes):,} of {amount(num_captions, 'caption')} {'change' if len(changes) != 1 else 'changes'}"]
    if len(changes) > writing.show:
        parts.append(f"the first {writing.show:,} shown")
    if num_empty := sum(not change.after.strip() for change in changes):
        parts.append(f"{num_empty:,} become empty")
    if num_others:
        parts.append(f"{num_others:,} are sentences, not tags, and stay")
    typer.echo("; ".join(parts) + ".", err=True)


def _show_changes(changes: Sequence[Planned]) -> None:
    for change in changes:
        _show_translation(change, None)


def _show_translation(change: Planned, problem: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from qwen35mm.captioning.records import printable

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(printable(change.name), "bold"))
    if problem is not None:
        console.print(Text(f"! {problem}", "yellow"))
        return
    before, after = _compared(change.before, change.after)
    console.print(before)
    console.print(after)


def _compared(before: str, after: str) -> tuple[Text, Text]:
    """The two lines of a diff, with the words that differ marked."""
    from rich.text import Text

    from qwen35mm.review.edits import differences

    lines = Text("- ", "red"), Text("+ ", "green")
    for kept, old, new in differences(before, after):
        for line, changed, style in zip(lines, (old, new), ("bold red reverse", "bold green reverse"), strict=True):
            line.append(kept.replace("\n", "\n  "), "default")
            line.append(changed.replace("\n", "\n  "), style)
    return lines


def _show_statistics(found: Statistics, unit: str, trainer: Trainer | None, top: int) -> None:
    bars = found.bars(None if trainer is None else trainer.max_tokens)
    typer.echo(
        f"{amount(found.num_captions, 'caption')} of {found.num_media:,} images and videos, "
        f"{amount(found.num_tags, 'list')} of tags."
    )
    if not found.num_captions:
        return
    typer.echo(
        f"\nLength in {unit}: {min(found.lengths):,} to {max(found.lengths):,}, median {found.median:g}"
        + ("" if trainer is None else f"; the trainer reads {trainer.max_tokens:,}")
    )
    width, most = max(len(bar.label) for bar in bars), max(bar.num for bar in bars)
    for bar in bars:
        # A bar that isn't empty is seen.
        drawn = "█" * max(round(bar.num / most * _BAR_CHARS), min(bar.num, 1))
        typer.echo(f"  {bar.label:>{width}}  {drawn} {bar.num:,}{'  too long' if bar.over and bar.num else ''}")
    what = "tags" if found.is_about_tags else "words"
    share = {name: f"{num:,} ({num / found.num_counted:.0%})" for name, num in found.counts.items()}
    if listed := found.counts.most_common(top):
        typer.echo(f"\nMost frequent of {len(found.counts):,} {what}")
        width = max(len(name) for name, _ in listed)
        for name, _ in listed:
            typer.echo(f"  {name:<{width}}  {share[name]}")
    for title, names in (
        (f"{what.capitalize()} in over 95%", found.over(0.95)),
        (f"{what.capitalize()} in under 1%", found.under(0.01)),
    ):
        if names:
            more = f" and {len(names) - top:,} more" if len(names) > top else ""
            typer.echo(f"\n{title}: {', '.join(names[:top])}{more}")
    for word, names in found.lacking.items():
        typer.echo(f"\nWithout {word!r}: {len(names):,} of {found.num_captions:,}")
        for name in names[:top]:
            typer.echo(f"  {name}")
        if len(names) > top:
            typer.echo(f"  and {len(names) - top:,} more")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")
