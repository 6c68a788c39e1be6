"""A look before a run: a few random media of the sources, each captioned with every prompt. Nothing is stored."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Literal

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.cost import Machine, Range, Trial, costs, share_of
from qwen35mm.captioning.filters import Filter
from qwen35mm.captioning.items import Failed, Item, Unreadable
from qwen35mm.captioning.job import Job
from qwen35mm.captioning.judge import flagged
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.media.workers import MediaWorkers, Prepared
from qwen35mm.captioning.outputs import open_outputs
from qwen35mm.captioning.parts import Splitter
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest, RequestBuilder
from qwen35mm.captioning.sample import Sample, draw, drawn
from qwen35mm.captioning.texts.prompts import PromptSet
from qwen35mm.errors import CaptioningError, Qwen35mmError
from qwen35mm_preprocess import MediaKind

_LOOKS_AT_ONCE = 8


@dataclass(eq=False)
class Row:
    """One medium of a preview.

    Attributes:
        item: the medium or, of a video that is split, one of its parts.
        answers: for each prompt a caption, or why there is none; None until it comes.
        seconds: in a slot, for each prompt.
        failed: why no prompt was asked.
        changed: the preview's clock when the row last changed.
    """

    item: Item
    answers: list[Caption | Failed | None]
    seconds: list[float]
    failed: Failed | None = None
    read_s: float = 0.0
    num_parts: int = 1
    changed: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.failed is not None or None not in self.answers

    @property
    def num_captions(self) -> int:
        return sum(isinstance(answer, Caption) for answer in self.answers)

    def trial(self) -> Trial | None:
        """What it cost; None unless all captions are there."""
        captions = [answer for answer in self.answers if isinstance(answer, Caption)]
        if len(captions) < len(self.answers):
            return None
        prefill_s = [caption.prefill_s for caption in captions]
        return Trial(self.item.kind, tuple(self.seconds), prefill_s, self.read_s, self.num_parts)


class Preview:
    """A preview of a job. One event loop fills it, once; any thread may read it meanwhile. `close` removes its files.

    Args:
        num: media.
        adapters: names of adapters; after the model alone, each answers every prompt, too.

    Attributes:
        prompts: the job's prompts, each with a name of its own.
        num_asked: media that were asked for; there are fewer `rows` while they are looked for.
        clock: counts changes of rows.

    Raises:
        CaptioningError: the job can't be previewed.
    """

    def __init__(self, job: Job, num: int, adapters: Sequence[str] = ()) -> None:
        if job.folder_prompts:
            raise CaptioningError(
                "--preview compares prompts, and --folder-prompts gives each folder its own: leave one of them out."
            )
        questions = job.prompts.questions
        if not job.prompts.styles:
            questions = [replace(each, name=f"prompt-{at}", weight=1.0) for at, each in enumerate(questions, 1)]
        several = [*questions]
        taken = {each.name for each in questions}
        free = (name for name in map("adapted-{}".format, itertools.count(1)) if name not in taken)
        for adapter in adapters:
            several += [replace(each, name=next(free), adapter=adapter) for each in questions]
        self.job = job
        self.prompts = PromptSet(several, system=job.prompts.system, seed=job.prompts.seed)
        self.num_asked = num
        self.sample = Sample()
        self.rows: list[Row] = []
        self.state: Literal["looking", "loading", "asking", "done", "stopped"] = "looking"
        self.clock = 0
        self._num: Mapping[MediaKind, Range] = {}
        self._machine = Machine(1, 1, 1)
        self._copying = threading.Lock()
        self._copies: dict[int, Path] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="qwen35mm-preview-", ignore_cleanup_errors=True)

    def close(self) -> None:
        """Removes the copies of media that lie in containers."""
        self._folder.cleanup()

    def look(self) -> None:
        """Scans the sources and draws from them.

        Raises:
            CaptioningError: there are fewer media, or none.
        """
        job = self.job
        with Manifest.borrowed(job.manifest_path) as manifest:
            seed = job.prompts.seed
            self.sample = draw(job.entries(manifest), self.num_asked, seed=seed, where=job.where)
        self._check(self.sample.num.total())
        if job.where is None or not (job.where.needs_size or job.where.needs_pixels):
            self._show(self.sample.items)
        self._num = self._limited({kind: Range(num, num) for kind, num in self.sample.num.items()})
        self.state = "loading"

    async def fill(self, captioner: Captioner) -> None:
        """Captions the media, as many at one time as the run would.

        Raises:
            CaptioningError: too few media satisfy `--where`.
        """
        job = self.job
        slots = captioner.num_at_once or job.run.slots
        self._machine = Machine(slots, min(slots, self.num_asked), job.num_workers)
        with ExitStack() as stack:
            manifest = stack.enter_context(Manifest.borrowed(job.manifest_path))
            workers = stack.enter_context(closing(MediaWorkers(captioner.processor, job.num_workers)))
            beside = [spec for spec in job.outputs if spec.is_beside]
            texts = open_outputs(beside, manifest, replace(job.output_settings, styles=job.prompts.styles))
            requests = RequestBuilder(self.prompts, job.settings(captioner.params), captioner.describe())
            ledger = Ledger(manifest, texts, requests, workers, wants_all=True)
            try:
                if not self.rows:
                    await self._find(ledger, workers)
                self.state = "asking"
                asking = _Asking(self, captioner, ledger, workers, slots)
                await asyncio.gather(*map(asking.caption, self.rows))
                self.state = "done"
            finally:
                await ledger.close(complete=False)

    def stop(self) -> None:
        """Notes that nothing more comes."""
        if self.state != "done":
            self.state = "stopped"

    def note(self, row: Row) -> None:
        """Counts a change of a row."""
        row.changed = self.clock + 1
        self.clock += 1

    def costs(self, prompt: int | None) -> dict[MediaKind, Range]:
        """Seconds of a whole run by kind, from the rows so far; see `cost.costs`."""
        trials = [trial for row in self.rows if (trial := row.trial()) is not None]
        return costs(trials, self._num, self._machine, prompt)

    @property
    def num(self) -> Mapping[MediaKind, Range]:
        """How many media the run has, by kind."""
        return self._num

    @property
    def num_tried(self) -> Counter[MediaKind]:
        """The media that `costs` knows of, by kind."""
        return Counter(trial.kind for row in self.rows if (trial := row.trial()) is not None)

    @property
    def not_counted(self) -> list[str]:
        """The job's options that change the cost in a way that isn't known."""
        run = self.job.run
        similar = "--skip-similar" if run.skips_similar else "--share-similar"
        found = {similar: run.max_distance is not None, "--summary": run.whole == "summary"}
        return [name for name, given in found.items() if given]

    def file(self, number: int) -> Path:
        """The file of a row's medium; one that lies in a container is copied. Raises OSError."""
        item = self.rows[number].item
        if isinstance(item.source, Path):
            return item.source
        with self._copying:
            if number not in self._copies:
                path = Path(self._folder.name, f"{number}{item.suffix()}")
                path.write_bytes(b"".join(item.pieces()))
                self._copies[number] = path
            return self._copies[number]

    def _show(self, items: Sequence[Item]) -> None:
        num = len(self.prompts.questions)
        for item in items:
            row = Row(item, [None] * num, [0.0] * num)
            self.rows.append(row)
            self.note(row)

    async def _find(self, ledger: Ledger, workers: MediaWorkers) -> None:
        """Takes the first media that satisfy `--where`, and estimates how many there are."""
        self.state = "looking"
        passes = Filter(self.job.where, None, ledger, workers)

        async def is_wanted(item: Item) -> bool:
            needs = await ledger.needs(item)
            return not isinstance(needs, CaptionRequest) or await passes.reason(needs, decodes=True) is None

        tried, found = Counter[MediaKind](), Counter[MediaKind]()
        remaining = iter(self.sample.items)
        while len(self.rows) < self.num_asked and (some := list(islice(remaining, _LOOKS_AT_ONCE))):
            wanted = await asyncio.gather(*map(is_wanted, some))
            for item, is_one in zip(some, wanted, strict=True):
                tried[item.kind] += 1
                found[item.kind] += is_one
                if is_one and len(self.rows) < self.num_asked:
                    self._show([item])
        num_tried = tried.total()
        is_all = num_tried == self.sample.num.total()
        if len(self.rows) < self.num_asked:
            self._check(len(self.rows), "" if is_all else f" of the {num_tried:,} that were looked at")
        self._num = self._limited(
            {
                kind: Range(found[kind], found[kind])
                if is_all
                else Range(num, num) * share_of(found[kind], tried[kind])
                for kind, num in self.sample.num.items()
            }
        )

    def _limited(self, num: Mapping[MediaKind, Range]) -> Mapping[MediaKind, Range]:
        """How many media are captioned with the job's limit."""
        limit, all_of_them = self.job.run.limit, sum(each.high for each in num.values())
        share = 1.0 if limit is None or limit >= all_of_them else limit / all_of_them
        return {kind: each * Range(share, share) for kind, each in num.items()}

    def _check(self, num: int, among: str = "") -> None:
        if num >= self.num_asked:
            return
        options = "--include, --exclude, --shard and --where"
        if num == 0:
            raise CaptioningError(
                f"Nothing to preview: the sources have no image and no video that passes {options}{among}."
            )
        media = "1 image or video passes" if num == 1 else f"{num:,} images and videos pass"
        raise CaptioningError(
            f"--preview takes at most as many media as there are. It got {self.num_asked:,}, and {media} "
            f"{options}{among}. Give --preview {num}."
        )


