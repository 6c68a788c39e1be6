"""`qwen35mm caption`: folders and datasets of images and videos in, captions out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.caption_options import (
    CaptionOptions,
    OutputOptions,
    PromptOptions,
    RayOptions,
    RemoteOptions,
    RunOptions,
    SourceOptions,
)
from qwen35mm.settings import DEMO_NOTE, ModelOptions, with_options

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner
    from qwen35mm.captioning.estimate import Estimate
    from qwen35mm.captioning.job import Job, Outcome
    from qwen35mm.captioning.run import Run


@with_options
def caption(
    sources: Annotated[
        list[str], typer.Argument(help="Files, folders, @LISTS of files, datasets, parquet files and tars.")
    ],
    model: ModelOptions,
    source: SourceOptions,
    prompt: PromptOptions,
    style: CaptionOptions,
    output: OutputOptions,
    how: RunOptions,
    remote: RemoteOptions,
    cluster: RayOptions,
) -> None:
    """Caption images and videos. What is interrupted goes on where it was, with the same command."""
    from qwen35mm.captioning.job import Job, default_workers

    if remote.backend is not None and cluster.ray is not None:
        raise typer.BadParameter("--backend and --ray are two places for one model: give one of them.")
    # Made before a model is loaded: what a person got wrong is said at once, except about outputs that are there.
    wanted = style.style()
    if remote.backend is not None:
        remote.check(style)
    if wanted.schema is not None and remote.backend is None:
        from qwen35mm.engine import check_json_schema

        check_json_schema(wanted.schema.text)
    job = Job(
        sources,
        prompt.prompts(style.seed),
        {
            "max_tokens": style.max_tokens,
            "temperature": style.temperature,
            "seed": style.seed,
            "thinking_budget": style.thinking_budget,
        },
        wanted,
        thinking=style.think,
        scan=source.scan(),
        outputs=output.specs(),
        mode=output.mode,
        folder=output.output_dir,
        state=how.state_dir,
        separator=output.separator,
        embed_media=output.embed_media,
        records_per_shard=output.records_per_shard,
        compact=output.compact,
        num_workers=how.media_workers or default_workers(),
        run=how.settings(model.slots),
    )
    job.check()
    # A run in a log is watched, too.
    logging.getLogger("qwen35mm.captioning.progress").setLevel(logging.INFO)
    raise typer.Exit(asyncio.run(_caption(job, model, remote, cluster, dry_run=how.dry_run)))


async def _caption(
    job: Job, options: ModelOptions, remote: RemoteOptions, cluster: RayOptions, *, dry_run: bool
) -> int:
    from rich.console import Console

    from qwen35mm.captioning.job import carry_out, look_over
    from qwen35mm.captioning.progress import shown

    async with contextlib.AsyncExitStack() as stack:
        memo = None if dry_run else job.state_folder / "weights.json"
        if cluster.ray is not None:
            captioner = await stack.enter_async_context(cluster.open(options, job.num_workers))
            job = replace(job, run=replace(job.run, slots=captioner.num_at_once, ahead=captioner.num_at_once))
        else:
            captioner = await stack.enter_async_context(_open_captioner(options, remote, memo))
        if captioner.is_demo:
            typer.echo(f"{DEMO_NOTE} It understands --preset plain.", err=True)
        if dry_run:
            typer.echo(_describe_estimate(await look_over(job, captioner)))
            return 0

        async def begin(run: Run) -> None:
            stack.enter_context(_stopped_by_signals(run))
            await stack.enter_async_context(shown(run.counts, Console(stderr=True)))

        outcome = await carry_out(job, captioner, begin)
    _report(outcome, job)
    return outcome.exit_code


@contextlib.asynccontextmanager
async def _open_captioner(options: ModelOptions, remote: RemoteOptions, memo: Path | None) -> AsyncIterator[Captioner]:
    from qwen35mm.captioning.captioner import Captioner

    if remote.backend is not None:
        async with contextlib.aclosing(remote.open(options)) as server:
            await server.connect()
            yield Captioner(
                backend=server,
                name=server.name,
                identity={"server": server.fingerprint, "video": remote.remote_video},
                params=remote.params(),
                processor=server.media,
                form=remote.remote_video,
            )
        return
    with contextlib.closing(options.load()) as backend:
        yield Captioner.local(backend, memo)


@contextlib.contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM let what is at work end; a second one doesn't."""
    loop = asyncio.get_running_loop()

    def stop(*_: object) -> None:
        if run.stopped in (None, "limit"):
            typer.echo("\nFinishing what is at work; once more to leave that, too.", err=True)
        loop.call_soon_threadsafe(run.stop, "interrupted")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(outcome: Outcome, job: Job) -> None:
    from qwen35mm.captioning.progress import clock, describe

    counts = outcome.counts
    parts = [describe(counts), f"in {clock(counts.elapsed_s)}"]
    if counts.num_recalled or counts.num_shared:
        parts.append(f"{counts.num_recalled:,} written again from the manifest, {counts.num_shared:,} shared")
    if counts.slots_s:
        parts.append(f"slots waited {counts.slots_idle_s / counts.slots_s:.1%} of their time for media")
    typer.echo("; ".join(parts) + ".", err=True)
    if outcome.num_failures:
        typer.echo(
            f"{outcome.num_failures:,} failed; see {job.failures_path}. --retry-failed tries them again.", err=True
        )
    if outcome.stopped == "interrupted":
        typer.echo("Stopped. The same command goes on where this ended.", err=True)
    elif isinstance(outcome.stopped, Exception):
        typer.echo(f"Stopped: {outcome.stopped} The same command goes on where this ended.", err=True)


def _describe_estimate(found: Estimate) -> str:
    from qwen35mm.captioning.progress import clock
    from qwen35mm.captioning.records import one_line

    lines = [f"To caption: {found.num_to_caption:,}, at most {found.num_media_tokens:,} tokens of images and videos"]
    lines += [
        f"{label}: {number:,}"
        for label, number in (
            ("Captioned before", found.num_known),
            ("Kept as they are, with somebody's own text", found.num_kept),
            ("Failed before", found.num_failed_before),
            ("Can't be read", found.num_unreadable),
        )
        if number
    ]
    lines += [f"  {one_line(name)}: {one_line(text)}" for name, text in found.examples]
    if found.remaining_s is not None:
        lines.append(
            f"Time: {clock(found.remaining_s)} one after the other, {found.tokens_per_item:,.0f} tokens a caption; "
            f"from {found.num_tried} that were tried. Several slots take less."
        )
    return "\n".join(lines)
