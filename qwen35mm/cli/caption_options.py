"""The options of `qwen35mm caption` besides the model's, under the headings of its help."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import CaptioningError

if TYPE_CHECKING:
    from qwen35mm.captioning.job import Job
    from qwen35mm.captioning.media.splits import Split
    from qwen35mm.captioning.outputs import OutputSpec
    from qwen35mm.captioning.requests import CaptionStyle
    from qwen35mm.captioning.texts.prompts import Question
    from qwen35mm.captioning.texts.trainers import Trainer
    from qwen35mm.captioning.whole import WholeKind
    from qwen35mm.settings import ModelOptions

# The engine's default.
DEFAULT_SLOTS = 4
# Below this, the model denies the sentence rather than confirms it.
DEFAULT_JUDGE_BELOW = 0.5
_SHARD = re.compile(r"(\d+)/(\d+)")

_sources = functools.partial(typer.Option, rich_help_panel="Sources")
_video = functools.partial(typer.Option, rich_help_panel="Parts of videos")
_prompt = functools.partial(typer.Option, rich_help_panel="Prompt")
_reply = functools.partial(typer.Option, rich_help_panel="Reply")
_caption = functools.partial(typer.Option, rich_help_panel="Caption")
_output = functools.partial(typer.Option, rich_help_panel="Output")
_run = functools.partial(typer.Option, rich_help_panel="Run")
_remote = functools.partial(typer.Option, rich_help_panel="A model on a server")
_ray = functools.partial(typer.Option, rich_help_panel="Ray cluster")

Many = list[str] | None


@dataclass(frozen=True)
class Asked:
    """A prompt, and an option with a value that asks it alone."""

    question: Question
    option: str
    value: str

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.question.name or self.value


@dataclass(frozen=True)
class CaptionOptions:
    """Sources, prompt, reply, caption, outputs, run, and what computes the captions."""

    include: Annotated[Many, _sources(help="Only names like this, for example '*.png'; may be repeated.")] = None
    exclude: Annotated[Many, _sources(help="No names like this; stronger than --include.")] = None
    recursive: Annotated[bool, _sources(help="Read subfolders too.")] = True
    image_column: Annotated[
        str | None, _sources(help="Image column of parquet files; needed if there are several.")
    ] = None
    where: Annotated[
        str | None,
        _sources(
            help="Only media for which this holds: 'width >= 512 and sharpness > 20 and aspect < 2.5'. Names: width, "
            "height, aspect, pixels, duration, sharpness, letterbox, name, stem, folder, kind, bytes, metadata.KEY.",
            metavar="EXPRESSION",
        ),
    ] = None
    skip_similar: Annotated[
        int | None,
        _sources(
            help="Caption one of the media whose hashes differ in at most this many of 64 bits, and list the others.",
            min=0,
            max=32,
        ),
    ] = None
    shard: Annotated[str | None, _sources(help="I/N: part I of N equal parts, for N machines.", metavar="I/N")] = None

    split: Annotated[
        str,
        _video(
            help="never, scenes (at each cut), 30s, scenes:30s, or windows of frames as trainers take them: head:81, "
            "middle:81, chunk:81, slide:81/40, uniform:81*4, each also as head:81@16 at 16 frames a second."
        ),
    ] = "never"
    clips: Annotated[Path | None, _video(help="Folder in which each part becomes a file, copied losslessly.")] = None

    summary: Annotated[
        bool, _video("--summary", help="Give the whole video a summary of its parts' captions, by the model.")
    ] = False
    timeline: Annotated[
        bool, _video("--timeline", help="Give the whole video its parts' captions with their times, a line each.")
    ] = False

    preset: Annotated[
        Many,
        _prompt(
            help="short, detailed, tags, alt-text, ocr, events or plain. 'tags,short' gives each item both; repeated, "
            "with or without a weight (short:2), each item gets one of them."
        ),
    ] = None
    prompt: Annotated[Many, _prompt(help="Your own text, with placeholders such as {name} and {sidecar}.")] = None
    prompt_file: Annotated[
        list[Path] | None,
        _prompt(help="File with one prompt, or several between '---'; with 'name: ...' lines, each item gets all."),
    ] = None
    folder_prompts: Annotated[
        bool,
        _prompt(
            "--folder-prompts",
            help="Take a folder's own prompt.txt and trigger.txt for its media and those of its subfolders.",
        ),
    ] = False
    system: Annotated[str, _prompt(help="A system prompt, computed once.")] = ""

    max_tokens: Annotated[int, _reply(help="Most tokens of a reply.", min=1)] = 512
    seed: Annotated[int, _reply(help="The same seed gives the same prompts and samples.", min=0)] = 0
    think: Annotated[bool, _reply("--think/--no-think", help="Let the model think first.")] = False
    thinking_budget: Annotated[int | None, _reply(help="Most tokens of thinking.", min=0)] = None
    schema: Annotated[Path | None, _reply(help="File with a JSON schema that every caption satisfies.")] = None

    prefix: Annotated[str, _caption(help="Text before each caption, with placeholders as in prompts.")] = ""
    suffix: Annotated[str, _caption(help="Text after each caption, with placeholders.")] = ""
    trigger: Annotated[
        str, _caption(help="A word that is put first if the caption lacks it; may have {folder} and {metadata.KEY}.")
    ] = ""
    require: Annotated[Many, _caption(help="A word, or re:PATTERN, that a caption must have; may be repeated.")] = None
    forbid: Annotated[Many, _caption(help="A word, or re:PATTERN, that a caption must not have; may be repeated.")] = (
        None
    )
    attempts: Annotated[int, _caption(help="Most replies before one is taken with a flag.", min=1)] = 3
    one_line: Annotated[
        bool | None,
        _caption(
            "--one-line/--keep-lines",
            help="Replace line ends by spaces everywhere, or keep them. By default only text files replace them, "
            "except for the presets ocr and events.",
        ),
    ] = None
    clean: Annotated[
        bool,
        _caption(
            "--clean/--no-clean", help="Remove lead-ins, fences, quotes and repetitions; never for the preset ocr."
        ),
    ] = True
    trainer: Annotated[
        str | None,
        _caption(
            "--for",
            help="Trainer or model whose suffix, length and separator the text files get: sd-scripts, kohya-sdxl, sd3, "
            "flux, qwen-image, z-image, wan, wan2.2, hunyuan, hunyuan-1.5, ltx, ltx2, musubi, onetrainer, ai-toolkit "
            "or diffusion-pipe.",
            metavar="TRAINER",
        ),
    ] = None
    caption_tokens: Annotated[
        int | None, _caption(help="Most tokens of a caption for --for; by default the trainer's.", min=1)
    ] = None
    keep_unfinished: Annotated[
        bool, _caption("--keep-unfinished", help="Keep a last sentence that the limit cut off.")
    ] = False

    judge: Annotated[
        bool, _caption("--judge", help="Ask the model whether each sentence holds; flag what it doubts.")
    ] = False
    judge_below: Annotated[
        float | None,
        _caption(
            help="Doubt a sentence if its score, the probability of yes, is lower; 0.5 with --judge alone.",
            min=0,
            max=1,
        ),
    ] = None

    output: Annotated[
        Many,
        _output(
            help="sidecar[:.EXT], lines[:.EXT] (a line a caption), jsonl:FILE, images:FILE.jsonl, videos:FILE.jsonl, "
            "image-lines:FILE.jsonl, diffusion-pipe, ai-toolkit:FILE.json, parquet:FOLDER, dataset:FOLDER or "
            "webdataset:FOLDER; may be repeated."
        ),
    ] = None
    output_dir: Annotated[Path | None, _output(help="Folder of the text files; by default beside their media.")] = None
    video_suffix: Annotated[
        str | None,
        _output(
            help="Suffix of videos' text files, such as .video.txt: in Live Photos, still and clip share a name.",
            metavar=".EXT",
        ),
    ] = None
    mode: Annotated[
        Literal["skip", "overwrite", "append", "prepend"],
        _output(help="What to do with existing captions that aren't ours."),
    ] = "skip"
    separator: Annotated[
        str | None,
        _output(
            help="Between an existing text and ours; by default a space, a line end with --keep-lines, or --for's."
        ),
    ] = None
    keep_tokens: Annotated[
        int,
        _output(help="With --mode prepend: how many tags of an existing text stay first, as the trainer's.", min=0),
    ] = 0
    link_media: Annotated[
        bool,
        _output("--link-media", help="Hard-link media into dataset folders instead of copying; an edit changes both."),
    ] = False
    embed_media: Annotated[bool, _output("--embed-media", help="Put the media into parquet files too.")] = False
    records_per_shard: Annotated[int, _output(help="Records in a parquet file or tar.", min=1)] = 1000
    compact: Annotated[bool, _output("--compact", help="Merge parquet files and tars that aren't full.")] = False

    dry_run: Annotated[bool, _run("--dry-run", help="Say what would be done and what it costs; write nothing.")] = False
    preview: Annotated[
        int | None,
        _run(
            help="Caption so many random media with every prompt, and show them side by side on a page with the hours "
            "that a run takes; write nothing.",
            min=1,
            max=1000,
            metavar="N",
        ),
    ] = None
    open: Annotated[
        bool, _run("--open/--no-open", help="Show the preview in the browser, or as a table in the terminal.")
    ] = True
    set_aside: Annotated[
        Path | None,
        _run(
            help="Move media that can't be read into this folder, with their text files: trainers may stop at them.",
            metavar="FOLDER",
        ),
    ] = None
    take_back: Annotated[bool, _run("--take-back", help="Only move back what --set-aside moved.")] = False
    limit: Annotated[int | None, _run(help="Most items to caption.", min=1)] = None
    retry_failed: Annotated[bool, _run("--retry-failed", help="Try again what failed before.")] = False
    prune: Annotated[bool, _run("--prune", help="At the end of a whole run, remove captions of deleted media.")] = False
    share_similar: Annotated[
        int | None,
        _run(
            help="Share a caption between media whose hashes differ in at most this many of 64 bits; 4 is careful.",
            min=0,
            max=32,
        ),
    ] = None
    media_workers: Annotated[int | None, _run(help="Processes that read media ahead.", min=1)] = None
    state_dir: Annotated[
        Path | None, _run(help="Folder of the manifest; by default .qwen35mm in --output-dir or the first source.")
    ] = None

    backend: Annotated[
        Many,
        _remote(
            help="Address of an OpenAI-compatible server; may be repeated. Several share the work, each with --slots.",
            metavar="URL",
        ),
    ] = None
    backend_key: Annotated[str | None, _remote(help="The servers' key.", envvar="OPENAI_API_KEY", show_envvar=True)] = (
        None
    )
    remote_video: Annotated[Literal["frames", "video_url"], _remote(help="Send videos as images, or whole.")] = "frames"

    ray: Annotated[
        str | None,
        _ray(help="local, auto (the cluster of this machine) or HOST:PORT; needs the extra 'ray'.", metavar="ADDRESS"),
    ] = None
    ray_actors: Annotated[
        int | None, _ray(help="Engines on the cluster; by default one a GPU, or without GPUs one a machine.", min=1)
    ] = None

    def job(self, sources: list[str], model: ModelOptions, sampling: SamplingChoices | None = None) -> Job:
        """The job. Wrong options are refused before a model is loaded, except those that depend on existing outputs.

        Raises:
            CaptioningError, MissingExtraError, RequestError, ConfigError: an option can't be used.
        """
        from qwen35mm.captioning.job import Job, default_workers
        from qwen35mm.captioning.outputs import OutputSettings, parse_output
        from qwen35mm.captioning.run import RunSettings
        from qwen35mm.captioning.sources.scan import ScanOptions
        from qwen35mm.captioning.texts.prompts import PromptSet
        from qwen35mm.captioning.texts.templates import new_path
        from qwen35mm.captioning.where import Where

        if self.share_similar is not None and self.skip_similar is not None:
            raise CaptioningError("--share-similar captions all of a group, --skip-similar one: choose one of them.")
        trainer = self._trainer()
        prompts = PromptSet([each.question for each in self.asked()], system=self.system, seed=self.seed)
        keeps_lines = self.timeline or any(each.lines for each in prompts.questions)
        outputs = tuple(parse_output(text) for text in self._outputs(trainer, has_styles=bool(prompts.styles)))
        job = Job(
            sources,
            prompts,
            {
                "max_tokens": self.max_tokens,
                "seed": self.seed,
                "thinking_budget": self.thinking_budget,
                **(sampling or SamplingChoices()).values(),
            },
            self._style(trainer),
            thinking=self.think,
            scan=ScanOptions(
                recursive=self.recursive,
                include=tuple(self.include or ()),
                exclude=tuple(self.exclude or ()),
                image_column=self.image_column,
                shard=self._shard(),
                limits=model.limits,
            ),
            outputs=outputs,
            output_settings=OutputSettings(
                mode=self.mode,
                folder=None if self.output_dir is None else Path(new_path(str(self.output_dir), "--output-dir")),
                video_suffix=self._video_suffix(outputs),
                one_line=not keeps_lines if self.one_line is None else self.one_line,
                separator=trainer.separator if self.separator is None and trainer is not None else self.separator,
                keep_tokens=self.keep_tokens,
                link_media=self.link_media,
                embed_media=self.embed_media,
                records_per_shard=self.records_per_shard,
                compact=self.compact,
            ),
            state=self.state_dir,
            num_workers=self.media_workers or default_workers(),
            folder_prompts=self.folder_prompts,
            split=self._split(),
            where=None if self.where is None else Where(self.where),
            clips=None if self.clips is None else Path(new_path(str(self.clips), "--clips")),
            aside=None if self.set_aside is None else Path(new_path(str(self.set_aside), "--set-aside")),
            run=RunSettings(
                slots=model.slots or DEFAULT_SLOTS,
                limit=self.limit,
                retry_failed=self.retry_failed,
                prune=self.prune,
                max_distance=self.share_similar if self.skip_similar is None else self.skip_similar,
                skips_similar=self.skip_similar is not None,
                whole=self._whole(),
                judge_below=DEFAULT_JUDGE_BELOW if self.judge and self.judge_below is None else self.judge_below,
            ),
        )
        # A source may have been set aside itself.
        if not self.take_back:
            job.check()
        return job

    def asked(self) -> list[Asked]:
        """The prompts, in order. Raises CaptioningError."""
        from qwen35mm.captioning.texts.presets import preset_question
        from qwen35mm.captioning.texts.prompts import Question, read_prompt_file

        found = [Asked(Question(text), "--prompt", text) for text in self.prompt or ()]
        for path in self.prompt_file or ():
            questions = read_prompt_file(path)
            found += [Asked(each, "--prompt", each.text) for each in questions]
            if len(questions) == 1:
                found[-1] = Asked(questions[0], "--prompt-file", str(path))
        for text in self.preset or ():
            if "," in text:
                names = [name.strip() for name in text.split(",")]
                found += [Asked(replace(preset_question(name), name=name), "--preset", name) for name in names if name]
                continue
            name, _, weight = text.partition(":")
            try:
                found.append(Asked(preset_question(name, float(weight) if weight else 1.0), "--preset", name))
            except ValueError:
                raise CaptioningError(f"A preset's weight is a number, as in {name}:2; got '{weight}'.") from None
        return found or [Asked(preset_question("short"), "--preset", "short")]

    def _trainer(self) -> Trainer | None:
        from qwen35mm.captioning.texts.trainers import trainer_named

        if self.trainer is None:
            if self.caption_tokens is not None:
                raise CaptioningError("--caption-tokens needs a trainer: give --for.")
            return None
        if self.output_dir is not None:
            raise CaptioningError(f"{self.trainer} reads text files beside their media: leave --output-dir out.")
        return trainer_named(self.trainer)

    def _outputs(self, trainer: Trainer | None, *, has_styles: bool) -> list[str]:
        kind = "sidecar" if trainer is None or not has_styles else trainer.several
        is_beside = kind in ("sidecar", "lines")
        chosen = kind if trainer is None or not is_beside else f"{kind}:{trainer.suffix}"
        return [chosen if text == "sidecar" else text for text in self.output or ("sidecar",)]

    def _video_suffix(self, outputs: Sequence[OutputSpec]) -> str | None:
        from qwen35mm.captioning.outputs import parse_output

        if self.video_suffix is None:
            return None
        if sum(spec.is_beside for spec in outputs) != 1:
            raise CaptioningError("--video-suffix is for one output of text files: give --output sidecar once.")
        if not self.video_suffix:
            raise CaptioningError("--video-suffix takes a suffix, such as .video.txt; got an empty text.")
        return parse_output(f"sidecar:{self.video_suffix}").target

    def _style(self, trainer: Trainer | None) -> CaptionStyle:
        from qwen35mm.captioning.requests import CaptionStyle
        from qwen35mm.captioning.texts.json_schema import JsonSchema
        from qwen35mm.captioning.texts.trainers import Length
        from qwen35mm.captioning.texts.words import Words

        style = CaptionStyle(
            schema=None if self.schema is None else JsonSchema.read(self.schema),
            words=Words(tuple(self.require or ()), tuple(self.forbid or ())),
            max_attempts=self.attempts,
            prefix=self.prefix,
            suffix=self.suffix,
            trigger=self.trigger,
            keep_unfinished=self.keep_unfinished,
            one_line=bool(self.one_line),
            cleans=self.clean,
            length=None if trainer is None else Length.of(trainer, self.caption_tokens),
        )
        if not self.backend and style.schema is not None:
            from qwen35mm.engine import check_json_schema

            check_json_schema(style.schema.text)
        return style

    def _split(self) -> Split | None:
        from qwen35mm.captioning.media.splits import parse_split

        split = parse_split(self.split)
        if split is not None and self.clips is None and self.backend and self.remote_video == "video_url":
            raise CaptioningError(
                "--remote-video video_url sends whole files: give --clips FOLDER with --split, or send frames."
            )
        return split

    def _whole(self) -> WholeKind | None:
        if self.summary and self.timeline:
            raise CaptioningError("--summary and --timeline both are the whole video's caption: choose one.")
        return "summary" if self.summary else "timeline" if self.timeline else None

    def _shard(self) -> tuple[int, int] | None:
        if self.shard is None:
            return None
        found = _SHARD.fullmatch(self.shard)
        if found is None:
            raise CaptioningError(f"--shard takes I/N, such as 1/4; got '{self.shard}'.")
        return int(found[1]), int(found[2])
