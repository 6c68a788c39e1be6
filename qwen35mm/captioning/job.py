"""A captioning job as a person describes it, and its run from start to end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from qwen35mm.captioning.aside import Aside, Broken, SetAside, TakenBack
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.estimate import Estimate, estimate
from qwen35mm.captioning.filters import Filter
from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.manifest.listings import Listings
from qwen35mm.captioning.manifest.manifest import STATE_FOLDER, Manifest
from qwen35mm.captioning.media.splits import Split
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.outputs import Output, OutputSettings, OutputSpec, open_outputs
from qwen35mm.captioning.parts import Splitter
from qwen35mm.captioning.progress import Counts
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.requests import CaptionSettings, CaptionStyle, RequestBuilder
from qwen35mm.captioning.run import Run, RunSettings
from qwen35mm.captioning.sources.names import absolute, is_one_of
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.captioning.texts.folder_prompts import FolderPrompts
from qwen35mm.captioning.texts.prompts import PromptSet
from qwen35mm.captioning.where import Where
from qwen35mm.contract import SamplingParams
from qwen35mm.cpu import usable_cores
from qwen35mm.errors import CaptioningError, OutputError
from qwen35mm_preprocess import MediaKind

_MAX_WORKERS = 16


@dataclass(frozen=True)
class Job:
    """What to caption, how, and where the captions go.

    Attributes:
        sources: see `scan`.
        sampling: fields of SamplingParams that replace the model's own.
        state: the folder of the manifest and the failures. None: in the folder of the text files, else beside the first
            source's items, or beside the first output if the source's folder is read-only.
        num_workers: processes that read media.
        folder_prompts: whether a folder's `prompt.txt` and `trigger.txt` hold for its media.
        split: how videos are split; None captions them whole.
        clips: the folder in which each part becomes a file; None for parts without files.
        where: what a medium must satisfy; None for all media.
        aside: the folder that broken media are moved to, with their text files; None leaves them.
        begins_listings: whether the list of what filters leave out begins anew; not for a later one of several jobs.
    """

    sources: Sequence[str]
    prompts: PromptSet
    sampling: Mapping[str, Any] = field(default_factory=dict)
    style: CaptionStyle = field(default_factory=CaptionStyle)
    thinking: bool | None = False
    scan: ScanOptions = field(default_factory=ScanOptions)
    outputs: Sequence[OutputSpec] = field(kw_only=True)
    output_settings: OutputSettings = field(default_factory=OutputSettings)
    state: Path | None = None
    num_workers: int = 1
    folder_prompts: bool = False
    split: Split | None = None
    clips: Path | None = None
    where: Where | None = None
    aside: Path | None = None
    begins_listings: bool = True
    run: RunSettings = field(default_factory=RunSettings)

    def check(self) -> None:
        """Raises CaptioningError, MissingExtraError or ConfigError if sources or sampling are wrong."""
        if self.style.schema is not None and self.run.judge_below is not None:
            raise CaptioningError("A JSON caption has no sentences to judge. Leave --judge or --schema out.")
        if self.prompts.styles and (self.run.whole is not None or self.folders is not None):
            raise CaptioningError(
                "--summary, --timeline and --folder-prompts give each item one caption: ask one prompt, or leave "
                "them out."
            )
        if self.scan.shard is not None and any(spec.kind == "diffusion-pipe" for spec in self.outputs):
            raise CaptioningError(
                "--output diffusion-pipe writes one file for a folder, and machines with --shard would replace each "
                "other's. Caption on one machine, or with --ray or several --backend."
            )
        self._check_parts()
        self._check_aside()
        self.settings(SamplingParams())
        self.entries()

    def _check_aside(self) -> None:
        if self.aside is None:
            return
        made = [spec.path for spec in self.outputs if not spec.is_beside]
        made += [each for each in (self.clips, self.output_settings.folder, self.state_folder) if each is not None]
        if is_one_of(self.aside, [Path(source) for source in self.sources]):
            raise CaptioningError(
                f"--set-aside moves media out of their folder: '{printable(str(self.aside))}' is a source. "
                "Name another one."
            )
        if is_one_of(self.aside, made):
            raise CaptioningError(
                f"--set-aside needs a folder of its own, and the run writes to '{printable(str(self.aside))}'. Name "
                "another one."
            )
        above = next(each for each in (absolute(self.aside), *absolute(self.aside).parents) if os.path.lexists(each))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise CaptioningError(
                f"Nothing can be set aside in '{printable(str(self.aside))}': '{printable(str(above))}' is no folder "
                "that can be written to. Name another one."
            )

    def _check_parts(self) -> None:
        if self.run.whole is not None:
            if self.split is None:
                raise CaptioningError(f"--{self.run.whole} is made of a video's parts: say with --split which parts.")
            if self.style.schema is not None:
                raise CaptioningError(
                    f"--{self.run.whole} is text, not JSON: leave --schema or --{self.run.whole} out."
                )
            media = {spec.kind for spec in self.outputs} & {"dataset", "webdataset"}
            if media or self.output_settings.embed_media:
                raise CaptioningError(
                    f"With --{self.run.whole}, an output with media would hold the whole video beside its clips. "
                    "Choose text files, jsonl or parquet without --embed-media."
                )
        if self.split is None:
            if self.clips is not None:
                raise CaptioningError("--clips says where the parts of videos go: say with --split which parts.")
            return
        if self.clips is not None:
            if self.split.windows is not None:
                raise CaptioningError(
                    f"--split {self.split.text} takes an exact number of frames, and --clips begins at key frames. "
                    "Leave --clips out: the trainer cuts these windows itself."
                )
            return
        if any(spec.kind in ("dataset", "webdataset") for spec in self.outputs) or self.output_settings.embed_media:
            raise CaptioningError(
                "With --split, an output with media needs a file for each part: give --clips FOLDER. Other outputs "
                "only name the video and the times."
            )

    def settings(self, params: SamplingParams) -> CaptionSettings:
        """The settings that decide its captions; `params` are the model's defaults. Raises ConfigError."""
        schema = None if self.style.schema is None else self.style.schema.text
        return CaptionSettings(params.with_overrides(**self.sampling, json_schema=schema), self.style, self.thinking)

    def entries(self, manifest: Manifest | None = None, without: Sequence[Path] = ()) -> Iterator[Item | Unreadable]:
        """The sources' items, without what a run wrote or moved below a source.

        Args:
            manifest: of the run; None leaves media that were set aside in.
            without: further folders in a source whose content is left out.

        Raises:
            CaptioningError, MissingExtraError: see `scan`.
        """
        made = [folder for spec in self.outputs if (folder := spec.media_folder) is not None]
        made += [] if self.clips is None else [self.clips]
        made += [] if self.aside is None else [self.aside]
        if manifest is not None:
            without = [*without, *self.aside_folders(manifest)]
        made += [folder for folder in without if not is_one_of(folder, [Path(each) for each in self.sources])]
        only_files = self.scan.only_files or self.aside is not None
        options = replace(self.scan, without=(*self.scan.without, *made), only_files=only_files)
        return scan(self.sources, options, manifest)

    @property
    def folders(self) -> FolderPrompts | None:
        """The prompts of folders, if they are wanted."""
        return FolderPrompts(self.prompts) if self.folder_prompts else None

    @property
    def state_folder(self) -> Path:
        """The folder of the manifest and the failures."""
        if self.state is not None:
            return self.state
        if self.output_settings.folder is not None:
            return self.output_settings.folder / STATE_FOLDER
        first = Path(self.sources[0].removeprefix("@"))
        folder = first if first.is_dir() else first.parent
        files = [spec.path for spec in self.outputs if not spec.is_in_sources]
        # An existing folder is used even if it is read-only: opening its manifest says what is wrong.
        if files and not (folder / STATE_FOLDER).exists() and not os.access(folder, os.W_OK):
            folder = absolute(files[0]).parent
        return folder / STATE_FOLDER

    @property
    def manifest_path(self) -> Path:
        """The manifest; each shard has its own, so that machines can share a disk."""
        return self.state_folder / f"captions{self._shard}.sqlite"

    def other_manifests(self) -> list[Path]:
        """The manifests of other shard counts: the same items, divided differently."""
        own = self.manifest_path
        parts = None if self.scan.shard is None else self.scan.shard[1]
        others = (path for path in self.state_folder.glob("captions*.sqlite") if path != own)
        return [path for path in others if parts is None or not path.name.endswith(f"-of-{parts}.sqlite")]

    @property
    def failures_path(self) -> Path:
        return self.state_folder / f"failures{self._shard}.jsonl"

    @property
    def problems_path(self) -> Path:
        return self.state_folder / f"problems{self._shard}.jsonl"

    @property
    def skipped_path(self) -> Path:
        return self.state_folder / f"skipped{self._shard}.jsonl"

    @property
    def aside_path(self) -> Path:
        """The journal of what was set aside."""
        return self.state_folder / f"set-aside{self._shard}.jsonl"

    def aside_paths(self) -> list[Path]:
        """The journals that are there: also those of other shards, unless this is one."""
        found = sorted(self.state_folder.glob("set-aside*.jsonl"))
        return [path for path in found if self.scan.shard is None or path == self.aside_path]

    def aside_folders(self, manifest: Manifest) -> list[Path]:
        """Where media were set aside, by any shard."""
        paths = sorted(self.state_folder.glob("set-aside*.jsonl"))
        return list(dict.fromkeys(folder for path in paths for folder in Aside(manifest, path).folders))

    @property
    def _shard(self) -> str:
        return "" if self.scan.shard is None else "-{}-of-{}".format(*self.scan.shard)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        stopped: why the run ended early; None if it finished.
        failed: failed items without a caption, of this run and earlier ones, by the failure's kind.
        num_gone: deleted media whose captions are still there; only after a complete run.
        num_pruned: deleted media whose captions this run removed; only after a complete run.
        num_old: items of another --split, or whole videos that are in parts now, whose captions or clips are still
            there; only after a complete run.
        num_backups: files of people that this run replaced.
        backups: the folder where they are as they were; None if there are none.
        flagged: captions with flags, of this run and earlier ones, by the flag's kind.
        broken: the broken media that this run met and that are still there.
        set_aside: what this run set aside; None if that wasn't asked for, or if no medium at all could be read.
    """

    counts: Counts
    stopped: Literal["interrupted", "limit"] | Exception | None
    failed: Mapping[str, int]
    flagged: Mapping[str, int]
    num_gone: int = 0
    num_pruned: int = 0
    num_backups: int = 0
    backups: Path | None = None
    num_old: int = 0
    broken: Sequence[Broken] = ()
    set_aside: SetAside | None = None

    @property
    def num_failures(self) -> int:
        """Failed items without a caption."""
        return sum(self.failed.values())

    @property
    def exit_code(self) -> int:
        """0: all done; 3: some items failed, or there were none; 4: every item failed; 5: an error; 130: Ctrl-C."""
        if self.stopped == "interrupted":
            return 130
        if isinstance(self.stopped, Exception):
            return 5
        if not self.num_failures:
            return 0 if self.counts.num_found else 3
        return 3 if self.counts.num_done or self.counts.num_skipped else 4


async def carry_out(job: Job, captioner: Captioner, begun: Callable[[Run], Awaitable[None]] | None = None) -> Outcome:
    """Captions the sources' items.

    Args:
        begun: awaited with the run before it begins, to watch its counts and to stop it.

    Raises:
        CaptioningError: the run can't begin.
    """
    job.check()
    settings = job.settings(captioner.params)
    with ExitStack() as stack:
        manifest = stack.enter_context(closing(Manifest.open(job.manifest_path)))
        manifest.take_over(job.other_manifests())
        aside = Aside(manifest, job.aside_path)
        aside.end()
        judged, parts = job.run.judge_below is not None, job.split is not None
        output_settings = replace(
            job.output_settings,
            judged=judged,
            parts=parts,
            has_both=partial(_has_both, job, job.aside_folders(manifest)),
            styles=job.prompts.styles,
        )
        outputs = open_outputs(job.outputs, manifest, output_settings)
        for output in outputs:
            stack.enter_context(closing(output))
        workers = stack.enter_context(closing(MediaWorkers(captioner.processor, job.num_workers)))
        requests = RequestBuilder(job.prompts, settings, captioner.describe(), captioner.others, folders=job.folders)
        retry, distance = job.run.retry_failed, job.run.max_distance
        listings = Listings(
            manifest, job.failures_path, job.problems_path, job.skipped_path, begins=job.begins_listings
        )
        ledger = Ledger(
            manifest,
            outputs,
            requests,
            workers,
            listings=listings,
            retry_failed=retry,
            retry_broken=job.aside is not None,
            max_distance=None if job.run.skips_similar else distance,
            judge_below=job.run.judge_below,
        )
        splitter = None
        if job.split is not None:
            splitter = Splitter(
                job.split,
                ledger,
                workers,
                job.clips,
                without=aside.media,
                captions_wholes=job.run.whole is not None,
            )
        similar = distance if job.run.skips_similar else None
        kept = None if job.where is None and similar is None else Filter(job.where, similar, ledger, workers)
        how = replace(job.run, checks_kept=job.aside is not None)
        run = Run(job.entries(manifest), ledger, captioner, workers, how, splitter, kept)
        if begun is not None:
            await begun(run)
        counts = await run.go()
        set_aside = await asyncio.to_thread(_set_aside, job, aside, ledger, listings, run)
        failed, flagged = _conclude(job, listings, run)
        gone = left = set[Path]()
        num_old = 0
        try:
            if counts.scanned and run.stopped is None:
                # An empty source is probably not mounted.
                prunes = job.run.prune and counts.num_found > 0
                old_clips = set() if splitter is None else splitter.old_clips(removes=prunes)
                num_old = 0 if splitter is None or prunes else max(_of_other_splits(outputs, splitter), len(old_clips))
                gone = left = _gone(outputs)
                if prunes:
                    if splitter is not None:
                        _of_other_splits(outputs, splitter, removes=True)
                    media = {path for path in gone if path in old_clips or _is_below(path, job.sources)}
                    for output in outputs:
                        output.prune(media)
                    left = _gone(outputs)
        except OutputError as error:
            run.stop(error)
        kept, num_gone, num_pruned = manifest.backups, len(left), len(gone - left)
        at_end = (num_gone, num_pruned, kept.num_files, kept.folder, num_old)
        return Outcome(counts, run.stopped, failed, flagged, *at_end, list(ledger.broken.values()), set_aside)


def take_back(job: Job) -> TakenBack:
    """Moves back what runs of this job set aside; if it isn't a shard, what all shards set aside.

    Raises:
        CaptioningError: there is nothing, or a run works there.
        OutputError: the disk is full, read-only or fails.
    """
    if not (journals := job.aside_paths()):
        raise CaptioningError(
            f"There is nothing to take back: no run with its state in '{printable(str(job.state_folder))}' set media "
            "aside. Give the same sources, --output-dir and --state-dir as then."
        )
    done = TakenBack()
    for journal in journals:
        shard = journal.stem.removeprefix("set-aside")
        with closing(Manifest.open(job.state_folder / f"captions{shard}.sqlite")) as manifest:
            aside = Aside(manifest, journal)
            aside.end()
            one = aside.take_back()
        done.num += one.num
        done.num_texts += one.num_texts
        done.kept += one.kept
    return done


async def look_over(job: Job, captioner: Captioner) -> Estimate:
    """What a run would do and cost. Nothing is written.

    Raises:
        CaptioningError: the run couldn't begin.
    """
    job.check()
    settings = job.settings(captioner.params)
    with ExitStack() as stack:
        manifest = stack.enter_context(Manifest.borrowed(job.manifest_path))
        manifest.take_over(job.other_manifests())
        workers = stack.enter_context(closing(MediaWorkers(captioner.processor, job.num_workers)))
        specs = [spec for spec in job.outputs if spec.is_beside]
        sidecars = open_outputs(specs, manifest, replace(job.output_settings, styles=job.prompts.styles))
        requests = RequestBuilder(
            job.prompts, settings, captioner.describe(), captioner.others, with_plan=True, folders=job.folders
        )
        others, retry = len(specs) < len(job.outputs), job.run.retry_failed
        ledger = Ledger(
            manifest,
            sidecars,
            requests,
            workers,
            wants_all=others,
            retry_failed=retry,
            max_distance=job.run.max_distance,
            judge_below=job.run.judge_below,
        )
        try:
            splitter = None if job.split is None else Splitter(job.split, ledger, workers)
            entries = job.entries(manifest)
            return await estimate(
                entries, ledger, captioner, workers, limit=job.run.limit, splitter=splitter, where=job.where
            )
        finally:
            await ledger.close(complete=False)


def _has_both(job: Job, without: Sequence[Path]) -> bool:
    """Whether the sources have images and videos; also True if it takes reading a container to know."""
    if "@-" in job.sources:
        return True
    files = replace(job, scan=replace(job.scan, shard=None, only_files=True))
    kinds: set[MediaKind] = set()
    try:
        for entry in files.entries(without=without):
            if isinstance(entry, Item):
                kinds.add(entry.kind)
                if entry.path is None or len(kinds) > 1:
                    return True
    except CaptioningError:
        return True
    return False


def _of_other_splits(outputs: Sequence[Output], splitter: Splitter, *, removes: bool = False) -> int:
    """The most captions in an output of items that another split made; see `Output.of_other_splits`."""
    return max((output.of_other_splits(splitter.is_old, removes=removes) for output in outputs), default=0)


def _gone(outputs: Sequence[Output]) -> set[Path]:
    return set[Path]().union(*(output.gone() for output in outputs))


def _is_below(path: Path, sources: Sequence[str]) -> bool:
    """Whether a file is one of the sources or lies in one. No file lies in a list of files."""
    return not {absolute(Path(source)) for source in sources}.isdisjoint((path, *path.parents))


def _set_aside(job: Job, aside: Aside, ledger: Ledger, listings: Listings, run: Run) -> SetAside | None:
    """Sets aside the broken media that a run met, and forgets their failures. Not after an interruption or an error."""
    counts, broken = run.counts, ledger.broken
    # If nothing could be read, the disk or this program is more likely to be the cause.
    is_likely = len(broken) == 1 or counts.num_done + counts.num_skipped > 0
    if job.aside is None or run.stopped not in (None, "limit") or not is_likely:
        return None
    suffixes = [spec.target for spec in job.outputs if spec.is_beside]
    suffixes += [] if job.output_settings.video_suffix is None else [job.output_settings.video_suffix]
    try:
        done = aside.set_aside(broken.values(), job.aside, suffixes=suffixes, texts=job.output_settings.folder)
        for each in done.moved:
            listings.forget_file(each.path)
            del broken[each.path]
    except OutputError as error:
        run.stop(error)
        return None
    return done


def _conclude(job: Job, listings: Listings, run: Run) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Writes the lists of failures and flags; returns how many there are of each kind."""
    try:
        if run.counts.scanned:
            _forget_missing(job, listings, run.missing)
        listings.write()
        return listings.failed(), listings.flagged()
    except OutputError as error:
        run.stop(error)
        num_failed = run.counts.num_failed + run.counts.num_failed_before
        return {"of any kind": num_failed} if num_failed else {}, {}


def _forget_missing(job: Job, listings: Listings, names: Collection[str]) -> None:
    """Forgets failures and flags of items that a complete scan of their sources didn't give: deleted or excluded.

    Another command may use the same manifest with other sources. Its entries stay as long as their files exist.
    """
    sources = {absolute(Path(source)) for source in job.sources if not source.startswith("@")}
    has_own_state = job.state is None and job.output_settings.folder is None
    has_own_state &= absolute(job.state_folder.parent) in {*sources, *(source.parent for source in sources)}
    for name, listed in listings.listed():
        if name not in names:
            continue
        if listed is None:
            is_ours = has_own_state
        else:
            path = absolute(listed)
            is_ours = not os.path.lexists(path) or not sources.isdisjoint((path, *path.parents))
        if is_ours:
            listings.forget(name)


def default_workers() -> int:
    """The default number of processes that read media: one for two cores, up to 16."""
    return max(1, min(_MAX_WORKERS, usable_cores() // 2))