@dataclass
class _Asking:
    """Captions rows, of which a few are read and a few are captioned at one time."""

    preview: Preview
    captioner: Captioner
    ledger: Ledger
    workers: MediaWorkers
    slots: int

    def __post_init__(self) -> None:
        job = self.preview.job
        self._splitter = None if job.split is None else Splitter(job.split, self.ledger, self.workers)
        # Each slot has its next medium decoded.
        self._held = asyncio.Semaphore(2 * self.slots)
        self._reading = asyncio.Semaphore(job.num_workers)
        self._slots = asyncio.Semaphore(self.slots)

    async def caption(self, row: Row) -> None:
        """Captions a row."""
        async with self._held:
            try:
                async with self._reading:
                    read = await self._read(row)
            except Qwen35mmError as error:
                read = Failed("output", str(error))
            if isinstance(read, Failed):
                row.failed = read
                self.preview.note(row)
                return
            requests, prepared = read
            async with self._slots:
                for at, request in enumerate(requests):
                    began_s = monotonic()
                    answer = await self._answer(request, prepared)
                    row.seconds[at] = monotonic() - began_s
                    # Last: another thread may read the row.
                    row.answers[at] = answer
                    self.preview.note(row)

    async def _read(self, row: Row) -> tuple[list[CaptionRequest], Prepared | None] | Failed:
        failed = await self._choose_part(row)
        needs = failed or await self.ledger.needs(row.item)
        if isinstance(needs, Failed):
            return needs
        assert isinstance(needs, CaptionRequest), "all captions are wanted"
        requests = list(needs.styles.values())
        if self.captioner.form is None:
            return requests, None
        began_s = monotonic()
        prepared = await self.workers.prepare(needs.item, needs.content, self.captioner.form)
        row.read_s = monotonic() - began_s
        return prepared if isinstance(prepared, Failed) else (requests, prepared)

    async def _answer(self, request: CaptionRequest, prepared: Prepared | None) -> Caption | Failed:
        below = self.preview.job.run.judge_below
        answer = await self.captioner.caption(request, prepared, judges=below is not None)
        return flagged(answer, below) if isinstance(answer, Caption) and below is not None else answer

    async def _choose_part(self, row: Row) -> Failed | None:
        """Replaces a video that is split by one of its parts."""
        item, parts = row.item, list[Item]()
        if self._splitter is None or item.kind != "video":
            return None
        async with contextlib.aclosing(self._splitter.of(item)) as found:
            async for part in found:
                if isinstance(part, Unreadable):
                    return Failed(part.kind, part.message)
                parts.append(part)
        row.num_parts = len(parts)
        row.item = parts[drawn(self.preview.prompts.seed, f"{item.name} part") % len(parts)]
        return None
