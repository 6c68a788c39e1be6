"""`qwen35mm caption`: folders and datasets of images and videos in, captions out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.amounts import amount
from qwen35mm.cli.caption_jobs import is_job_file, read_jobs
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.cli.early_digest import begin_digest
from qwen35mm.cli.folders import cache_folder
from qwen35mm.cli.loading import shown_loading
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import CaptioningError, ConfigError
from qwen35mm.option_values import with_options
from qwen35mm.settings import DEMO_NOTE, ModelOptions

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner
    from qwen35mm.captioning.estimate import Estimate
    from qwen35mm.captioning.job import Job, Outcome
    from qwen35mm.captioning.ray_cluster import RayCaptioner
    from qwen35mm.captioning.run import Run

# Broken media that are named.
_NAMED = 3
# Exit codes after which the next job begins.
_PASSING = (0, 3, 4)


@with_options
def caption(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(help="Files, folders, @LISTS of files, datasets, parquet files, tars; or JOBS.toml."),
    ],
    model: ModelOptions,
    options: CaptionOptions,
    sampling: SamplingChoices,
) -> None:
    """Caption images and videos. After an interruption, the same command resumes."""
    if options.backend and options.ray is not None:
        raise typer.BadParameter("--backend and --ray both say where the model runs: give one of them.")
    local = not options.backend and options.ray is None
    if options.take_back and options.dry_run:
        raise typer.BadParameter("--take-back moves files and --dry-run changes nothing: give one of them.")
    if options.take_back and options.preview is not None:
        raise typer.BadParameter("--take-back moves files and --preview captions a few: give one of them.")
    if options.preview is None and not options.open:
        raise typer.BadParameter("--no-open is for --preview: give --preview N, or leave it out.")
    if local and not options.dry_run and not options.take_back:
        begin_digest(model.source, cache_folder(model))
    with quick_imports() if local else contextlib.nullcontext():
        if is_job_file(sources):
            if options.preview is not None:
                raise CaptioningError("--preview takes sources and prompts, not a file of jobs: name those of one job.")
            jobs = read_jobs(Path(sources[0]), model, options, sampling)
        else:
            jobs = [("", options.job(sources, model, sampling))]
    if options.take_back:
        raise typer.Exit(_take_back([job for _, job in jobs]))
    # Progress also goes to a log.
    logging.getLogger("qwen35mm.captioning.progress").setLevel(logging.INFO)
    if options.preview is not None:
        from qwen35mm.cli.caption_preview import AdapterChoices, columns_of, preview_captions

        ((_, job),) = jobs
        # On a cluster adapters are a part of the model.
        adapters = AdapterChoices.of(model) if options.ray is None else AdapterChoices(model)
        opening = partial(_opened, job, adapters.model, options)
        columns, together = columns_of(context, options, adapters)
        raise typer.Exit(preview_captions(job, options, adapters, columns, together, opening))
    raise typer.Exit(asyncio.run(_caption(jobs, model, options)))


@contextlib.asynccontextmanager
async def _opened(job: Job, model: ModelOptions, options: CaptionOptions) -> AsyncIterator[Captioner | RayCaptioner]:
    """The model for a run, wherever the options say that it is."""
    async with contextlib.AsyncExitStack() as stack:
        if options.ray is None:
            captioner = await stack.enter_async_context(open_captioner(job, model, options, for_many=True))
        else:
            cluster = await stack.enter_async_context(_open_cluster(options.ray, job, model, options.ray_actors))
            captioner = cluster.on_any_device(_asked(model))
        if captioner.is_demo:
            typer.echo(f"{DEMO_NOTE} It understands --preset plain.", err=True)
        yield captioner


async def _caption(jobs: list[tuple[str, Job]], model: ModelOptions, options: CaptionOptions) -> int:
    codes: list[int] = []
    async with _opened(jobs[0][1], model, options) as captioner:
        for name, job in jobs:
            if name:
                typer.echo(f"{name}: {', '.join(job.sources)}", err=True)
            codes.append(await _carry_out(replace(job, begins_listings=not codes), captioner, options))
            if codes[-1] not in _PASSING:
                break
    # Of several jobs, one that left something to do decides.
    return codes[-1] if codes[-1] not in _PASSING or len(set(codes)) == 1 else 3


async def _carry_out(job: Job, captioner: Captioner | RayCaptioner, options: CaptionOptions) -> int:
    from rich.console import Console

    from qwen35mm.captioning.job import carry_out, look_over
    from qwen35mm.captioning.progress import shown

    if captioner.num_at_once is not None:
        job = replace(job, run=replace(job.run, slots=captioner.num_at_once))
    if options.dry_run:
        typer.echo(_describe_estimate(await look_over(job, captioner)))
        return 0
    async with contextlib.AsyncExitStack() as stack:

        async def begin(run: Run) -> None:
            stack.enter_context(_stopped_by_signals(run))
            await stack.enter_async_context(shown(run.counts, Console(stderr=True)))

        outcome = await carry_out(job, captioner, begin)
    _report(outcome, job)
    return outcome.exit_code


@contextlib.asynccontextmanager
async def open_captioner(
    job: Job, model: ModelOptions, options: CaptionOptions, *, for_many: bool = False
) -> AsyncIterator[Captioner]:
    """A captioner with servers (`--model` is then their name for the model) or a model in this process.

    Args:
        for_many: whether the engine is for a run, in which captions always wait; not for a person's questions.
    """
    from qwen35mm.captioning.captioner import Captioner

    if not options.backend:
        load = partial(model.load, prompts_first=for_many, more_slots=for_many, named=options.preview is not None)
        # In a thread, so that the review page stays responsive.
        with shown_loading() as progress:
            loaded = await asyncio.to_thread(load, progress=progress)
        with contextlib.closing(loaded) as backend:
            # Neither a dry run nor a preview writes into the sources.
            folder = cache_folder(model) or (None if options.preview is not None else job.state_folder)
            memo = None if options.dry_run or folder is None else folder / "weights"
            yield (await asyncio.to_thread(Captioner.local, backend, memo)).on_any_device(_asked(model))
        return
    if model.lora:
        raise ConfigError("--lora changes a model on this machine; the server of --backend has its own adapters.")
    from qwen35mm.backends.remote.backend import RemoteBackend
    from qwen35mm.backends.remote.pool import MAX_ATTEMPTS, RemotePool
    from qwen35mm.contract import GenerationRequest, SamplingParams

    connecting = partial(
        RemoteBackend,
        model=model.model,
        api_key=options.backend_key,
        limits=model.limits,
        max_concurrent=job.run.slots,
        video=options.remote_video,
        # Only a complete caption is useful, so a caption that breaks off is requested again.
        whole=True,
    )
    if len(options.backend) == 1:
        servers = [connecting(options.backend[0])]
        server = servers[0]
    else:
        servers = [connecting(url, max_attempts=MAX_ATTEMPTS) for url in options.backend]
        server = RemotePool(servers, job.run.slots)
    async with contextlib.aclosing(server):
        await server.connect()
        # Otherwise the server would refuse each medium by itself.
        params = SamplingParams(thinking_budget=options.thinking_budget)
        server.check(GenerationRequest(params=params, enable_thinking=options.think))
        captioner = Captioner(
            backend=server,
            name=server.name,
            identity={"server": server.name, "video": options.remote_video},
            params=server.info.generation,
            processor=server.media,
            form=options.remote_video,
            num_at_once=None if isinstance(server, RemoteBackend) else server.most_at_once,
            engines=() if isinstance(server, RemoteBackend) else server.members,
        )
        # Earlier versions included the server's address in a caption's key.
        identities = [{**captioner.identity, "server": f"{each.base_url} {server.name}"} for each in servers]
        yield replace(captioner, others=[replace(captioner, identity=each).describe() for each in identities])


def _asked(model: ModelOptions) -> set[str]:
    """Options that were given on the command line and that the device would choose differently."""
    asked = {name for name in ("max_image_tokens", "max_video_tokens") if getattr(model, name) is not None}
    return asked | {name for name in ("dtype", "weights") if getattr(model, name) != "auto"}


def _open_cluster(
    address: str, job: Job, model: ModelOptions, num_engines: int | None
) -> contextlib.AbstractAsyncContextManager[RayCaptioner]:
    from qwen35mm.captioning.ray_cluster import open_cluster

    there = model.for_another_folder()
    return open_cluster(
        address,
        partial(there.load, prompts_first=True),
        num_engines=num_engines,
        slots=job.run.slots,
        num_workers=job.num_workers,
        cache=partial(cache_folder, there),
    )


def _take_back(jobs: list[Job]) -> int:
    from qwen35mm.captioning.job import take_back
    from qwen35mm.captioning.records import printable

    # Jobs of one file share a journal.
    done = [take_back(job) for job in {job.aside_path: job for job in jobs}.values()]
    num, num_texts = sum(each.num for each in done), sum(each.num_texts for each in done)
    typer.echo(f"Back in their folders: {_media(num)}{_texts(num_texts)}.", err=True)
    kept = [each for one in done for each in one.kept]
    if kept:
        path, reason = kept[0]
        number, end = amount(len(kept), "file"), "" if reason.endswith("?") else "."
        typer.echo(f"Still set aside: {number}, such as {printable(str(path))}: {reason}{end}", err=True)
    return 3 if kept else 0


def _media(number: int) -> str:
    return "1 medium" if number == 1 else f"{number:,} media"


def _texts(number: int) -> str:
    return f" with {amount(number, 'text file')}" if number else ""


@contextlib.contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM let work in progress finish; a second one doesn't."""
    loop = asyncio.get_running_loop()

    def stop(*_: object) -> None:
        if run.stopped in (None, "limit"):
            typer.echo("\nFinishing the work in progress. Press again to stop at once.", err=True)
        loop.call_soon_threadsafe(run.stop, "interrupted")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(outcome: Outcome, job: Job) -> None:
    from qwen35mm.captioning.manifest.listings import by_count
    from qwen35mm.captioning.progress import clock, describe, describe_engines

    counts = outcome.counts
    parts = [describe(counts), f"in {clock(counts.elapsed_s)}"]
    if counts.num_recalled or counts.num_shared:
        parts.append(f"{counts.num_recalled:,} written again from the manifest, {counts.num_shared:,} shared")
    if counts.num_judged:
        parts.append(f"{counts.num_judged:,} captioned before and judged now")
    if counts.slots_s:
        parts.append(f"slots waited {counts.slots_idle_s / counts.slots_s:.1%} of their time for media")
    typer.echo("; ".join(parts) + ".", err=True)
    if not (counts.num_found or outcome.num_failures):
        typer.echo(
            "Nothing to caption: the sources have no image and no video that passes --include, --exclude and --shard. "
            "Tars and zips beside media aren't opened: name them.",
            err=True,
        )
    elif counts.num_kept and not counts.num_done:
        typer.echo(
            f"Nothing to do for {counts.num_kept:,}: somebody's own captions stay. --mode overwrite replaces them; "
            "--output sidecar:.caption writes beside them.",
            err=True,
        )
    if counts.num_filtered:
        options = " and ".join(
            name for name, given in (("--where", job.where), ("--skip-similar", job.run.skips_similar)) if given
        )
        typer.echo(f"{counts.num_filtered:,} left out by {options}; see {job.skipped_path}.", err=True)
    if outcome.num_failures:
        typer.echo(
            f"{outcome.num_failures:,} failed ({by_count(outcome.failed)}); see {job.failures_path}. --retry-failed "
            "tries them again.",
            err=True,
        )
    _report_broken(outcome, job)
    for name, number in counts.defaulted.most_common():
        typer.echo(f"{{{name}}} was missing for {amount(number, 'caption')}: its default stands there.", err=True)
    if outcome.num_backups:
        typer.echo(
            f"{amount(outcome.num_backups, 'file')} that somebody wrote or changed went to {outcome.backups}; "
            "the captions took their places.",
            err=True,
        )
    for line in describe_engines(counts.engines):
        typer.echo(line, err=True)
    if outcome.num_pruned:
        typer.echo(
            f"Removed the captions of {outcome.num_pruned:,} moved or deleted media from the outputs.",
            err=True,
        )
    if outcome.num_old:
        typer.echo(
            f"Still in the outputs: {amount(outcome.num_old, 'caption')} of another --split, or of whole videos that "
            "are in parts now; --prune removes them.",
            err=True,
        )
    if outcome.num_gone:
        why = (
            "somebody has changed them, or they belong to other sources"
            if outcome.num_pruned or (job.run.prune and counts.num_found)
            else "--prune removes them from sources that still have media"
        )
        typer.echo(
            f"{amount(outcome.num_gone, 'caption')} of moved or deleted media stay in the outputs: {why}.",
            err=True,
        )
    if outcome.flagged:
        typer.echo(f"Captions with flags: {by_count(outcome.flagged)}; see {job.problems_path}.", err=True)
    if outcome.stopped == "interrupted":
        typer.echo("Stopped. The same command resumes.", err=True)
    elif isinstance(outcome.stopped, Exception):
        typer.echo(f"Stopped: {outcome.stopped} The same command resumes.", err=True)


def _report_broken(outcome: Outcome, job: Job) -> None:
    from qwen35mm.captioning.aside import CHANGED
    from qwen35mm.captioning.records import printable

    done = outcome.set_aside
    if done is not None and done.moved:
        typer.echo(
            f"Set aside in {printable(str(job.aside))}: {_media(len(done.moved))} that can't be read"
            f"{_texts(done.num_texts)}; {printable(str(job.aside_path))} says why. The same command with --take-back "
            "undoes that.",
            err=True,
        )
    if done is not None and done.refused:
        broken, reason = done.refused[0]
        typer.echo(
            f"Can't be set aside: {_media(len(done.refused))}, such as {printable(broken.name)}: {reason}. "
            + (
                "The next run reads it again."
                if reason == CHANGED
                else "Make its folder writable, or move it yourself."
            ),
            err=True,
        )
    elif outcome.broken:
        named = ", ".join(printable(each.name) for each in outcome.broken[:_NAMED])
        more = f" and {len(outcome.broken) - _NAMED:,} more" if len(outcome.broken) > _NAMED else ""
        what = "--set-aside FOLDER moves them out of the folder, with their text files."
        if job.aside is not None:
            what = (
                "They stay, since the run was stopped."
                if outcome.stopped not in (None, "limit")
                else "They stay, since no medium could be read: check the disk first."
            )
        typer.echo(
            f"{len(outcome.broken):,} of them can't be read: {named}{more}. Trainers find media by their names, and "
            f"some stop at such a file, as musubi does when it caches latents. {what}",
            err=True,
        )


def _describe_estimate(found: Estimate) -> str:
    from qwen35mm.captioning.progress import clock
    from qwen35mm.captioning.records import one_line

    lines = [f"To caption: {found.num_to_caption:,}, at most {found.num_media_tokens:,} tokens of images and videos"]
    lines += [
        f"{label}: {number:,}"
        for label, number in (
            ("Captioned before", found.num_known),
            ("Of these to judge", found.num_to_judge),
            ("Kept, with somebody's own text", found.num_kept),
            ("Failed before", found.num_failed_before),
            ("Can't be read", found.num_unreadable),
            ("Left out by --where, without those that need decoding", found.num_filtered),
        )
        if number
    ]
    lines += [f"  {one_line(name)}: {one_line(text)}" for name, text in found.examples]
    if found.remaining_s is not None:
        lines.append(
            f"Time: {clock(found.remaining_s)} one after the other, {found.tokens_per_item:,.0f} tokens a caption, "
            f"estimated from {found.num_tried}. Several slots take less."
        )
    return "\n".join(lines)
